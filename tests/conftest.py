"""Model folders for the tests: tiny ones made here, and the real default one.

A random model with the usual 0.02 initialisation hides faults of the cache, since attention hardly matters in it. The
tiny models have weights large enough that one changed token moves the logits (``test_model_feels_one_changed_token``
makes sure).
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():  # Triton reads it when it is imported, which every kind of cache may lead to
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are busy with the other processes, so one thread is the quickest
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
# What ignores a signal (nohup, a job in the background) hands that on; a terminal, as the tests play it, does not.
for signum, usual in {signal.SIGINT: signal.default_int_handler, getattr(signal, "SIGHUP", 0): signal.SIG_DFL}.items():
    if signum and signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, usual)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = len(CONTROL) + len(ALPHABET)
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def write_tokenizer(folder: Path, template: str | None = CHATML) -> None:
    """A byte-level tokenizer without merges: one token a byte, after three control tokens."""
    vocabulary = {token: i for i, token in enumerate(CONTROL + ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )


def tiny_folder(folder: Path, initializer_range: float = 0.2, **settings) -> Path:
    """A tiny model, made and saved by transformers, with a tokenizer beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    shape = {"num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = LlamaConfig(**{**sizes, **ids, **shape, "initializer_range": initializer_range, **settings})
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # which transformers makes 0
            torch.nn.init.normal_(parameter, std=initializer_range)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def successor_folder(folder: Path, chain: dict[int, int], context: int = 512, heads: int = 1) -> Path:
    """A model that says ``chain``: after token t comes chain[t], after any other the stop token.

    Its layers add nothing and its head looks the next token up, so that a test can script what it says.
    """
    size = VOCABULARY + VOCABULARY % 2
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    head = torch.zeros(size, size)
    for token in range(size):
        head[chain.get(token, 2), token] = 1
    block = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.eye(size),
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(size),
    }
    tensors |= {f"{block}self_attn.{name}_proj.weight": torch.zeros(size, size) for name in "qkvo"}
    tensors |= {f"{block}mlp.{name}_proj.weight": torch.zeros(8, size) for name in ("gate", "up")}
    tensors |= {f"{block}mlp.down_proj.weight": torch.zeros(size, 8)}
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors |= {f"{block}{name}.weight": torch.ones(size) for name in norms}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def says(text: str) -> dict[int, int]:
    """The chain that makes a successor model answer ``text``, of distinct bytes, and stop. It begins after any
    newline."""
    ids = [token_of(byte) for byte in text.encode()]
    assert len(set(ids)) == len(ids), "a successor model says each byte once"
    return dict(zip([token_of(ord("\n")), *ids], ids, strict=False))


def token_of(byte: int) -> int:
    from tokenizer import BYTE_OF

    return len(CONTROL) + ALPHABET.index(next(c for c, b in BYTE_OF.items() if b == byte))


@pytest.fixture(scope="module")
def two_threads():
    """What can be computed by several threads is computed by two, also where the tests themselves run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched at the first use."""
    from weights import get

    return get.default_model()


@pytest.fixture(scope="session", params=HEADS)
def tiny(request, tmp_path_factory) -> Path:
    """A tiny model folder for each way to share heads: MHA, GQA, MQA."""
    heads, kv_heads = HEADS[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    return tiny_folder(folder, num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.fixture(scope="session")
def tiny_gqa(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "gqa")


@pytest.fixture(scope="session")
def successor(tmp_path_factory) -> Path:
    """A model that answers everything with "Hélo, wrd!" and stops."""
    return successor_folder(tmp_path_factory.mktemp("models") / "successor", says("Hélo, wrd!"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Path:
    """A model that answers "ababab…" and never stops."""
    newline, a, b = map(token_of, b"\nab")
    return successor_folder(tmp_path_factory.mktemp("models") / "endless", {newline: a, a: b, b: a})
