"""The LLaMA architecture: its config, its layers, and loading it from safetensors.

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
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(Exception):
    """A model folder that cannot be used; the text is one line that names the file, tensor or setting."""


# ---- config


@dataclass(frozen=True)
class Config:
    """What ``config.json`` says, under the Hugging Face names. ``dtype`` is the one it names, or None."""

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
    dtype: torch.dtype | None = None

    def __post_init__(self):
        heads = self.num_attention_heads
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", heads)
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Config:
        """Read ``config.json``. Raises ModelError when it is missing, damaged, or not of this architecture."""
        path = Path(folder) / "config.json"
        raw = read_json(path)
        if raw.get("model_type") != "llama":
            raise ModelError(f"{path}: model_type is {raw.get('model_type')!r}; supported: llama")
        if "quantization_config" in raw:
            method = (raw["quantization_config"] or {}).get("quant_method", "an unnamed method")
            raise ModelError(
                f"{path}: the weights are quantized by {method}, which is not supported; use the original ones"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{path}: hidden_act is {raw['hidden_act']!r}; supported: silu")

        # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        values = {**raw, "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_scaling": rope}
        values["dtype"] = DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch."))
        known = {f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None}
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in known]
        if missing:
            raise ModelError(f"{path}: no {', '.join(missing)}")
        config = cls(**known)
        config._check(path)
        return config

    def _check(self, path: Path) -> None:
        sizes = [f.name for f in fields(self) if f.type == "int"]
        wrong = [name for name in sizes if type(getattr(self, name)) is not int or getattr(self, name) < 1]
        numbers = [name for name in ("rms_norm_eps", "rope_theta") if not _positive(getattr(self, name))]
        flags = [f.name for f in fields(self) if f.type == "bool" and type(getattr(self, f.name)) is not bool]
        for name in wrong + numbers + flags:
            raise ModelError(f"{path}: {name} is {getattr(self, name)!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
            raise ModelError(f"{path}: {heads} attention heads do not divide over {kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ModelError(f"{path}: head_dim is {self.head_dim}, and rotary positions need an even one")
        try:
            inverse_frequencies(self)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None


def _positive(value) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


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


def inverse_frequencies(config: Config) -> Tensor:
    """[D/2] float32: how many radians each pair of dimensions turns per position (RoPE, arXiv 2104.09864, eq. 15).

    ``rope_scaling`` may stretch them: ``linear`` (all by ``factor``) or ``llama3`` (the slow ones by ``factor``, the
    fast ones not, a ramp between; Llama 3.1). Raises ModelError for any other type, by name.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies

    def setting(name: str) -> float:
        if not _positive(scaling.get(name)):
            raise ModelError(f"rope_scaling of type {kind} has {name} {scaling.get(name)!r}")
        return scaling[name]

    if kind == "linear":
        return frequencies / setting("factor")
    if kind == "llama3":
        low, high = setting("low_freq_factor"), setting("high_freq_factor")
        turns = setting("original_max_position_embeddings") * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / setting("factor")
    raise ModelError(f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3")


def angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T] int64, inverse_frequencies [D/2] float32 -> cos, sin [T, 1, D] float32, as ``rotate`` wants them.

    The first half of ``sin`` is negated, so that one roll in ``rotate`` serves both members of a pair.
    """
    turned = (positions[:, None].float() * inverse_frequencies)[:, None]
    cos, sin = turned.cos(), turned.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of [T, H, D] by its position's angle; float32 inside, x's dtype out."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


# ---- layers


def empty(*shape: int) -> nn.Parameter:
    """A parameter that has a shape and no memory yet; ``load`` gives it both value and dtype."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ (+ b), x of any float dtype rounded to the weight's; [T, in] -> [T, out]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = empty(outputs, inputs)
        self.bias = empty(outputs) if bias else None

    def product(self, x: Tensor) -> Tensor:
        return multiply(x.to(self.weight.dtype), self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


class SummedLinear(Linear):
    """A Linear of which each rank holds some input columns; products are summed over ranks (arXiv 1909.08053, §3)."""

    world = 1

    def product(self, x: Tensor) -> Tensor:
        y = super().product(x)
        if self.world > 1:
            torch.distributed.all_reduce(y)
        return y


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
    """Whether this CPU has matrix kernels for a 16-bit dtype; many desktops have none."""
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, in float32 (arXiv 1910.07467)."""

    def __init__(self, config: Config):
        super().__init__()
        self.weight = empty(config.hidden_size)
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention. The cache keeps k and v, which later tokens read; q is used once and forgotten."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        rows, bias = (self.heads + 2 * self.kv_heads) * self.head_dim, config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, rows, bias=bias)
        self.o_proj = SummedLinear(self.heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        q, k = rotate(qk, cos, sin).split((self.heads, self.kv_heads), 1)
        return self.o_proj(kv_cache.attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = SummedLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One transformer block, pre-norm: attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(config), Attention(config, layer)
        self.post_attention_layernorm, self.mlp = RMSNorm(config), MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, kv_cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model. ``model(tokens, cache)`` runs one pass, ``model.head`` turns its output into logits.

    The residual stream is float32 whatever the weights are: adding sixty small updates to a large sum in 16 bits loses
    them, and in float16 it overflows. It costs nothing, since a decode step's time goes into reading the weights.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.name = config, ""
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else Linear(config.hidden_size, config.vocab_size)
        self.inverse_frequencies = inverse_frequencies(config)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, kv_cache) -> Tensor:
        """tokens [T] int64, after ``cache.extend(T)`` -> hidden [T, hidden_size] float32."""
        cos, sin = angles(kv_cache.positions, self.inverse_frequencies)
        x = F.embedding(tokens, self.embed_tokens.weight).float()
        for layer in self.layers:
            x = layer(x, cos, sin, kv_cache)
        return x

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> logits [T, vocab_size] float32."""
        return self.lm_head(self.norm(hidden)).float()

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that one decode step reads: all but the embedding table, unless that is the head too."""
        total = sum(parameter.nbytes for parameter in self.parameters())
        return total if self.config.tie_word_embeddings else total - self.embed_tokens.weight.nbytes


# ---- loading


class Checkpoint:
    """The tensors in a folder's safetensors, found through the index if there is one, mapped and read one at a
    time."""

    def __init__(self, folder: Path):
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise ModelError(f"{index}: no weight_map of tensor names to file names")
            outside = sorted(name for name in set(weight_map.values()) if not name or Path(name).name != name)
            if outside:
                raise ModelError(f"{index}: {outside[0]!r} is not the name of a file in the folder")
            missing = sorted(name for name in set(weight_map.values()) if not (folder / name).is_file())
            if missing:
                raise ModelError(
                    f"{folder / missing[0]}: missing, though {index.name} names it; download the folder again"
                )
            self.files = {name: folder / file for name, file in weight_map.items()}
        elif single.exists():
            with self._open(single) as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise ModelError(
                f"{folder}: no model.safetensors and no model.safetensors.index.json; a model folder needs one"
            )

    def _open(self, path: Path):
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a whole safetensors file ({error}); download it again") from None

    def path(self, name: str) -> Path:
        if name not in self.files:
            raise ModelError(f"{self.folder}: the weights hold no tensor {name}")
        return self.files[name]

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor, from the file's header alone."""
        with self._open(self.path(name)) as file:
            stored = file.get_slice(name).get_dtype()
        known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        if stored not in known:
            raise ModelError(f"{self.path(name)}: {name} is stored as {stored}; supported: {', '.join(known)}")
        return known[stored]

    def copy(self, name: str, target: Tensor, dim: int, rank: int, world: int) -> None:
        """Copy rank's part of a tensor, the rank-th of ``world`` along ``dim``, converting to target's dtype and
        device.

        The file is mapped anew for every 16 MiB: the pages of a mapping count as this process's memory for as long as
        it lives, and with one mapping for the whole load they would come to the size of the weights once more.
        """
        path, shape = self.path(name), list(target.shape)
        self.dtype(name)
        first = [0] * len(shape)
        first[dim], shape[dim] = rank * shape[dim], world * shape[dim]
        with self._open(path) as file:
            stored = file.get_slice(name).get_shape()
        if stored != shape:
            raise ModelError(f"{path}: {name} is {stored}, where config.json wants {shape}")
        rows = max(1, 2**24 // max(1, target[:1].nbytes))
        for start in range(0, len(target), rows):
            block = target[start : start + rows]
            place = tuple(slice(f, f + n) for f, n in zip([first[0] + start, *first[1:]], block.shape, strict=True))
            with self._open(path) as file:
                block.copy_(file.get_slice(name)[place])


def sources(parameter: str, config: Config) -> list[tuple[str, int | None]]:
    """The stored tensors that make one of our parameters, in order: (Hugging Face name, rows), rows None for all of
    them."""
    name = parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    for ours, parts in fused.items():
        if f".{ours}." in name:
            return [(name.replace(ours, part), rows) for part, rows in parts.items()]
    return [(name, None)]


def share(config: Config, world: int) -> Config:
    """The config of one rank's part: its heads and its slice of the MLP. Raises ModelError when they do not divide."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name in names:
        if getattr(config, name) % world:
            raise ModelError(f"{name} is {getattr(config, name)}, which does not divide over {world} ranks")
    return replace(config, **{name: getattr(config, name) // world for name in names})


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    rank: int = 0,
    world: int = 1,
) -> Llama:
    """Load a Hugging Face folder, one tensor at a time, straight to its place; peak memory is about that of the
    weights.

    ``dtype`` None keeps the stored one; norm weights are float32 always. With ``world`` ranks, each reads and holds
    only its part of the attention heads and of the MLP, and torch.distributed must be initialized to run it. Raises
    ModelError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    config = share(Config.from_folder(folder), world)
    checkpoint = Checkpoint(folder)
    dtype = dtype or checkpoint.dtype("model.embed_tokens.weight")
    model = Llama(config)
    for name, parameter in list(model.named_parameters()):
        module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        wanted = torch.float32 if isinstance(module, RMSNorm) else dtype
        target = torch.empty(parameter.shape, dtype=wanted, device=device)
        parts = sources(name, config)
        dim = 1 if isinstance(module, SummedLinear) and leaf == "weight" else 0
        split = len(parts) > 1 or dim == 1
        for (source, _), part in zip(parts, target.split([rows or len(target) for _, rows in parts]), strict=True):
            checkpoint.copy(source, part, dim, *((rank, world) if split else (0, 1)))
        setattr(module, leaf, nn.Parameter(target, requires_grad=False))
        if isinstance(module, SummedLinear):
            module.world = world
    model.inverse_frequencies = inverse_frequencies(config).to(device)
    model.name = folder.resolve().name
    return model.eval()
