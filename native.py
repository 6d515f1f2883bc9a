"""What a model does on a CPU, by the kernels that the machine's own C compiler makes of kernels/, once, in two seconds.

A step multiplies one row by every matrix. torch's calls do that at a third to a half of the speed at which memory
could be read, and need about fifty small calls a layer beside; here it is six. Many rows are faster too where torch has
no kernels for the dtype. Where there is no compiler, or it is not Linux, torch's calls do it all.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from linear import WHOLE, Int4Linear, Int8Linear, Linear, cpu_multiplies, rows_in_a_block

FEW = 16  # tokens; with more, torch's kernels are faster where it has some for the dtype
SET, ADD, SWIGLU = range(3)  # what becomes of a product
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 5}
INT8, INT4, UINT8, UINT4 = 3, 4, 5, 6
FLAGS = ("-O2", "-ftree-vectorize", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")


# ---- the library


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had."""
    try:
        kernels = ctypes.CDLL(str(built()))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # a person may have no home
        return None
    kernels.product.argtypes = [
        *(c_void_p, c_void_p, c_long, c_void_p, c_float, c_void_p, c_int, c_void_p, c_void_p),
        *(c_long, c_long, c_int, c_int),
    ]
    kernels.turn.argtypes = [c_void_p, *[c_long] * 5, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int]
    kernels.attend.argtypes = [*[c_void_p] * 6, c_long, c_void_p, c_void_p, *[c_long] * 3, c_int]
    return kernels


def built() -> Path:
    """The library's file, compiled unless it was before for the same source, compiler and processor. Raises OSError or
    SubprocessError."""
    sources, threads = sorted((Path(__file__).parent / "kernels").glob("*.[ch]")), openmp()
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    cpu = [line for line in Path("/proc/cpuinfo").read_bytes().splitlines() if line.startswith((b"flags", b"Features"))]
    what = [*(source.read_bytes() for source in sources), compiler, *FLAGS, str(threads), *cpu[:1]]
    name = f"native-{sha256(repr(what).encode()).hexdigest()[:16]}.so"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(base) / "kv-chat" / name
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = file.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & 0o022:  # what lies there is run
        raise PermissionError(f"{file.parent} is not ours alone")
    if not is_whole(file):
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = {source: Path(folder) / f"{source.stem}.o" for source in sources if source.suffix == ".c"}
            compiling = ([*compiler.split(), *FLAGS, "-c", source, "-o", to] for source, to in made.items())
            with ThreadPoolExecutor() as pool:
                list(pool.map(run, compiling))
            linked = Path(folder) / name
            run([*compiler.split(), "-shared", *made.values(), threads, "-lm", "-o", linked])
            linked.write_bytes(linked.read_bytes() + sha256(linked.read_bytes()).digest())  # no loader reads that far
            os.replace(linked, file)
    return file


def is_whole(file: Path) -> bool:
    """Whether a library is there, and ends in the digest of what lies before: a part of one would kill who loads it."""
    data = file.read_bytes() if file.is_file() else b""
    return sha256(data[:-32]).digest() == data[-32:]


