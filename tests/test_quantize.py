"""Weights in 8 and 4 bits: how far they are from the original ones, that their products are those of what they stand
for, exact bytes, and what a real model loses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_folder
from safetensors.torch import load_file, save_file

import chat
import linear
from cache import make
from generate import Sampling, Session, passes
from linear import FORMATS, Columns, Int4Linear, Int8Linear, Linear, Packed
from model import Llama, ModelError, load
from tokenizer import Tokenizer

TOKENS = [5, 17, 200, 33, 5, 90, 121, 8, 64, 250, 5, 17, 3, 77, 140, 31] * 5
MODES = ("int8", "int4")


def packed(mode, weight, dtype=torch.bfloat16, bias=False):
    """A matrix in the format of a mode, holding ``weight`` [out, in]."""
    outputs, inputs = weight.shape
    matrix = FORMATS[mode][0](inputs, outputs, bias)
    matrix.pack(weight, dtype)
    if bias:
        matrix.bias = linear.fixed(torch.randn(outputs).to(dtype))
    return matrix


def values(matrix):
    """What the packed weights stand for, [out, in] float32: times one and zeros, in float32."""
    wide = FORMATS["int8"][0](matrix.inputs, matrix.outputs) if isinstance(matrix, Int8Linear) else None
    wide = wide or Int4Linear(matrix.inputs, matrix.outputs)
    wide.packed, wide.steps = matrix.packed, linear.fixed(matrix.steps.float())
    return wide.product(torch.eye(matrix.inputs)).T


def awkward(outputs, inputs):
    """Weights with a row of zeros, one of tiny values, one far from zero, and outliers."""
    torch.manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs) * 0.05
    weight[0], weight[1], weight[2] = 0, weight[1] * 1e-6, weight[2] * 0.01 + 1
    weight[3, ::7] *= 40
    return weight


# ---- one matrix


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_values_are_within_half_a_step_of_their_output(dtype, stored):
    weight = awkward(128, 96).to(stored)
    matrix = packed("int8", weight, dtype)
    error = (values(matrix) - weight.float()).abs()
    assert (error <= 0.5001 * matrix.steps.float()[:, None]).all()
    assert (matrix.steps.float() <= 1.01 * weight.float().abs().amax(1) / 127 + 1e-37).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_values_are_within_half_a_step_of_their_group(dtype, stored):
    """But for what rounding the sixteen values' own middle costs, a 256th of it in bfloat16."""
    weight = awkward(128, 96).to(stored)
    matrix = packed("int4", weight, dtype)
    assert isinstance(matrix, Int4Linear)
    step, middle = (x.T.repeat_interleave(32, 1) for x in matrix.steps.float().unbind(-1))
    error = (values(matrix) - weight.float()).abs()
    assert (error <= 0.5001 * step + torch.finfo(dtype).eps * middle.abs()).all()
    groups = weight.float().unflatten(1, (-1, 32))
    width = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    largest = matrix.steps[..., 0].float().T
    assert (largest <= 1.01 * width / 15 + 1e-37).all()


