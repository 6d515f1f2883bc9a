"""The LLaMA architecture and its family: config, its layers, and loading it from safetensors.

The model computes and never attends: each layer makes q, k and v and hands them to ``cache.attend``, which stores k
and v and returns what attention read. That is the whole seam, so the model knows no batch, no mask, no page and no
quantized value.

Shapes: ``T`` tokens of one pass, ``Hq`` query heads, ``Hkv`` key/value heads, ``D`` head_dim. ``Hkv == Hq`` is
multi-head attention (MHA), ``1 < Hkv < Hq`` grouped-query (GQA, arXiv 2305.13245), ``Hkv == 1`` multi-query (MQA,
arXiv 1911.02150): one code path.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

import native
from linear import FORMATS, WHOLE, Columns, Linear, Packed, Rows, Whole, empty, fixed
from seam import triton_serves

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(Exception):
    """A model folder that cannot be used; the text is one line that names the file, tensor or setting."""

    def __init__(self, text: str):
        super().__init__(" ".join(text.splitlines()))  # what a library says of a file may quote its line breaks


# ---- config

WINDOWS = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}

# The types of the family, and what config.json means where it is silent. What a type adds to LLaMA is read in
# `Config`.
FAMILY = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {**WINDOWS, "qkv_bias": True},
    "qwen3": {**WINDOWS, "qk_norm": True, "head_dim": 128},
    "smollm3": {"no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
}


IGNORED = {"mistral": ("attention_bias", "mlp_bias"), "qwen2": ("attention_bias", "mlp_bias"), "qwen3": ("mlp_bias",)}


@dataclass(frozen=True)
class Config:
    """What ``config.json`` says, under the Hugging Face names, with the family's differences spelled out.

    windows: for each layer, how many tokens it looks back on, itself included, or None for all; rotary: for each
    layer, whether q and k are turned by position; qkv_bias: a bias on q, k and v alone; qk_norm: an RMSNorm on each
    head of q and k; dtype: the one that the file names, or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0: as many as num_attention_heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rotary: tuple[bool, ...] = ()
    dtype: torch.dtype | None = None
    model_type: str = "llama"

    def __post_init__(self):
        derived = {
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "windows": self.windows or (None,) * self.num_hidden_layers,
            "rotary": self.rotary or (True,) * self.num_hidden_layers,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def turn(self, x: Tensor, by: int) -> Tensor:
        """Keys or queries x [..., D] that are turned by their position already, turned by that many positions more.

        Not for dynamic positions, whose angle depends on more than the position.
        """
        rotary = Rotary(self, x.device)
        cos, sin = rotary(torch.tensor([by], device=x.device))
        return rotate(x, cos / rotary.length, sin / rotary.length)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Config:
        """Read ``config.json``. Raises ModelError when it is missing, damaged, or not of this family."""
        path = Path(folder) / "config.json"
        raw = read_json(path)
        try:
            return cls.from_json(raw)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, raw: dict) -> Config:
        """What a ``config.json`` says. Raises ModelError when it is not of this family."""
        if str(raw.get("model_type")) not in FAMILY:
            raise ModelError(f"model_type is {raw.get('model_type')!r}; supported: {', '.join(FAMILY)}")
        if quantized := raw.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise ModelError(f"the weights are quantized ({method}), which is not supported; use the original ones")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act is {raw['hidden_act']!r}; supported: silu")

        raw = {**FAMILY[raw["model_type"]], **raw}
        for name in IGNORED.get(raw["model_type"], ()):  # as transformers does
            raw.pop(name, None)
        # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise ModelError(f"rope_scaling is {rope!r}, and must be an object")
        if (original := raw.get("original_max_position_embeddings")) is not None:
            rope = {**rope, "original_max_position_embeddings": original}
        raw |= {"rope_scaling": rope, "rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}
        dtype = DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch."))

        kinds = {"int": _natural, "float": _positive, "bool": lambda value: isinstance(value, bool)}
        bounds = {"num_hidden_layers": 2**12, "num_attention_heads": 2**16, "num_key_value_heads": 2**16}
        bounds |= {"head_dim": 2**16, "max_position_embeddings": 2**31}
        known = {"rope_scaling": rope, "dtype": dtype, "model_type": raw["model_type"]}
        for field in fields(cls):
            value = raw.get(field.name)
            if field.type in kinds and value is not None:
                bound = bounds.get(field.name, 2**24) if field.type == "int" else math.inf
                if not kinds[field.type](value) or value > bound:
                    raise ModelError(f"{field.name} is {value!r}")
                known[field.name] = value
            elif field.default is MISSING:
                raise ModelError(f"no {field.name}")
        rotary = _rotary_layers(raw, known["num_hidden_layers"])
        config = cls(**known, rotary=rotary, windows=_windows(raw, rotary))
        if config.num_attention_heads % config.num_key_value_heads:
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            raise ModelError(f"{heads} attention heads do not divide over {kv_heads} key/value heads")
        if config.head_dim % 2 or not config.head_dim:
            raise ModelError(f"head_dim is {config.head_dim}, and rotary positions need an even one")
        Rotary(config)
        return config


def _natural(value) -> bool:
    return type(value) is int and 0 < value < 2**31


def _positive(value) -> bool:
    return type(value) in (int, float) and 1e-12 < value < 1e12


def _rotary_layers(raw: dict, layers: int) -> tuple[bool, ...]:
    """SmolLM3 leaves q and k of some layers as they are: those marked 0, or else each no_rope_layer_interval-th."""
    if "no_rope_layer_interval" not in raw:
        return (True,) * layers
    marks = raw.get("no_rope_layers")
    if marks is None:
        if not _natural(interval := raw["no_rope_layer_interval"]):
            raise ModelError(f"no_rope_layer_interval is {interval!r}")
        marks = [(layer + 1) % interval for layer in range(layers)]
    if not isinstance(marks, list) or len(marks) < layers or not all(isinstance(mark, int) for mark in marks):
        raise ModelError("no_rope_layers must be a list with a 0 or a 1 for each layer")
    return tuple(bool(mark) for mark in marks[:layers])


def _windows(raw: dict, rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The sliding window of each layer: where layer_types says so, or else where the type has it by its own rule."""
    kind, window, layers = raw["model_type"], raw.get("sliding_window"), len(rotary)
    uses = kind == "mistral" or (kind != "llama" and raw.get("use_sliding_window", False))
    if type(uses) is not bool:
        raise ModelError(f"use_sliding_window is {uses!r}")
    if window is None or not uses:
        return (None,) * layers
    if not _natural(window):
        raise ModelError(f"sliding_window is {window!r}")
    types = raw.get("layer_types")
    if kind == "mistral":
        slides = [True] * layers
    elif types is None and kind == "smollm3":
        slides = [not turned for turned in rotary]
    elif types is None:
        first = raw["max_window_layers"]
        if type(first) is not int:
            raise ModelError(f"max_window_layers is {first!r}")
        slides = [layer >= first for layer in range(layers)]
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise ModelError(f"layer_types must be a list of {layers}")
        slides = [kind == "sliding_attention" for kind in types]
    return tuple(window if slide else None for slide in slides)


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises ModelError when it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


# ---- rotary


class Rotary:
    """How far each pair of dimensions of q and k is turned at a position (RoPE, arXiv 2104.09864, eq. 15).

    Pair i turns by ``position · rope_theta^(-2i/D)`` radians. ``rope_scaling`` stretches that for contexts longer than
    the model was first made for: ``linear`` all pairs by ``factor``; ``llama3`` the slow ones, the fast ones not, with
    a ramp between (Llama 3.1); ``yarn`` likewise with another ramp, and longer q and k (arXiv 2309.00071); ``dynamic``
    by a larger theta once the context is longer. Raises ModelError for another type, or a setting that is missing.
    """

    def __init__(self, config: Config, device: str | torch.device = "cpu"):
        self.config, self.scaling = config, config.rope_scaling or {}
        self.kind = self.scaling.get("rope_type") or self.scaling.get("type") or "default"
        self.exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        self.length = 1.0  # of the turned q and k, as a multiple
        self.frequencies = 1.0 / config.rope_theta**self.exponents  # [D/2] float32, radians per position
        scale = {"linear": self._linear, "llama3": self._llama3, "yarn": self._yarn, "dynamic": self._dynamic}
        if self.kind not in ("default", *scale):
            raise ModelError(
                f"rope_scaling type {self.kind!r} is not supported; supported: default, {', '.join(scale)}"
            )
        if self.scaling.get("partial_rotary_factor", 1) != 1:
            raise ModelError("partial_rotary_factor is not supported")
        if self.kind != "default":
            scale[self.kind](self._setting("factor"))
        self.frequencies, self.exponents = self.frequencies.to(device), self.exponents.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin [T, 1, D] float32, as ``rotate`` wants them.

        The first half of ``sin`` is negated, so that one roll in ``rotate`` serves both members of a pair.
        """
        turned = (positions[:, None].float() * self._frequencies_at(positions))[:, None]
        cos, sin = turned.cos() * self.length, turned.sin() * self.length
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        if self.kind != "dynamic":
            return self.frequencies
        # On the device, from the newest position: nothing is waited for. Keys keep the turn that they were stored
        # with.
        stretch = (self.factor * (positions[-1] + 1) / self.original - (self.factor - 1)).clamp(min=1)
        dim = self.config.head_dim
        return 1.0 / (self.config.rope_theta * stretch ** (dim / (dim - 2))) ** self.exponents

    def _setting(self, name: str, default: float | None = None) -> float:
        value = self.scaling.get(name)
        value = default if value is None else value
        if not _positive(value):
            raise ModelError(f"rope_scaling of type {self.kind} has {name} {value!r}")
        return value

    def _linear(self, factor: float) -> None:
        self.frequencies /= factor

    def _llama3(self, factor: float) -> None:
        low, high = self._setting("low_freq_factor"), self._setting("high_freq_factor")
        if high <= low:
            raise ModelError(f"rope_scaling has high_freq_factor {high}, which must be above low_freq_factor {low}")
        turns = self._setting("original_max_position_embeddings") * self.frequencies / (2 * math.pi)
        self._stretch_but(((turns - low) / (high - low)).clamp(0, 1), factor)

    def _yarn(self, factor: float) -> None:
        dim, log_theta = self.config.head_dim, math.log(self.config.rope_theta)
        original = self._setting("original_max_position_embeddings", self.config.max_position_embeddings)
        if log_theta <= 0:
            raise ModelError(f"rope_theta is {self.config.rope_theta}, and yarn needs one above 1")

        def pair_that_turns(times: float) -> float:
            """Which pair (a fraction) turns so many times over the original length."""
            return dim * math.log(original / (times * 2 * math.pi)) / (2 * log_theta)

        low, high = (pair_that_turns(self._setting(n, d)) for n, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2) - low) / (high - low if high != low else 0.001)
        self._stretch_but(1 - ramp.clamp(0, 1), factor)

        def longer(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        mscale, all_dim = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        usual = (
            longer(self._setting("mscale")) / longer(self._setting("mscale_all_dim"))
            if mscale and all_dim
            else longer(1)
        )
        self.length = self._setting("attention_factor", usual)

    def _dynamic(self, factor: float) -> None:
        self.factor, self.original = factor, self.config.max_position_embeddings
        if self.config.head_dim < 4:
            raise ModelError(f"head_dim is {self.config.head_dim}, and dynamic positions need more")

    def _stretch_but(self, keep: Tensor, factor: float) -> None:
        """Slow each pair down by ``factor``, but for the part ``keep`` [D/2] of it."""
        self.frequencies = keep * self.frequencies + (1 - keep) * self.frequencies / factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of [T, H, D] by its position's angle; float32 inside, x's dtype out."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


# ---- layers


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = empty(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # There F.rms_norm is seven small operations; these four take 40% of its time. hypot adds eps under the root.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least)
        return (x * self._scaled).div_(length)

    @cached_property
    def _scaled(self) -> Tensor:
        return self.weight * math.sqrt(self.weight.numel())

    @cached_property
    def _least(self) -> Tensor:
        return torch.tensor(math.sqrt(self.weight.numel() * self.eps))

    def bytes_in(self, dtype: torch.dtype) -> int:
        return 4 * self.weight.numel()


class Attention(nn.Module):
    """Grouped-query attention. The cache keeps k and v, which later tokens read; q is used once and forgotten."""

    def __init__(self, config: Config, layer: int, linear: Callable[..., Linear]):
        super().__init__()
        self.turned = config.rotary[layer]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        rows, bias = (self.heads + 2 * self.kv_heads) * self.head_dim, config.attention_bias
        self.qkv_proj = linear(config.hidden_size, rows, bias=bias or config.qkv_bias)
        self.o_proj = linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> q [T, Hq, D], k and v [T, Hkv, D]: what the cache attends with."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        if self.q_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), 1)
            qk = torch.cat((self.q_norm(q.float()), self.k_norm(k.float())), 1)
        if self.turned:
            qk = rotate(qk, cos, sin)
        q, k = qk.to(v.dtype).split((self.heads, self.kv_heads), 1)
        return q, k, v


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: Config, linear: Callable[..., Linear]):
        super().__init__()
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One transformer block, pre-norm: attention, then the MLP, each added to the residual stream. It is what lies
    before the cache's ``attend``, and what lies behind it."""

    def __init__(self, config: Config, layer: int, linear: Callable[..., Linear]):
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, linear)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, linear)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache) -> Tensor:
        return self.after(x, kv_cache.attend(self.layer, *self.before(x, cos, sin)))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(y.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model, or with ``world`` ranks the part of one, whose ``config`` is its share. ``model(tokens, cache)``
    runs one pass, ``model.head`` turns its output into logits.

    The residual stream is float32 whatever the weights are: adding sixty small updates to a large sum in 16 bits loses
    them, and in float16 it overflows. It costs nothing, since a decode step's time goes into reading the weights.
    """

    def __init__(self, config: Config, quantize: str | None = None, world: int = 1):
        super().__init__()
        self.config, self.world, self.name = config, world, ""
        linear, head = FORMATS[quantize]
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, -(-config.vocab_size // world))
        self.embed_tokens = (head if tied else Linear)(*sizes)
        self.layers = nn.ModuleList(Layer(config, layer, linear) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens if tied else head(*sizes)
        self.rotary = Rotary(config)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, kv_cache) -> Tensor:
        """tokens [T] int64, after ``cache.extend(T)`` -> hidden [T, hidden_size] float32."""
        return self.through(self.embed_tokens.rows(tokens), *self.rotary(kv_cache.positions), kv_cache)

    def through(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache) -> Tensor:
        """All layers, x [T, hidden_size] float32 -> the same."""
        for layer in self.layers:
            x = layer(x, cos, sin, kv_cache)
        return x

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> logits [T, vocab_size] float32."""
        return self.lm_head(self.norm(hidden)).float()

    def compile_steps(self) -> Callable[[], None]:
        """Have torch.compile fuse the small operations of each layer, in passes of one token from now on. The first of
        them takes as long as the compiling, once for all layers that are alike. Returns what takes it back."""
        through, halves = self.through, [(layer.before, layer.after) for layer in self.layers]
        before, after = (torch.compile(half, dynamic=False) for half in (Layer.before, Layer.after))
        self.through = partial(Llama.through, self)
        for layer in self.layers:
            layer.before = native.for_few(partial(before, layer), layer.before, 1)
            layer.after = native.for_few(partial(after, layer), layer.after, 1)

        def undo() -> None:
            self.through = through
            for layer, usual in zip(self.layers, halves, strict=True):
                layer.before, layer.after = usual

        return undo

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic, and so what a cache keeps; with packed weights it is not theirs."""
        return self.lm_head.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def where(self) -> str:
        """Where it computes, for people; sizes are those of this part."""
        return self.device.type if self.world == 1 else f"{self.device.type}, one of {self.world} parts"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of some values of every parameter, which tells models apart without reading all of them."""
        digest = sha256()
        for parameter in self.parameters():
            values = parameter.flatten()[:: max(1, parameter.numel() // 1024)]
            digest.update(values.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @staticmethod
    def bytes_for(config: Config, dtype: torch.dtype, quantize: str | None = None, world: int = 1) -> int:
        """Bytes of the weights in a dtype, norms being float32 always; from the config alone."""
        modules = Llama(config, quantize, world).modules()
        return sum(module.bytes_in(dtype) for module in modules if hasattr(module, "bytes_in"))

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that one decode step reads: all but the embedding table, unless that is the head too."""
        total = sum(parameter.nbytes for parameter in self.parameters())
        return total if self.config.tie_word_embeddings else total - self.embed_tokens.bytes

    @property
    def products_per_token(self) -> int:
        """Multiplications by a weight that one token takes."""
        matrices = [module for module in self.layers.modules() if isinstance(module, Linear)]
        return sum(matrix.inputs * matrix.outputs for matrix in [*matrices, self.lm_head])


# ---- loading

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """The tensors in a folder's safetensors, found through the index if there is one; headers are read, not data.

    Raises ModelError for a file that is missing, damaged or outside the folder. Files that the index does not name are
    not looked at.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, tuple[Path, str, list[int]]] = {}  # name -> file, stored dtype, shape
        self.files = self._find()
        for path in self.files:
            with self._open(path) as file:
                names = file.keys()
                for name in names:
                    header = file.get_slice(name)
                    self.tensors[name] = path, header.get_dtype(), header.get_shape()

    def _find(self) -> list[Path]:
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if not index.exists():
            if not single.is_file():
                pickled = sorted(path.name for end in ("bin", "pth", "pt") for path in self.folder.glob(f"*.{end}"))
                if pickled:
                    why = "pickles can run code and are never opened; get its safetensors"
                    raise ModelError(f"{self.folder / pickled[0]}: {why}")
                needs = "a model folder needs model.safetensors, or its shards and model.safetensors.index.json"
                raise ModelError(f"{self.folder}: no weights; {needs}")
            return [single]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: no weight_map of tensor names to file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            if not name or Path(name).name != name:
                raise ModelError(f"{index}: {name!r} is not the name of a file in the folder")
            if not (self.folder / name).is_file():
                raise ModelError(f"{self.folder / name}: missing, though {index.name} names it; download it again")
        return [self.folder / name for name in names]

    def _open(self, path: Path):
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            if not os.access(path, os.R_OK):
                raise ModelError(f"{path}: it may not be read") from None
            # A snapshot of the Hugging Face cache links to the file that is damaged.
            file = f"remove {path.resolve()} and " if path.is_symlink() else ""
            raise ModelError(f"{path}: not a whole safetensors file ({error}); {file}download it again") from None

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor. Raises ModelError when it is missing, or of a kind that is not supported."""
        if name not in self.tensors:
            raise ModelError(f"{self.folder}: the weights hold no tensor {name}")
        path, stored, _ = self.tensors[name]
        if stored not in STORED:
            raise ModelError(f"{path}: {name} is stored as {stored}; supported: {', '.join(STORED)}")
        return STORED[stored]

    def check(self, source: Source) -> None:
        """Raise ModelError unless the tensor is there, of a supported dtype, and of the shape that the config
        wants."""
        self.dtype(source.name)
        path, _, shape = self.tensors[source.name]
        if shape != (wanted := source.stored):
            raise ModelError(f"{path}: {source.name} is {shape}, where config.json wants {wanted}")

    def read(self, parts: list[Source], target: Tensor) -> None:
        """Put stored tensors, or a rank's part of them, one below the other, into target."""
        for source, rows in zip(parts, target.split([source.shape[0] for source in parts]), strict=True):
            self.copy(source, rows)

    def copy(self, source: Source, target: Tensor) -> None:
        """Copy a rank's part of a tensor, converting to target's dtype and device.

        The file is mapped anew for every 16 MiB: the pages of a mapping count as this process's memory for as long as
        it lives, and with one mapping for the whole load they would come to the size of the weights once more.
        """
        first = [source.first if dim == source.dim else 0 for dim in range(len(source.shape))]
        there = source.stored[0] - first[0]  # rows; the vocabulary's last part may reach beyond them
        target[max(0, there) :].zero_()
        rows = max(1, 2**24 // max(1, target[:1].nbytes))
        for start in range(0, min(there, len(target)), rows):
            block = target[start : min(start + rows, there)]
            place = tuple(slice(f, f + n) for f, n in zip([first[0] + start, *first[1:]], block.shape, strict=True))
            with self._open(self.tensors[source.name][0]) as file:
                block.copy_(file.get_slice(source.name)[place])


@dataclass(frozen=True)
class Source:
    """A stored tensor, by its Hugging Face name, and a rank's part of it: ``shape``, which along ``dim`` begins at
    ``first`` of ``total``."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    first: int = 0
    total: int = 0  # 0: the part is all of it

    @property
    def stored(self) -> list[int]:
        return [self.total or size if dim == self.dim else size for dim, size in enumerate(self.shape)]


def sources(parameter: str, shape: torch.Size, config: Config, rank: int = 0, world: int = 1) -> list[Source]:
    """The stored tensors that make one of a rank's parameters, one below the other; ``config`` is the whole model's.

    Projections that read the same input are one matrix here, so that a step makes one call instead of three or two.
    """
    name = parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
    dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    mine = share(config, world)

    def part(part_name: str, rows: int, first: int, total: int) -> Source:
        return Source(part_name, (rows, *shape[1:]), 0, first, total)

    queries = mine.num_attention_heads * dim, rank * heads // world * dim, heads * dim
    keys = mine.num_key_value_heads * dim, rank * kv_heads // world * dim, kv_heads * dim
    inner = mine.intermediate_size, rank * mine.intermediate_size, config.intermediate_size
    fused = {
        "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    for ours, parts in fused.items():
        if f".{ours}." in name:
            return [part(name.replace(ours, theirs), *place) for theirs, place in parts.items()]
    columns = {"o_proj.weight": queries, "down_proj.weight": inner}
    for ending, (size, first, total) in columns.items():
        if name.endswith(ending):
            return [Source(name, (shape[0], size), 1, first, total)]
    if name in VOCABULARY:
        return [part(name, shape[0], rank * shape[0], config.vocab_size)]
    return [Source(name, tuple(shape))]


VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def coming_together(source: Source, world: int) -> Whole:
    """How the parts of such a matrix come together."""
    if world > 1 and source.dim == 1:
        return Columns()
    if world > 1 and source.name in VOCABULARY:
        return Rows(source.first, source.shape[0], source.total)
    return WHOLE


def share(config: Config, world: int) -> Config:
    """The config of one rank's part: its heads and its slice of the MLP. Where there are fewer key/value heads than
    ranks, several hold the same one. Raises ModelError when they do not divide."""

    def divided(name: str) -> int:
        if getattr(config, name) % world:
            raise ModelError(f"{name} is {getattr(config, name)}, which does not divide over {world} ranks")
        return getattr(config, name) // world

    shares = {name: divided(name) for name in ("num_attention_heads", "intermediate_size")}
    shared = world % config.num_key_value_heads == 0
    return replace(config, **shares, num_key_value_heads=1 if shared else divided("num_key_value_heads"))


def survey(
    folder: Path, quantize: str | None = None, rank: int = 0, world: int = 1
) -> tuple[Llama, Checkpoint, dict[str, list[Source]]]:
    """All that can be known of a folder without reading its weights: the model without memory, the tensors on disk,
    and the stored ones that make each parameter. Raises ModelError for whatever ``load`` would refuse."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    config, checkpoint = Config.from_folder(folder), Checkpoint(folder)
    checkpoint.dtype(f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight")  # before so many are made
    model = Llama(share(config, world), quantize, world)
    plan = {name: sources(name, value.shape, config, rank, world) for name, value in model.named_parameters()}
    for parts in plan.values():
        for source in parts:
            checkpoint.check(source)
    return model, checkpoint, plan


def arithmetic(dtype: torch.dtype | None, stored: torch.dtype | None, quantize: str | None, device="cpu"):
    """The dtype to compute in: the one asked for, or else the stored one, or bfloat16 with packed weights.

    Raises ModelError for one that packed weights do not go with.
    """
    if quantize is None:
        return dtype or stored or torch.float32
    if quantize not in FORMATS:
        raise ModelError(f"quantize is {quantize!r}; supported: {', '.join(filter(None, FORMATS))}")
    kind = torch.device(device).type
    if quantize == "int4" and kind not in ("cpu", "cuda"):
        raise ModelError(f"int4 weights are for cpu and cuda, and not for {kind}; int8 ones work everywhere")
    allowed = [torch.bfloat16] if quantize == "int4" and kind == "cuda" else [torch.bfloat16, torch.float32]
    if dtype not in (None, *allowed):
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ModelError(f"{quantize} weights on {kind} compute in {names}, not in {str(dtype).removeprefix('torch.')}")
    return dtype or torch.bfloat16


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    rank: int = 0,
    world: int = 1,
) -> Llama:
    """Load a Hugging Face folder, one tensor at a time, straight to its place; peak memory is about that of the
    weights.

    ``dtype`` None keeps the stored one; norm weights are float32 always. ``quantize`` int8 or int4 packs the matrices
    as they come, and computes in bfloat16 (see linear.py); an embedding table that is not the head too stays whole.
    With ``world`` ranks, each reads and holds only its part of the attention heads, of the MLP and of the vocabulary,
    and torch.distributed must be initialized to run it. Raises ModelError.
    """
    folder = Path(folder)
    arithmetic(dtype, None, quantize, device)  # before anything is read
    model, checkpoint, plan = survey(folder, quantize, rank, world)
    dtype = arithmetic(dtype, checkpoint.dtype("model.embed_tokens.weight"), quantize, device)
    model.rotary, model.name = Rotary(model.config, device), name_of(folder)
    for name, parts in plan.items():
        if name.endswith(".weight"):
            model.get_submodule(name.removesuffix(".weight")).part = coming_together(parts[0], world)
        place(model, name, device, dtype, checkpoint.dtype(parts[0].name), partial(checkpoint.read, parts))
    return ready(model)


def random_model(
    config: Config, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, quantize: str | None = None
) -> Llama:
    """A model of random weights, made where it computes: as fast and as large as a loaded one, and it says nothing.
    Raises ModelError."""
    dtype, generator = arithmetic(dtype, config.dtype, quantize, device), torch.Generator(device).manual_seed(0)
    model = Llama(config, quantize)
    model.rotary, model.name = Rotary(config, device), "random weights"
    for name, _ in list(model.named_parameters()):
        fill = partial(torch.Tensor.normal_, mean=float("norm" in name), std=0.02, generator=generator)
        place(model, name, device, dtype, dtype, fill)
    return ready(model)


def place(
    model: Llama, name: str, device: str | torch.device, dtype: torch.dtype, stored: torch.dtype, fill: Callable
) -> None:
    """Give a parameter memory and the values that ``fill`` writes there, in ``stored`` where they are packed. Raises
    ModelError when there is no memory."""
    module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    packs = isinstance(module, Packed) and leaf == "weight"
    kept = torch.float32 if isinstance(module, RMSNorm) else stored if packs else dtype
    try:
        values = torch.empty(getattr(module, leaf).shape, dtype=kept, device=device)
        fill(values)
        if packs:
            module.pack(values, dtype)
        else:
            setattr(module, leaf, fixed(values))
    except RuntimeError as error:  # OutOfMemoryError is one
        if "memory" not in str(error):
            raise
        raise ModelError(
            f"{model.name}: no memory for the weights on {device} ({str(error).splitlines()[0]})"
        ) from None


def ready(model: Llama) -> Llama:
    """A model whose weights are in place, with the fastest steps that there are where it is."""
    native.quicken(model)
    if model.world == 1 and triton_serves(model.device):
        import fused

        fused.quicken(model)
    return model.eval()


def name_of(folder: Path) -> str:
    """A folder's name, or org/name for a snapshot in the Hugging Face cache (models--org--name/snapshots/<commit>)."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name