def run(command: list) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def openmp() -> Path:
    """The OpenMP library that torch has loaded: with one of their own, the kernels' threads would wait for work on the
    cores on which torch's do the same. Raises OSError."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    loaded = [line.split(maxsplit=5)[-1] for line in maps if re.search(r"/lib[gi]?omp[^/]*\.so", line)]
    if not loaded:
        raise FileNotFoundError("torch has no OpenMP library")
    return Path(max(loaded, key=lambda path: "/torch/" in path))


def computes(device: torch.device, head_dim: int) -> bool:
    """Whether the kernels serve heads of this size there; some of their values lie on the stack."""
    return device.type == "cpu" and library() is not None and head_dim % library().lanes() == 0 and head_dim <= 1024


# ---- the kernels


class Stretches:
    """For each of some queries the tokens that it sees, in order: triples of the memory, of a first slot in it and of
    one behind the last."""

    def __init__(self, of: list[list[tuple[int, int, int]]]):
        self.queries, flat = len(of), [number for triples in of for triple in triples for number in triple]
        self.ends = (c_long * len(of))(*accumulate(map(len, of)))
        self.flat = (c_long * len(flat))(*flat)


class Memory(ctypes.Structure):
    """Where K and V of a layer lie, as attention.c has it."""

    _fields_ = [
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_long) for name in ("k_head", "k_token", "v_head", "v_token", "kind")),
        *((name, c_void_p) for name in ("k_scales", "v_scales")),
        *((name, c_long) for name in ("k_scales_head", "k_low", "v_scales_head", "v_low", "scales")),
    ]

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Memory:
        """k and v [Hkv, slots, D], dense along D."""
        return cls(k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2], KINDS[k.dtype])

    @classmethod
    def packed(cls, k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor) -> Memory:
        """k and v [Hkv, slots, D or D / 2] uint8, and as quantized.py has them the scales [2, Hkv, groups, 1, D] and
        [2, Hkv, slots, 1]."""
        memory, scales = cls.of(k, v), (k_scales, v_scales)
        memory.k_scales, memory.v_scales = (x.data_ptr() for x in scales)
        (memory.k_low, memory.k_scales_head), (memory.v_low, memory.v_scales_head) = (x.stride()[:2] for x in scales)
        memory.scales, memory.kind = KINDS[k_scales.dtype], UINT8 if k.shape[2] == k_scales.shape[4] else UINT4
        return memory


class Held:
    """The memories of a layer, over which steps attend. Who makes it keeps the tensors."""

    def __init__(self, kv_heads: int, *memories: Memory):
        self._kv_heads, self._memories = kv_heads, (Memory * len(memories))(*memories)
        self._attend = library().attend

    def attend(self, q: Tensor, seen: Stretches, new: tuple[Tensor, Tensor] = ()) -> Tensor:
        """softmax(q kᵀ / √D) v for each of N queries, q [N, Hq, D] -> [N, Hq, D] float32. ``new`` k and v [N, Hkv, D]
        are stored first, each in the last slot that its query sees."""
        count, heads, dim = q.shape
        rows = [
            x if x.dtype is torch.float32 and x.stride()[1:] == (dim, 1) else x.float().contiguous() for x in (q, *new)
        ]
        k, v = (x.data_ptr() for x in rows[1:]) if new else (None, None)
        y, strides = torch.empty(count, heads, dim), (c_long * 3)(*(x.stride(0) for x in rows))
        where = self._memories, seen.queries, seen.ends, seen.flat
        sizes = self._kv_heads, heads // self._kv_heads, dim, torch.get_num_threads()
        self._attend(y.data_ptr(), rows[0].data_ptr(), k, v, strides, *where, *sizes)
        return y


def held(layers: Iterable[tuple[Tensor, Tensor]]) -> list[Held] | None:
    """For K and V of each layer, if the kernels serve them."""
    layers = [tuple(layer) for layer in layers]
    serve = all(computes(keys.device, keys.shape[-1]) for keys, _ in layers)
    return [Held(len(keys), Memory.of(keys, values)) for keys, values in layers] if serve else None


class Product:
    """What a Linear, with the norm before it if there is one, makes of some tokens; all in float32."""

    def __init__(self, linear: Linear, norm: nn.Module | None = None, ending: int = SET):
        self.linear = linear
        weight, kind, steps = stored(linear)
        scale = steps.float() if kind == INT8 else steps
        bias, alone = None if linear.bias is None else linear.bias.float(), linear.part is WHOLE
        self._late = None if alone else bias  # what ranks bring together has it once
        self._kept = weight, scale, bias if alone else None, norm and norm.weight
        weight, scale, bias, norm_weight = (tensor if tensor is None else tensor.data_ptr() for tensor in self._kept)
        self._outputs = linear.outputs // 2 if ending == SWIGLU else linear.outputs
        self._norm = norm_weight, norm.eps if norm else 0.0
        self._matrix = weight, kind, scale, bias, linear.outputs, linear.inputs
        self._ending, self._product = ending, library().product

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] float32 -> [T, out] float32, of all ranks."""
        y = torch.empty(x.shape[0], self._outputs)
        self._into(y, x, self._ending)
        y = self.linear.part.join(y)
        return y if self._late is None else y + self._late

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add it to y [T, out], where that stands."""
        if self.linear.part is WHOLE:
            self._into(y, x, ADD)
        else:
            y += self(x)

    def _into(self, y: Tensor, x: Tensor, ending: int) -> None:
        x, threads = x.contiguous(), torch.get_num_threads()
        self._product(y.data_ptr(), x.data_ptr(), x.shape[0], *self._norm, *self._matrix, ending, threads)


def stored(linear: Linear) -> tuple[Tensor, int, Tensor | None]:
    """A Linear's weights as they are kept, of which kind, and their steps."""
    if isinstance(linear, Int8Linear):
        return linear.packed, INT8, linear.steps
    if isinstance(linear, Int4Linear):
        return linear.packed, INT4, linear.steps
    return linear.weight, KINDS[linear.dtype], None


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
        self.norms, self.turned = (attention.q_norm, attention.k_norm), attention.turned

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, (q_norm, k_norm) = self.qkv(x), self.norms
        if self.turned or q_norm is not None:
            library().turn(
                *(qkv.data_ptr(), *qkv.shape, self.heads, self.kv_heads, self.dim),
                *((q_norm.weight.data_ptr(), k_norm.weight.data_ptr(), q_norm.eps) if q_norm else (None, None, 0)),
                *((cos.data_ptr(), sin.data_ptr()) if self.turned else (None, None)),
                torch.get_num_threads(),
            )
        return qkv.view(x.shape[0], -1, self.dim).split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds to x where that stands, and returns it."""
        self.o.add(x, y.float())
        self.down.add(x, self.gate_up(x))
        return x


def quicken(model) -> None:
    """Have a Llama make its steps with the kernels, if they can read it where it is."""
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    halved = [layer.mlp.gate_up_proj for layer in model.layers]
    if model.device.type != "cpu" or library() is None or not all([*map(takes, matrices), *map(halves_apart, halved)]):
        return
    most = FEW if cpu_multiplies(model.dtype) else math.inf
    for layer in model.layers:
        halves = Halves(layer)
        layer.before = for_few(halves.before, layer.before, most)
        layer.after = for_few(halves.after, layer.after, most)
    model.head = for_few(Product(model.lm_head, model.norm), model.head, most)


def takes(linear: Linear) -> bool:
    """Whether the kernels can read a matrix: one in 4 bits only in the order that torch gives it on most machines."""
    if not isinstance(linear, Int4Linear):
        return True
    return linear.dtype is torch.bfloat16 and rows_in_a_block() == block()


def halves_apart(linear: Linear) -> bool:
    """Whether the first outputs of a matrix and the last ones are in blocks of their own."""
    return not isinstance(linear, Int4Linear) or linear.outputs // 2 % block() == 0


def block() -> int:
    """Outputs that the kernels take together of a matrix in 4 bits."""
    return 4 * library().lanes()


def for_few(fast, usual, most: float):
    """``fast`` for at most ``most`` tokens, which the first argument has, and ``usual`` for more."""
    return lambda x, *others: (fast if x.shape[0] <= most else usual)(x, *others)