SHAPES = [(128, 96), (64, 32), (40, 32), (64, 50), (259, 64), (1152, 1024)]  # (out, in); the last in two blocks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_products_are_those_of_the_values_up_to_rounding(mode, dtype, shape):
    """For few rows, which the kernel multiplies, and for many, which want the weights unpacked."""
    matrix = packed(mode, awkward(*shape), dtype, bias=True)
    weight, bias = values(matrix).double(), matrix.bias.double()
    # In bfloat16 terms and sum are rounded once each; in float32 each partial sum is, and sums are long.
    eps = {torch.bfloat16: 2, torch.float32: 8}[dtype] * torch.finfo(dtype).eps
    for rows in (1, 2, 7, 8, 33, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        y = matrix(x)
        assert y.dtype is dtype
        size = torch.nn.functional.linear(x.double().abs(), weight.abs(), bias.abs())
        error = y.double() - torch.nn.functional.linear(x.double(), weight, bias)
        assert (error.abs() <= eps * size).all(), rows


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("mode", MODES)
def test_products_need_neither_a_known_order_nor_16_bit_kernels(mode, rows, monkeypatch):
    matrix, x = packed(mode, awkward(128, 96)), torch.randn(rows, 96).bfloat16()
    exact = x.double() @ values(matrix).double().T
    for name, stub in (("cpu_multiplies", lambda dtype: False), ("rows_in_a_block", lambda: 0)):
        monkeypatch.setattr(linear, name, stub)
        torch.testing.assert_close(matrix(x).double(), exact, atol=0.1, rtol=0.02)


def test_shapes_that_do_not_divide_are_kept_in_8_bits():
    for outputs, inputs in ((40, 32), (64, 50)):
        assert isinstance(FORMATS["int4"][0](inputs, outputs), Int8Linear)


# ---- a whole model

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


@pytest.fixture(scope="module", params=["MHA", "GQA, tied", "MQA, biases"])
def folder(request, tmp_path_factory):
    """A tiny model whose matrices divide into groups; its head's 259 outputs do not."""
    heads, kv_heads = HEADS[request.param[:3]]
    settings = {"tie_word_embeddings": "tied" in request.param, "attention_bias": "biases" in request.param}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "mlp_bias": "biases" in request.param}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    folder = tiny_folder(tmp_path_factory.mktemp("quantize") / "model", **settings, **sizes, **shape)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: torch.randn_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits_of(model, chunks):
    """Logits [T, V] of TOKENS, in passes of so many tokens."""
    kept = make("contiguous", model.config, len(TOKENS), dtype=model.dtype)
    parts = []
    for part in torch.tensor(TOKENS).split(chunks):
        kept.extend(len(part))
        parts.append(model.head(model(part, kept)))
    return torch.cat(parts)


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_of_the_values(mode, folder):
    model, plain = load(folder, dtype=torch.float32, quantize=mode), load(folder, dtype=torch.float32)
    for name, matrix in model.named_modules():
        if isinstance(matrix, Packed):
            plain.get_submodule(name).weight = linear.fixed(values(matrix))
    torch.testing.assert_close(logits_of(model, 80), logits_of(plain, 80), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.4)])
@pytest.mark.parametrize("mode", MODES)
def test_cached_equals_recomputed(mode, dtype, error, folder):
    """In bfloat16 within rounding, which is coarse for these logits of up to 10; single tokens are rounded less."""
    model = load(folder, dtype=dtype, quantize=mode)
    assert model.dtype is dtype
    whole = logits_of(model, len(TOKENS))
    for chunks in ([1] * 80, [33, 7, *[1] * 10, 30]):
        torch.testing.assert_close(logits_of(model, chunks), whole, atol=error, rtol=0)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_bytes_are_exact(mode, folder, capsys):
    model = load(folder, quantize=mode)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert Llama.bytes_for(model.config, model.dtype, mode) == held
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert sum(matrix.bytes for matrix in matrices) + norms == held
    assert chat.main(["--plan", "--model", str(folder), "--quantize", mode or "none"]) == 0
    assert f"{held} bytes" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weights"))


def test_fingerprints_tell_formats_apart(folder):
    prints = {load(folder, quantize=mode).fingerprint for mode in (None, *MODES)}
    assert len(prints) == 3
    assert load(folder, quantize="int4").fingerprint in prints


def test_a_rank_packs_its_slices(tmp_path):
    """In 4 bits, where groups stay whole; for 8 bits the ranks agree on the steps, and test_parallel.py has them."""
    folder = tiny_folder(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=32)
    whole = load(folder, quantize="int4")
    ranks = [load(folder, quantize="int4", rank=rank, world=2) for rank in range(2)]
    for name, matrix in whole.layers.named_modules():
        if not isinstance(matrix, Packed):
            continue
        parts, ours = [rank.layers.get_submodule(name) for rank in ranks], values(matrix)
        splits_inputs = isinstance(parts[0].part, Columns)
        joined = torch.cat([values(part) for part in parts], 1 if splits_inputs else 0)
        if not splits_inputs:  # each rank's rows are queries, keys and values, or gate and up
            order = torch.arange(len(ours)).view(-1, 32)  # 4 query heads over 2 of keys and of values; or 4 + 4 parts
            first, second = ([0, 1, 4, 6], [2, 3, 5, 7]) if "qkv" in name else ([0, 1, 4, 5], [2, 3, 6, 7])
            ours = ours[order[first + second].flatten()]
        assert torch.equal(joined, ours), name


