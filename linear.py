"""A matrix of weights: kept in 32, 16, 8 or 4 bits a weight, and multiplied.

A decode step reads every weight once and does little else, so fewer bytes are less time. Weights are rounded to equal
steps, and activations are not (arXiv 2208.07339 and 2210.17323 say why that is enough); a product of a few rows reads
the packed weights as they are, by torch's own kernels, and one of many rows unpacks them by blocks first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

aten = torch.ops.aten


def empty(*shape: int) -> nn.Parameter:
    """A parameter that has a shape and no memory yet; loading gives it both value and dtype."""
    return fixed(torch.empty(shape, device="meta"))


def fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


# ---- a rank's part


class Whole:
    """How the parts of a matrix that ranks hold come together. Here there is nothing to bring together: this rank has
    all of it, or all that it needs."""

    def join(self, product: Tensor) -> Tensor:
        """A rank's product -> that of all ranks."""
        return product

    def rows(self, held: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
        """Rows of the whole matrix, ``held`` giving those of this rank's part; indices [T] int64 -> [T, in]."""
        return held(indices)

    def largest(self, values: Tensor) -> Tensor:
        """Of values [out], each the largest of a row of this rank's part: the largest of the whole row."""
        return values


class Columns(Whole):
    """Each rank has some of the inputs, and their products are summed (Megatron-LM, arXiv 1909.08053, §3)."""

    def join(self, product: Tensor) -> Tensor:
        distributed.all_reduce(product)
        return product

    def largest(self, values: Tensor) -> Tensor:
        distributed.all_reduce(values, distributed.ReduceOp.MAX)
        return values


class Rows(Whole):
    """Each rank has some of the outputs, ``count`` from ``first`` on, of ``total``, and their products are laid end to
    end. The parts are equally long, so that the last one may reach beyond the end."""

    def __init__(self, first: int, count: int, total: int):
        self.first, self.count, self.total = first, count, total

    def join(self, product: Tensor) -> Tensor:
        parts = [torch.empty_like(product) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, product.contiguous())
        return torch.cat(parts, -1)[:, : self.total]

    def rows(self, held: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
        own = indices - self.first
        mine = (own >= 0) & (own < self.count)
        found = held(own.clamp(0, self.count - 1)).where(mine[:, None], 0)
        distributed.all_reduce(found)
        return found


WHOLE = Whole()


# ---- whole numbers or not


class Linear(nn.Module):
    """y = x Wᵀ (+ b), x of any float dtype rounded to the weights'; [T, in] -> [T, out]."""

    part = WHOLE

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = empty(outputs, inputs)
        self.bias = empty(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.part.join(self.product(x.to(self.dtype)))
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the matrix, as an embedding table has them: indices [T] int64 -> [T, in] float32."""
        return self.part.rows(self._rows_held, indices)

    def _rows_held(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight).float()

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic: what x is rounded to, and y's."""
        return self.weight.dtype

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def bytes_in(self, dtype: torch.dtype) -> int:
        """What ``bytes`` will be, from the shape alone."""
        return sum(parameter.numel() for parameter in self.parameters()) * dtype.itemsize


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weightᵀ [in, out], by the call that is fastest where they are; result in their dtype."""
    rows, dtype = x.shape[0], x.dtype
    if x.device.type == "cpu" and dtype is not torch.float32:
        if rows == 1 and dtype is torch.bfloat16:
            return torch.mv(weight, x[0])[None]  # reads the weights up to 1.6 times as fast as F.linear
        if rows >= 8 and not cpu_multiplies(dtype):
            return F.linear(x.float(), weight.float()).to(dtype)  # 10 times as fast as torch's own 16-bit loop
    return F.linear(x, weight)


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has matrix kernels for a dtype on this CPU; on many desktops it has none for 16 bits."""
    if dtype is torch.float32:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


# ---- packed


class Packed(Linear):
    """A Linear that keeps small whole numbers, and the steps that they count. Arithmetic is in bfloat16, for which
    torch has kernels, or in float32."""

    few: int  # rows up to which the kernel is faster than unpacking
    along = 0  # the dimension of the steps that counts outputs
    packed_at_once = 2**16  # weights: so few that what each takes while it is packed does not leave holes in memory
    unpacked_at_once = 2**20

    def pack(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Keep weight [out, in], of any float dtype, for arithmetic in ``dtype``; some rows at a time."""
        parts = [self._pack(rows.float(), dtype) for rows in weight.split(self._rows(self.packed_at_once))]
        packed, steps = zip(*parts, strict=True)
        self.weight, self.packed, self.steps = None, fixed(torch.cat(packed)), fixed(torch.cat(steps, self.along))

    def product(self, x: Tensor) -> Tensor:
        if self._reads_packed(x):
            return self._kernel(x)
        rows = self._rows(self.unpacked_at_once)
        blocks = zip(self.packed.split(rows), self.steps.split(rows, self.along), strict=True)
        return torch.cat([self._unpacked_product(x, *block) for block in blocks], -1)

    @property
    def dtype(self) -> torch.dtype:
        return self.steps.dtype

    def _rows(self, weights: int) -> int:
        """Outputs that are about so many weights; kernels pack 64 of them together."""
        return max(64, weights // self.inputs // 64 * 64)


class Int8Linear(Packed):
    """W = step · packed, with one step for each output: the largest weight of its row / 127."""

    few = 20

    def bytes_in(self, dtype: torch.dtype) -> int:
        steps_and_bias = self.outputs * (2 if self.bias is not None else 1)
        return self.outputs * self.inputs + steps_and_bias * dtype.itemsize

    def _rows_held(self, indices: Tensor) -> Tensor:
        return self.packed[indices].float() * self.steps[indices, None]

    def _pack(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        steps = (self.part.largest(weight.abs().amax(1)) / 127).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        return (weight / steps[:, None]).round().to(torch.int8), steps

    def _reads_packed(self, x: Tensor) -> bool:
        # With inputs that are no multiple of 16, torch's kernel reads past the end of a row.
        return len(x) <= self.few and x.dtype is torch.bfloat16 and self.inputs % 16 == 0 and x.device.type != "mps"

    def _kernel(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.packed, self.steps)

    def _unpacked_product(self, x: Tensor, packed: Tensor, steps: Tensor) -> Tensor:
        return multiply(x, packed.to(x.dtype)) * steps  # bfloat16 holds the 255 numbers exactly


class Int4Linear(Packed):
    """W = step · (packed - 8) + middle, with a step and a middle for each 32 inputs of an output: sixteen values from
    the group's smallest weight to its largest, or to 0 where that is beyond them."""

    few = 64
    along = 1
    group = 32

    @classmethod
    def takes(cls, inputs: int, outputs: int) -> bool:
        """Whether a matrix of this shape can be kept so."""
        return inputs % cls.group == 0 and outputs % 64 == 0

    def bytes_in(self, dtype: torch.dtype) -> int:
        steps_and_bias = 2 * self.outputs * self.inputs // self.group + (0 if self.bias is None else self.outputs)
        return self.outputs * self.inputs // 2 + steps_and_bias * dtype.itemsize

    def _pack(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        groups = weight.unflatten(1, (-1, self.group))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        step = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        middle = (low + 8 * step).to(dtype)
        numbers = ((groups - middle[..., None]) / step[..., None] + 8).round().clamp(0, 15).flatten(1).int()
        return self._interleave(numbers), torch.stack((step, middle), -1).transpose(0, 1)  # [groups, out, 2]

    def _interleave(self, numbers: Tensor) -> Tensor:
        """Two of the numbers [out, in] to a byte, in the order in which the device's kernel reads them."""
        if numbers.device.type == "cpu":
            return aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        tiles = next(tiles for tiles in (8, 4, 2) if self.inputs % (16 * tiles) == 0)
        return aten._convert_weight_to_int4pack((numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8), tiles)

    def _reads_packed(self, x: Tensor) -> bool:
        return (len(x) <= self.few and x.dtype is torch.bfloat16) or x.device.type != "cpu" or not rows_in_a_block()

    def _kernel(self, x: Tensor) -> Tensor:
        kernel = aten._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else aten._weight_int4pack_mm
        return kernel(x, self.packed, self.group, self.steps)

    def _unpacked_product(self, x: Tensor, packed: Tensor, steps: Tensor) -> Tensor:
        wide = x.dtype if cpu_multiplies(x.dtype) else torch.float32
        numbers = unpack_int4(packed, rows_in_a_block()).sub_(8).unflatten(0, (-1, self.group)).to(wide)
        step, middle = steps.to(wide)[:, None].unbind(-1)  # [groups, 1, out], beside [groups, 32, out]
        weight = torch.addcmul(middle.contiguous(), numbers, step.contiguous()).flatten(0, 1)
        return (x.to(wide) @ weight).to(x.dtype)


def unpack_int4(packed: Tensor, rows: int) -> Tensor:
    """packed [out, in / 2] uint8, as torch's CPU kernel reads it -> numbers 0 to 15, int8 [in, out].

    A block of ``rows`` outputs lies together, input after input, and a byte holds two of its outputs: one of the first
    half in the low bits, one of the second half in the high ones.
    """
    blocks = packed.view(-1, 2 * packed.shape[1], rows // 2).transpose(0, 1)
    return torch.cat((blocks & 15, blocks >> 4), -1).flatten(1).view(torch.int8)


@cache
def rows_in_a_block() -> int:
    """The ``rows`` of ``unpack_int4`` on this machine, where torch's order depends on the vector units; 0 when it is
    another order altogether, in which case only torch's kernel can read it."""
    numbers = torch.randint(16, (64, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return next((rows for rows in (64, 32) if torch.equal(unpack_int4(packed, rows).T, numbers)), 0)


# ---- formats


def int4(inputs: int, outputs: int, bias: bool = False) -> Packed:
    """A matrix in 4 bits, or in 8 where its shape does not divide into groups and blocks."""
    return (Int4Linear if Int4Linear.takes(inputs, outputs) else Int8Linear)(inputs, outputs, bias)


# What makes the matrices of the layers, and what the head: it decides which token it is, and 8 bits cost it nothing.
FORMATS = {None: (Linear, Linear), "int8": (Int8Linear, Int8Linear), "int4": (int4, Int8Linear)}
