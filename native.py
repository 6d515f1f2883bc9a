"""What a model does on a CPU, by the kernels that the machine's own C compiler makes of kernels/, once.

A step multiplies one row by every matrix. torch's calls do that at a third to a half of the speed at which memory
could be read, and need about fifty small calls a layer beside, between which nothing is read at all; here the whole
step is one call, of a list of jobs. Many rows are faster too where torch has no kernels for the dtype. Where there is
no compiler, or it is not Linux, torch's calls do it all.
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
    kernels.perform.argtypes = [c_void_p, c_long, c_int]
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


# ---- jobs for the kernels, as they have them


class Job(ctypes.Structure):
    """Field by field as in kernels/. Tensors are given by their addresses, and whoever makes a job keeps them until it
    is performed."""

    _fields_ = [("run", c_void_p)]

    def __init__(self, *arguments):
        super().__init__(_address(type(self).__name__.lower()), *arguments)


@cache
def _address(name: str) -> int:
    return ctypes.cast(library()[name], c_void_p).value


class Product(Job):
    """y (=, += or SwiGLU of) weight · x + bias, x normed first where norm is given."""

    _fields_ = [
        *(("weight", c_void_p), ("kind", c_long), ("steps", c_void_p), ("bias", c_void_p)),
        *(("outputs", c_long), ("inputs", c_long), ("norm", c_void_p), ("eps", c_float)),
        *(("y", c_void_p), ("x", c_void_p), ("tokens", c_long), ("ending", c_long)),
    ]


class Turn(Job):
    """The heads of q and k in x, normed where weights are given, turned where cosines are."""

    _fields_ = [
        *(("x", c_void_p), *((name, c_long) for name in ("tokens", "width", "heads", "kv_heads", "head_dim"))),
        *(("q_norm", c_void_p), ("k_norm", c_void_p), ("eps", c_float), ("cos", c_void_p), ("sin", c_void_p)),
    ]


class Attend(Job):
    """softmax(q kᵀ / √D) v over what lies in ``memories``, k and v being stored there first."""

    _fields_ = [
        *((name, c_void_p) for name in ("y", "q", "k", "v")),
        *(("rows", c_long * 3), ("memories", c_void_p), ("seen", c_void_p)),
        *((name, c_long) for name in ("kv_heads", "group", "head_dim")),
    ]

    @classmethod
    def of(cls, y: Tensor, kv_heads: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Attend:
        """All float32, each row of heads dense."""
        _, heads, dim = q.shape
        addresses = (x if x is None else x.data_ptr() for x in (y, q, k, v))
        rows = (c_long * 3)(*(0 if x is None else x.stride(0) for x in (q, k, v)))
        return cls(*addresses, rows, None, None, kv_heads, heads // kv_heads, dim)

    def over(self, held: Held, seen: Seen) -> Attend:
        self.memories, self.seen = held.address, seen.address
        return self


def perform(jobs: list[Job]) -> None:
    """Each after the one before it. All threads work at each, and stay together from the first to the last."""
    library().perform((c_void_p * len(jobs))(*map(ctypes.addressof, jobs)), len(jobs), torch.get_num_threads())


# ---- attention


class Seen(ctypes.Structure):
    """What some queries see: the newest tokens of some sequences, so many of each, each its own sequence up to itself,
    of that the newest ``window`` tokens. A sequence lies, in order, in stretches of a layer's memories: which one, a
    first slot in it, and one behind the last."""

    _fields_ = [
        *((name, c_long) for name in ("sequences", "window")),
        *((name, c_void_p) for name in ("counts", "ends", "stretches")),
    ]

    def __init__(self, sequences: list[tuple[int, list[tuple[int, int, int]]]], window: int | None = None):
        counts, stretches = zip(*sequences, strict=True)
        flat = [number for triples in stretches for triple in triples for number in triple]
        self._kept = [(c_long * len(x))(*x) for x in (counts, [*accumulate(map(len, stretches))], flat)]
        super().__init__(len(sequences), window or 2**62, *map(ctypes.addressof, self._kept))
        self.address = ctypes.addressof(self)


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
        self.address = ctypes.addressof(self._memories)

    def attend(self, q: Tensor, seen: Seen, new: tuple[Tensor, Tensor] = ()) -> Tensor:
        """softmax(q kᵀ / √D) v for each of N queries, q [N, Hq, D] -> [N, Hq, D] float32. ``new`` k and v [N, Hkv, D]
        are stored first, each in the slot of its query's own token."""
        rows = [
            x if x.dtype is torch.float32 and x.stride()[1:] == (x.shape[2], 1) else x.float().contiguous()
            for x in (q, *new)
        ]
        y = torch.empty(q.shape)
        perform([Attend.of(y, self._kv_heads, *rows).over(self, seen)])
        return y


