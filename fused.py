"""What a model does with one token on CUDA, by Triton kernels: five launches a layer, beside attention's two.

A step multiplies one row by every matrix, so its time is that of reading the weights, if nothing comes between. Two
things do. Each launch waits until the one before has ended, and then for the first bytes; so a product takes along what
stands before and behind it: the norm, the bias, SwiGLU, the sum with the residual stream. And memory answers late: some
30 KB must be on their way to each processor of an H200 all the time (4.8 TB/s · 0.8 µs / 132), so each thread asks for
several rows at once, 16 bytes of each. native.py does the same on a CPU.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from linear import Int4Linear, Int8Linear, Linear
from native import ADD, SET, SWIGLU, for_few

# ---- the kernels


@triton.jit
def _inputs(x, norm, at, held):
    """Some of x, times the norm's weights, and its squares. What a norm divides by is the same for all inputs, so it is
    divided by once they are summed, and no weight has to wait for it."""
    value = tl.load(x + at, mask=held, other=0.0)
    square = value * value
    if norm is not None:
        value *= tl.load(norm + at, mask=held, other=0.0)
    return value, square


@triton.jit
def _rows(x, norm, weight, rows, real, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """Rows of a matrix [out, INPUTS] times x: [rows, 1], and the sum of x's squares."""
    columns = tl.arange(0, COLUMNS)
    weight += rows.to(tl.int64)[:, None] * INPUTS + columns  # a vocabulary's matrix may be more than int32 can count
    sums = tl.zeros([rows.shape[0], COLUMNS // EACH], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, INPUTS, COLUMNS):
        held = start + columns < INPUTS
        # Each weight is needed but once, and x, which is to stay near, by every program.
        w = tl.load(weight + start, mask=real[:, None] & held, other=0.0, eviction_policy="evict_first").to(tl.float32)
        value, square = _inputs(x, norm, start + columns, held)
        squares += square
        # What one thread has loaded at once it sums by itself, so that it keeps few registers.
        sums += tl.sum(tl.reshape(w * value, [rows.shape[0], COLUMNS // EACH, EACH]), 2)
    return tl.sum(sums, 1)[:, None], tl.sum(squares, 0)


@triton.jit
def _strips(
    x, norm, packed, steps, strips, real, OUTPUTS, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr
):
    """Strips of eight rows in 4 bits, as ``unpacked`` has them, times x: [strips, 8], and the sum of x's squares.

    A word holds eight inputs of one row, all of one group. Its bits become numbers without a conversion: four bits put
    at the upper end of the mantissa of 128.0 make it 128 + n.
    """
    BLOCKS: tl.constexpr = COLUMNS // (32 * EACH)
    columns, places = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 4)
    packed += strips.to(tl.int64)[:, None] * INPUTS + columns
    steps += (strips * 8)[:, None] + places // 8 * OUTPUTS + places % 8
    sums = tl.zeros([strips.shape[0], COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, INPUTS, COLUMNS):
        held = start + columns < INPUTS
        words = tl.load(packed + start, mask=real[:, None] & held, other=0, eviction_policy="evict_first")
        pair = tl.load(steps + start // 32 * OUTPUTS, mask=real[:, None] & (start + places * 4 < INPUTS), other=0)
        value, square = _inputs(x, norm, start + columns, held)
        squares += square
        # x is loaded as it lies, side by side, and then cut into the first inputs of all words, the second ones, ...
        value = tl.permute(tl.reshape(value, [BLOCKS, EACH, 2, 2, 4, 2]), (0, 4, 1, 3, 2, 5))
        even, odd = tl.split(value)
        a, b = tl.split(even)
        c, d = tl.split(odd)
        pieces = tl.split(a) + tl.split(b) + tl.split(c) + tl.split(d)
        products = tl.zeros([strips.shape[0], COLUMNS], tl.float32)
        values = tl.zeros([COLUMNS], tl.float32)
        for i in tl.static_range(8):
            value = tl.reshape(tl.broadcast_to(pieces[i][:, None], [BLOCKS, 8, 4, EACH]), [COLUMNS])
            number = (words >> max(4 * i - 16, 0)) << max(16 - 4 * i, 0)
            products += ((number & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) * value
            values += value
        # A step and its middle serve four words each; loaded once, they take a register and not eight.
        pair = tl.permute(tl.reshape(pair, [strips.shape[0], BLOCKS, EACH, 8]), (0, 1, 3, 2))[:, :, :, None]
        pair = tl.reshape(tl.broadcast_to(pair, [strips.shape[0], BLOCKS, 8, 4, EACH]), [strips.shape[0], COLUMNS])
        step, middle = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
        sums += products * step + values * (middle - 136 * step)  # of the 136, 8 are the format's
    sums = tl.reshape(sums, [strips.shape[0], BLOCKS, 8, 4 * EACH])
    return tl.sum(tl.sum(sums, 3), 1), tl.sum(squares, 0)


@triton.jit
def _product(
    y, x, norm, eps, weight, steps, bias, tiles,
    TILES: tl.constexpr, TALL: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """TILES of the ``tiles`` of y, of TALL rows each: all their inputs, so that no other program adds to them."""
    HALVES: tl.constexpr = 2 if GATED else 1
    first, numbers = tl.program_id(0) * TILES, tl.arange(0, TILES * HALVES)
    # A tile of gates, and then the one of what they let through.
    mine = first + numbers // HALVES + numbers % HALVES * tiles
    real = first + numbers // HALVES < tiles
    if TALL == 1:
        sums, squares = _rows(x, norm, weight, mine, real, INPUTS, COLUMNS, EACH)
    else:
        sums, squares = _strips(x, norm, weight, steps, mine, real, tiles * HALVES * 8, INPUTS, COLUMNS, EACH)
    if norm is not None:
        sums *= tl.rsqrt(squares / INPUTS + eps)
    rows = mine[:, None] * TALL + tl.arange(0, TALL)
    if TALL == 1 and steps is not None:
        sums *= tl.load(steps + rows, mask=real[:, None], other=0.0).to(tl.float32)
    if bias is not None:
        sums += tl.load(bias + rows, mask=real[:, None], other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [TILES, 2, TALL]), (0, 2, 1)))
        sums = gate / (1 + tl.exp(-gate)) * up
    tile = first + tl.arange(0, TILES)[:, None]
    y += tile * TALL + tl.arange(0, TALL)
    if ADDS:
        sums += tl.load(y, mask=tile < tiles, other=0.0)
    tl.store(y, sums, mask=tile < tiles)


@triton.jit
def _turn(qkv, norms, eps, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """One head of q or k, where it stands. By one warp, so that all is read before anything is written."""
    head, pair = tl.program_id(0), tl.arange(0, WIDTH)
    real, at = pair < HALF, qkv + head * 2 * HALF + pair
    low, high = tl.load(at, mask=real, other=0.0), tl.load(at + HALF, mask=real, other=0.0)
    if norms is not None:
        scale, weight = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * HALF) + eps), norms + pair
        weight += tl.where(head < HEADS, 0, 2 * HALF)
        low *= scale * tl.load(weight, mask=real, other=0.0)
        high *= scale * tl.load(weight + HALF, mask=real, other=0.0)
    if cos is not None:
        turned = low * tl.load(cos + pair, mask=real) + high * tl.load(sin + pair, mask=real)
        high = high * tl.load(cos + HALF + pair, mask=real) + low * tl.load(sin + HALF + pair, mask=real)
        low = turned
    tl.store(at, low, mask=real)
    tl.store(at + HALF, high, mask=real)


# ---- a matrix


class Product:
    """What a Linear, with the norm before it if there is one, makes of one token; in float32."""

    def __init__(self, linear: Linear, norm: nn.Module | None = None, ending: int = SET):
        weight, steps, tall = stored(linear)
        self._norm = (norm.weight, norm.eps) if norm else (None, 0.0)
        self._outputs = linear.outputs // 2 if ending == SWIGLU else linear.outputs
        tiles = self._outputs // tall
        self._matrix = weight, steps, linear.bias, tiles
        self._sizes = sizes(weight, tiles, ending == SWIGLU) | {"TALL": tall, "INPUTS": linear.inputs}
        self._ending = ending

    def __call__(self, x: Tensor) -> Tensor:
        """x [1, in] float32 -> [1, out] float32."""
        y = x.new_empty((1, self._outputs))
        self._into(y, x, self._ending)
        return y

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add it to y [1, out], where that stands."""
        self._into(y, x, ADD)

    def _into(self, y: Tensor, x: Tensor, ending: int) -> None:
        *matrix, tiles = self._matrix
        _product[(triton.cdiv(tiles, self._sizes["TILES"]),)](
            *(y, x.contiguous(), *self._norm, *matrix, tiles),
            **self._sizes, GATED=ending == SWIGLU, ADDS=ending == ADD, enable_fp_fusion=True,
        )  # fmt: skip


def stored(linear: Linear) -> tuple[Tensor, Tensor | None, int]:
    """A Linear's weights as they are kept, their steps, and how many rows lie together."""
    if isinstance(linear, Int8Linear):
        return linear.packed, linear.steps, 1
    if isinstance(linear, Int4Linear):
        return linear.packed, linear.steps.view(torch.int32), 8  # a step and its middle are one word
    return linear.weight, None, 1


def sizes(weight: Tensor, tiles: int, gated: bool) -> dict[str, int]:
    """How a product is shared out among programs, and within one: by shapes and the number of processors alone.

    A thread loads 16 bytes of each row at once, the most that it can, and a program's warps lie side by side, so that
    what they take of x serves all of its rows. Eight rows of a program of four warps are 16 KB, and there are registers
    for three to seven such programs on a processor: while one computes, the others load. A small matrix is cut finer,
    so that each processor has twelve warps.

    In 4 bits a thread takes two strips, since it computes more for each byte and needs registers for that. There are
    an eighth as many strips as rows, so the warps are more, as far as there are inputs for them.
    """
    many = processors(weight.device)
    if weight.dtype is torch.int32:
        most, each, warps = 2, weight.shape[3], 16 if tiles <= 4 * many else 8
        warps = min(warps, triton.next_power_of_2(weight.shape[1]))
    else:
        most, each, warps = 8, 16 // weight.element_size(), 4
    most = most // 2 if gated else most
    while most > 1 and tiles * warps < 12 * many * most:
        most //= 2
    return {"TILES": most, "COLUMNS": 32 * warps * each, "EACH": each, "num_warps": warps}


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ---- a model's steps


class Halves:
    """A layer's ``before`` and ``after``."""

    def __init__(self, layer):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Product(attention.qkv_proj, layer.input_layernorm)
        self.o = Product(attention.o_proj)
        self.gate_up = Product(mlp.gate_up_proj, layer.post_attention_layernorm, SWIGLU)
        self.down = Product(mlp.down_proj)
        self.heads, self.kv_heads, self.dim = attention.heads, attention.kv_heads, attention.head_dim
        norms, self.turned = (attention.q_norm, attention.k_norm), attention.turned
        self.norms = torch.stack([norm.weight for norm in norms]) if norms[0] else None
        self.eps = norms[0].eps if norms[0] else 0.0

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, half = self.qkv(x), self.dim // 2
        if self.turned or self.norms is not None:
            angles = (cos, sin) if self.turned else (None, None)
            _turn[(self.heads + self.kv_heads,)](
                qkv, self.norms, self.eps, *angles,
                HEADS=self.heads, HALF=half, WIDTH=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=True,
            )  # fmt: skip
        return qkv.view(1, -1, self.dim).split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds to x where that stands, and returns it."""
        self.o.add(x, y.float())
        self.down.add(x, self.gate_up(x))
        return x


def quicken(model) -> None:
    """Have a Llama on CUDA, all of it on one device, make its steps of one token with the kernels, if they can read its
    weights."""
    if not all(takes(module) for module in model.modules() if isinstance(module, Linear)):
        return
    for layer in model.layers:
        halves = Halves(layer)
        layer.before, layer.after = for_few(halves.before, layer.before, 1), for_few(halves.after, layer.after, 1)
    model.head = for_few(Product(model.lm_head, model.norm), model.head, 1)


def takes(linear: Linear) -> bool:
    """Whether the kernels can read a matrix: one in 4 bits only in the order that torch gives it on most GPUs."""
    return not isinstance(linear, Int4Linear) or order_is_known()


@cache
def order_is_known() -> bool:
    numbers = torch.randint(16, (64, 128), generator=torch.Generator().manual_seed(0), dtype=torch.int32).cuda()
    return torch.equal(unpacked(Int4Linear(128, 64)._interleave(numbers)), numbers)


def unpacked(packed: Tensor) -> Tensor:
    """packed [out / 8, in / 32 E, 32, E] int32, as torch's CUDA kernel reads it -> numbers 0 to 15, int32 [out, in].

    A strip of eight outputs lies together, and in it blocks of 32 E inputs. Of the 32 places of a block four in turn
    belong to an output; the i-th of them has a word of each of the E groups of 32 inputs, in which the inputs 2 i, and
    8, 16 and 24 behind it, come first, and then the ones that follow each of these.
    """
    numbers = packed[..., None] >> torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32) & 15
    strips, blocks, _, each, _ = numbers.shape
    numbers = numbers.view(strips, blocks, 8, 4, each, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)
    return numbers.reshape(strips * 8, blocks * each * 32)
