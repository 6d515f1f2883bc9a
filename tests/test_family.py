"""Each type of the family and each way to stretch RoPE: transformers' logits, in a prefill and in 20 cached steps.

The prompts cross the sliding window and the original RoPE length. Where transformers makes a parameter that hides
faults (zero biases, norms of one), the test makes it random.
"""

import json

import pytest
import torch
import transformers
from conftest import VOCABULARY
from safetensors.torch import load_file, save_file

from cache import KINDS, make
from generate import passes
from model import Config, ModelError, Rotary, load

WINDOW, ORIGINAL, PROMPT, STEPS = 7, 32, 45, 20
TOKENS = [(37 * i * i + 11 * i + 5) % VOCABULARY for i in range(PROMPT + STEPS)]


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **settings}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"original_max_position_embeddings": ORIGINAL, "beta_fast": 8.0, "beta_slow": 0.5}
CASES = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", rope("linear")),
    "llama-dynamic": ("Llama", {**rope("dynamic"), "max_position_embeddings": ORIGINAL}),
    "llama-llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama-yarn": ("Llama", rope("yarn", **YARN)),
    "llama-yarn-mscale": ("Llama", rope("yarn", **YARN, mscale=1.2, mscale_all_dim=0.7)),
    "llama-yarn-untruncated": ("Llama", rope("yarn", **YARN, truncate=False, attention_factor=1.3)),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e8}}),
    "mistral-always": ("Mistral", {"sliding_window": WINDOW, "use_sliding_window": False, "max_window_layers": 2}),
    "mistral-whole": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-sliding": (
        "Qwen3",
        {"head_dim": 8, "attention_bias": True, "use_sliding_window": True, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-listed": ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False}),
    "smollm3-sliding": ("SmolLM3", {"use_sliding_window": True, "sliding_window": WINDOW}),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    kind, settings = CASES[request.param]
    path = tmp_path_factory.mktemp("family") / request.param
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    rest = {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4 * ORIGINAL}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **rest, **ids, "initializer_range": 0.15, **settings})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias") or "norm" in name:
            tensors[name] = torch.randn_like(tensor) * 0.3 + name.endswith("norm.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
@torch.inference_mode()
def expected(folder):
    """transformers' logits [PROMPT + STEPS, V]: of the prompt in one pass, then step by step from its cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = model(torch.tensor([TOKENS[:PROMPT]]), use_cache=True)
    logits = [out.logits[0]]
    for token in TOKENS[PROMPT:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"none", "int8", "int4"}))
def test_prefill_and_cached_steps_give_the_logits_of_transformers(folder, expected, kind):
    model = load(folder)
    cache = make(kind, model.config, len(TOKENS))
    logits = []
    for start, end in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, PROMPT + STEPS))]:
        cache.extend(end - start)
        logits.append(model.head(model(torch.tensor(TOKENS[start:end]), cache)))
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 7, 8, 30])
def test_chunks_across_the_window_give_the_logits_of_a_recompute(folder, chunk):
    model = load(folder)
    if model.rotary.kind == "dynamic":
        pytest.skip("dynamic positions depend on how long the context was when a key was stored")
    logits = []
    for cache in (make("contiguous", model.config, PROMPT), make("none", model.config, PROMPT)):
        for hidden in passes(model, cache, TOKENS[:PROMPT], chunk):
            last = hidden[-1:]
        logits.append(model.head(last))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_a_window_counts_the_token_itself():
    """With one layer and a window of 3, an output feels the value of the third last token, not the fourth."""
    config = Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, windows=(3,)
    )
    torch.manual_seed(0)
    cache, (q, k, v) = make("contiguous", config, 16), torch.randn(3, 10, 4, 8)
    cache.extend(9)
    cache.attend(0, q[:9], k[:9], v[:9])
    outputs = []
    for slot in (None, 6, 7):
        cache.keys_values[:, 1, :, slot] *= 1 if slot is None else 2
        cache.extend(1)
        outputs.append(cache.attend(0, q[9:], k[9:], v[9:]))
        cache.truncate(9)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


# ---- published figures


def rotary(**settings):
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    return Rotary(Config(**sizes, num_attention_heads=1, max_position_embeddings=2048, rope_scaling=settings))


@pytest.mark.parametrize(("length", "theta"), [(2048, 10000.0), (2049, 10010.08), (4096, 31082.24)])
def test_dynamic_theta_is_the_published_one(length, theta):
    frequencies = rotary(rope_type="dynamic", factor=2.0)._frequencies_at(torch.tensor([0, length - 1]))
    assert frequencies[1].item() ** -32 == pytest.approx(theta, rel=1e-4)


def test_yarn_is_the_published_one():
    turned = rotary(type="yarn", factor=4.0, original_max_position_embeddings=2048)
    assert turned.length == pytest.approx(1.138629, abs=1e-6)
    assert turned.frequencies[-1].item() == pytest.approx(3.333804e-5, rel=1e-5)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_spellings_of_a_type_are_read(key):
    assert torch.equal(rotary(**{key: "linear", "factor": 2.0}).frequencies, rotary().frequencies / 2)


def test_an_original_length_beside_the_scaling_counts_as_transformers_has_it(tmp_path):
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "max_position_embeddings": 512, "original_max_position_embeddings": 32}
    config |= {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 77}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(Rotary(Config.from_folder(tmp_path)).frequencies, expected)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "supported: llama, mistral, qwen2, qwen3, smollm3"),
        ({"model_type": None}, "model_type is None"),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor '2'"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "'su'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor 0"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": "all"}, "layer_types"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(change, named, tiny_gqa, tmp_path):
    raw = json.loads((tiny_gqa / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelError) as refusal:
        Config.from_folder(tmp_path)
    assert named in str(refusal.value)
