"""model.py: the same logits as transformers, loading without waste, and a clear no to what cannot be loaded."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_folder
from safetensors.torch import load_file, save_file

from cache import make
from linear import cpu_multiplies, multiply
from model import Config, ModelError, Rotary, load, rotate

TOKENS = [5, 17, 200, 33, 5, 90, 121, 8, 64, 250, 5, 17, 3, 77, 140, 31]


def logits_of(folder, tokens, dtype=torch.float32):
    """Logits [T, V] at every position, in one pass."""
    model = load(folder, dtype=dtype)
    cache = make("contiguous", model.config, len(tokens), dtype=model.dtype)
    cache.extend(len(tokens))
    return model.head(model(torch.tensor(tokens), cache))


def transformers_logits(folder, tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def test_logits_are_those_of_transformers_for_each_way_to_share_heads(tiny):
    torch.testing.assert_close(logits_of(tiny, TOKENS), transformers_logits(tiny, TOKENS), atol=1e-4, rtol=0)


def test_model_feels_one_changed_token(tiny):
    changed = [*TOKENS[:7], 100, *TOKENS[8:]]
    assert (logits_of(tiny, TOKENS)[-1] - logits_of(tiny, changed)[-1]).abs().max() > 0.05


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": True},
        {"head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 1e4}},
    ],
    ids=["tied", "head_dim", "biases", "theta", "linear", "llama3"],
)
def test_logits_are_those_of_transformers_for_each_option(settings, tmp_path):
    folder = tiny_folder(tmp_path / "model", **settings)
    if "attention_bias" in settings:  # transformers makes biases zero, which would hide them
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: torch.randn_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = TOKENS * 8  # past the original context of the llama3 case
    torch.testing.assert_close(logits_of(folder, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=0)


def test_sharded_checkpoint_gives_the_logits_of_the_single_file_and_stray_files_are_ignored(tiny_gqa, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_gqa).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (tmp_path / "consolidated.safetensors").write_bytes(b"not weights")
    (tmp_path / "model.safetensors").write_bytes(b"not weights either, and the index is what counts")
    assert torch.equal(logits_of(tmp_path, TOKENS), logits_of(tiny_gqa, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtype_is_kept_and_logits_are_float32(tiny_gqa, tmp_path, dtype):
    shutil.copy(tiny_gqa / "config.json", tmp_path)
    tensors = load_file(tiny_gqa / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert load(tmp_path).dtype is dtype
    logits = logits_of(tmp_path, TOKENS, dtype=None)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, logits_of(tiny_gqa, TOKENS), atol=0.5, rtol=0.05)


@pytest.mark.parametrize("supported", [True, False], ids=["with kernels", "without"])
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_way_to_multiply_gives_the_product_up_to_rounding(dtype, rows, supported, monkeypatch):
    monkeypatch.setattr("linear.cpu_multiplies", lambda dtype: supported)
    x, weight = torch.randn(rows, 64), torch.randn(48, 64)
    x, weight = x.to(dtype), weight.to(dtype)
    product = multiply(x, weight)
    assert product.dtype is dtype
    torch.testing.assert_close(product.double(), x.double() @ weight.double().T, atol=0.2, rtol=torch.finfo(dtype).eps)


def test_a_torch_without_onednn_has_no_16_bit_kernels(monkeypatch):
    """As on Apple's processors, where even asking for them fails."""
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    monkeypatch.delattr("torch.ops.mkldnn._is_mkldnn_fp16_supported", raising=False)
    assert not cpu_multiplies.__wrapped__(torch.float16)


def test_a_residual_stream_beyond_float16_does_not_overflow(tiny_gqa):
    """Models trained in bfloat16 may hold sums that float16 cannot; only products have the weights' dtype here."""
    model = load(tiny_gqa, dtype=torch.float16)
    model.embed_tokens.weight.data.fill_(60000)
    for layer in model.layers:  # each adds about 20,000: 60000 / rms = 1, silu(4) · 4 = 15.7, 15.7 · 64 · 20
        layer.mlp.gate_up_proj.weight.data.fill_(4 / 32)
        layer.mlp.down_proj.weight.data.fill_(20)
    cache = make("contiguous", model.config, 16, dtype=model.dtype)
    cache.extend(len(TOKENS))
    hidden = model(torch.tensor(TOKENS), cache)
    assert hidden.abs().max() > torch.finfo(torch.float16).max
    assert model.head(hidden).isfinite().all()


# ---- rotary positions


def test_a_pair_half_a_head_apart_turns_by_position_times_frequency_in_float32():
    """At position 257 the cosine is 0.819306; in bfloat16 that position cannot be told from 256."""
    config = Config(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    cos, sin = Rotary(config)(torch.tensor([257]))
    turned = rotate(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), cos, sin)[0, 0]
    torch.testing.assert_close(turned, torch.tensor([0.819306, 0.0, math.sin(257), 0.0]), atol=1e-5, rtol=0)