def held(layers: Iterable[tuple[Tensor, Tensor]]) -> list[Held] | None:
    """For K and V of each layer, if the kernels serve them."""
    layers = [tuple(layer) for layer in layers]
    serve = all(computes(keys.device, keys.shape[-1]) for keys, _ in layers)
    return [Held(len(keys), Memory.of(keys, values)) for keys, values in layers] if serve else None


# ---- products


class Matrix:
    """A Linear as the kernels multiply by it, with the norm before it if there is one."""

    def __init__(self, linear: Linear, norm: nn.Module | None = None, ending: int = SET):
        self.linear, self._ending = linear, ending
        weight, kind, steps = stored(linear)
        scale = steps.float() if kind == INT8 else steps
        bias, self.alone = None if linear.bias is None else linear.bias.float(), linear.part is WHOLE
        self._late = None if self.alone else bias  # what ranks bring together has it once
        self._kept = weight, scale, bias if self.alone else None, norm and norm.weight
        weight, scale, bias, norm_weight = (tensor if tensor is None else tensor.data_ptr() for tensor in self._kept)
        self.outputs = linear.outputs // 2 if ending == SWIGLU else linear.outputs
        sizes = linear.outputs, linear.inputs
        self._matrix = weight, kind, scale, bias, *sizes, norm_weight, norm.eps if norm else 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] float32 -> [T, out] float32, of all ranks."""
        y = torch.empty(len(x), self.outputs)
        perform([self.job(y, x := x.contiguous())])
        y = self.linear.part.join(y)
        return y if self._late is None else y + self._late

    def job(self, y: Tensor, x: Tensor, ending: int | None = None) -> Product:
        """This rank's product into y [T, out], of x [T, in], both float32 and dense."""
        return Product(*self._matrix, y.data_ptr(), x.data_ptr(), len(x), self._ending if ending is None else ending)


def stored(linear: Linear) -> tuple[Tensor, int, Tensor | None]:
    """A Linear's weights as they are kept, of which kind, and their steps."""
    if isinstance(linear, Int8Linear):
        return linear.packed, INT8, linear.steps
    if isinstance(linear, Int4Linear):
        return linear.packed, INT4, linear.steps
    return linear.weight, KINDS[linear.dtype], None


# ---- a model's passes