PEAK = """
import resource, sys, model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
model.load(sys.argv[1], quantize=sys.argv[3])  # a small one, so that what libraries take is not counted
before = peak()
kept = model.load(sys.argv[2], quantize=sys.argv[3])
print(peak() - before - sum(p.nbytes for p in kept.parameters()))
"""


def test_loading_takes_the_packed_weights_and_one_tensor(tiny_gqa, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    tied = LlamaConfig(**sizes, num_attention_heads=8, torch_dtype="float16", tie_word_embeddings=True)
    LlamaForCausalLM(tied).half().save_pretrained(tmp_path)
    table = 32000 * 512  # weights, packed in 8 bits from the stored 16, some rows at a time
    for mode in MODES:
        run = [sys.executable, "-c", PEAK, str(tiny_gqa), str(tmp_path), mode]
        done = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
        assert float(done.stdout) < 3 * table + 2**23, mode


# ---- the real model


@pytest.fixture(scope="module", params=MODES)
def mode_and_model(request, default_model):
    return request.param, load(default_model, quantize=request.param)


def surprise(model, tokens):
    """Mean negative log likelihood of each token after those before it."""
    kept = make("contiguous", model.config, len(tokens), dtype=model.dtype)
    logits = torch.cat([model.head(hidden) for hidden in passes(model, kept, tokens[:-1], 256)])
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item()


@pytest.fixture(scope="module")
def text_and_surprise(default_model):
    """400 tokens of a real text, and how much they surprise the model in bfloat16 with its weights whole."""
    from pydoc_data.topics import topics

    tokens = Tokenizer.from_folder(default_model).encode(topics["class"][:3000])[:401]
    return tokens, surprise(load(default_model, dtype=torch.bfloat16), tokens)


def test_perplexity_on_a_real_text_grows_by_less_than_two_percent(mode_and_model, text_and_surprise):
    tokens, before = text_and_surprise
    assert surprise(mode_and_model[1], tokens) - before < 0.02


def test_greedy_answers_make_sense(mode_and_model, default_model):
    (_, model), tokenizer = mode_and_model, Tokenizer.from_folder(default_model)
    session = Session(model, make("contiguous", model.config, 256, dtype=model.dtype), tokenizer)
    prompt = tokenizer.chat([{"role": "user", "content": "Name three primary colours."}])
    answer = "".join(step.text for step in session.generate(prompt, Sampling(temperature=0, max_tokens=32)))
    assert "Red" in answer and "Blue" in answer


def test_bytes_of_the_default_model_are_a_half_and_a_third(mode_and_model):
    mode, model = mode_and_model
    assert model.bytes_per_step == {"int8": 135_029_760, "int4": 94_905_600}[mode]


# ---- refusals


def test_what_cannot_be_is_refused_in_a_line(tiny_gqa, capsys):
    for settings, named in (
        ({"quantize": "int3"}, "quantize is 'int3'; supported: int8, int4"),
        ({"quantize": "int8", "dtype": torch.float16}, "int8 weights on cpu compute in bfloat16 or float32, not in"),
        ({"quantize": "int4", "device": "mps"}, "int4 weights are for cpu and cuda, and not for mps"),
    ):
        with pytest.raises(ModelError, match=named):
            load(tiny_gqa, **settings)
    options = ["--plan", "--model", str(tiny_gqa), "--quantize", "int4", "--dtype", "float16"]
    assert chat.main(options) == 2
    assert capsys.readouterr().err.count("\n") == 1