def test_rope_theta_is_found_in_every_spelling(tiny_gqa, tmp_path):
    raw = json.loads((tiny_gqa / "config.json").read_text())
    raw.pop("rope_parameters", None)
    spellings = [
        {"rope_theta": 777.0},
        {"rope_theta": 777.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    ]
    for spelling in spellings:
        (tmp_path / "config.json").write_text(json.dumps(raw | spelling))
        assert Config.from_folder(tmp_path).rope_theta == 777.0
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "rope_theta"}))
    assert Config.from_folder(tmp_path).rope_theta == 10000.0


# ---- memory


MEASURE = """
import resource, sys, torch, model
from safetensors.torch import load_file
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
model.load(sys.argv[1])  # a small one, so that what libraries take is not counted
before = peak()
kept = model.load(sys.argv[2])
print((peak() - before) / sum(p.nbytes for p in kept.parameters()))
"""


@pytest.mark.parametrize("sharded", [False, True])
def test_loading_takes_little_more_memory_than_the_weights(tiny_gqa, tmp_path, sharded):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=12, torch_dtype="float16")).half()
    model.save_pretrained(tmp_path, max_shard_size="60MB" if sharded else "5GB")
    run = [sys.executable, "-c", MEASURE, str(tiny_gqa), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
    assert float(done.stdout) < 1.2


# ---- ranks


RANK = """
import sys, torch, torch.distributed as dist
from cache import make
from model import load
rank, folder, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = load(folder, rank=rank, world=2)
cache = make("contiguous", model.config, 64)
tokens = torch.tensor(eval(sys.argv[4]))
cache.extend(len(tokens))
logits = model.head(model(tokens, cache))
if rank == 0:
    torch.save((logits, sum(p.nbytes for p in model.layers.parameters()), cache.bytes_per_token), sys.argv[5])
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_hold_half_of_the_layers_and_give_the_logits_of_one(tiny_gqa, tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    out = tmp_path / "logits"
    run = [[sys.executable, "-c", RANK, str(r), str(tiny_gqa), port, str(TOKENS), str(out)] for r in range(2)]
    ranks = [subprocess.Popen(command, cwd=Path(__file__).parents[1]) for command in run]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    logits, layers, per_token = torch.load(out)
    whole = load(tiny_gqa)
    torch.testing.assert_close(logits, logits_of(tiny_gqa, TOKENS), atol=1e-4, rtol=0)
    assert layers < 0.51 * sum(p.nbytes for p in whole.layers.parameters())
    assert per_token == make("contiguous", whole.config, 1).bytes_per_token // 2


def test_heads_that_do_not_divide_over_the_ranks_are_refused_in_words(tiny_gqa):
    with pytest.raises(ModelError, match="num_attention_heads is 4, which does not divide over 3 ranks"):
        load(tiny_gqa, world=3)


# ---- refusals


def copy_of(folder, to):
    return Path(shutil.copytree(folder, to / "copy"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide over 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"vocab_size": 300}, "model.embed_tokens.weight"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_right_is_refused_by_name(change, named, tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError) as refusal:
        load(folder)
    assert named in str(refusal.value)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_config_is_refused_by_its_name(text, tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json: not") as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


def test_weights_that_are_not_whole_are_refused_by_file_name(tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 100\n"
    quoted = whole.replace(b'"F32"', b'"\\n2"', 1)  # a dtype that the library quotes
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:5], b"", pointer, quoted):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file") as refusal:
            load(folder)
        assert "\n" not in str(refusal.value)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no weights; a model folder needs"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: pickles can run code"):
        load(folder)
    with pytest.raises(ModelError, match="no such model folder"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_refused_by_name(name, tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=name):
        load(folder)


def test_a_tensor_of_another_kind_or_shape_is_refused_by_name(tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight"
    for wrong in (tensors[name].to(torch.int8), tensors[name].T.contiguous()):
        save_file(tensors | {name: wrong}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=name):
            load(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "", "a/b.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(file, tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelError, match="is not the name of a file in the folder"):
        load(folder)


def test_a_shard_missing_from_disk_is_refused_by_name(tiny_gqa, tmp_path):
    folder = copy_of(tiny_gqa, tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: missing"):
        load(folder)


def test_a_stored_head_of_a_tied_model_is_ignored_as_the_config_says(tmp_path):
    folder = tiny_folder(tmp_path / "model", tie_word_embeddings=True)
    before = logits_of(folder, TOKENS)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    junk = {
        "lm_head.weight": torch.randn_like(embedding),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file(tensors | junk, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, TOKENS), before)