class Halves:
    """A layer's ``before`` and ``after``, for any cache."""

    def __init__(self, layer):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Matrix(attention.qkv_proj, layer.input_layernorm)
        self.o = Matrix(attention.o_proj)
        self.gate_up = Matrix(mlp.gate_up_proj, layer.post_attention_layernorm, SWIGLU)
        self.down = Matrix(mlp.down_proj)
        self.heads, self.kv_heads, self.dim = attention.heads, attention.kv_heads, attention.head_dim
        self.norms, self.turned = (attention.q_norm, attention.k_norm), attention.turned

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = torch.empty(len(x), self.qkv.outputs)
        perform(self.jobs_before(qkv, x, cos, sin))
        return self.split(qkv)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds to x where that stands, and returns it."""
        y = y.float().contiguous()
        if self.o.alone:
            inner = torch.empty(len(x), self.gate_up.outputs)
            perform(self.jobs_after(x, y, inner))
            return x
        x += self.o(y.flatten(1))
        x += self.down(self.gate_up(x))
        return x

    def jobs_before(self, qkv: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> list[Job]:
        product, (q_norm, k_norm) = self.qkv.job(qkv, x), self.norms
        if not self.turned and q_norm is None:
            return [product]
        sizes = *qkv.shape, self.heads, self.kv_heads, self.dim
        norms = (q_norm.weight.data_ptr(), k_norm.weight.data_ptr(), q_norm.eps) if q_norm else (None, None, 0)
        places = (cos.data_ptr(), sin.data_ptr()) if self.turned else (None, None)
        return [product, Turn(qkv.data_ptr(), *sizes, *norms, *places)]

    def jobs_after(self, x: Tensor, y: Tensor, inner: Tensor) -> list[Job]:
        return [self.o.job(x, y, ADD), self.gate_up.job(inner, x), self.down.job(x, inner, ADD)]

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.heads, self.kv_heads, self.kv_heads
        return qkv.view(len(qkv), -1, self.dim).split_with_sizes(heads, 1)


class Pass:
    """All layers over so many tokens: jobs over memory that stays, of which attention's are told where to look."""

    def __init__(self, layers: list[Halves], *given: Tensor):
        self._given = x, cos, sin = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in given]
        first, self.tokens = layers[0], len(x)
        qkv, inner = (torch.empty(len(x), matrix.outputs) for matrix in (first.qkv, first.gate_up))
        y, split = torch.empty(len(x), first.heads, first.dim), first.split(qkv)
        self._kept, self._attends = (qkv, inner, y), [Attend.of(y, first.kv_heads, *split) for _ in layers]
        self._jobs = [
            job
            for layer, attend in zip(layers, self._attends, strict=True)
            for job in (*layer.jobs_before(qkv, x, cos, sin), attend, *layer.jobs_after(x, y, inner))
        ]

    def __call__(self, where: list[tuple[Held, Seen]], *given: Tensor) -> Tensor:
        for mine, new in zip(self._given, given, strict=True):
            mine.copy_(new)
        for attend, (held, seen) in zip(self._attends, where, strict=True):
            attend.over(held, seen)
        perform(self._jobs)
        return self._given[0].clone()


class Layers:
    """All layers, in one call where the kernels attend too: between two calls from Python, a processor that could read
    weights does nothing."""

    def __init__(self, layers: list[Halves], usual):
        self._layers, self._usual = layers, usual
        self._spare: list[Pass] = []  # the newest, unless it is in use or broke off

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache) -> Tensor:
        if (where := kv_cache.for_kernels(len(x))) is None:
            return self._usual(x, cos, sin, kv_cache)
        try:
            one = self._spare.pop()
        except IndexError:
            one = None
        if one is None or one.tokens != len(x):
            one = Pass(self._layers, x, cos, sin)
        y = one(where, x, cos, sin)
        self._spare[:] = [one]
        return y


def quicken(model) -> None:
    """Have a Llama make its steps with the kernels, if they can read it where it is."""
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    halved = [layer.mlp.gate_up_proj for layer in model.layers]
    if model.device.type != "cpu" or library() is None or not all([*map(takes, matrices), *map(halves_apart, halved)]):
        return
    most, layers = most_tokens(model.dtype), [Halves(layer) for layer in model.layers]
    for layer, halves in zip(model.layers, layers, strict=True):
        layer.before = for_few(halves.before, layer.before, most)
        layer.after = for_few(halves.after, layer.after, most)
    if all(layer.o.alone for layer in layers):
        model.through = for_few(Layers(layers, model.through), model.through, most)
    model.head = for_few(Matrix(model.lm_head, model.norm), model.head, most)


def most_tokens(dtype: torch.dtype) -> float:
    """Of a pass for which the kernels are the fastest."""
    return FEW if cpu_multiplies(dtype) else math.inf


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
