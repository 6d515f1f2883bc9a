"""fused.py: what its kernels compute is what torch computes, in whatever a matrix is kept.

As in test_flash.py, kernels run in Triton's interpreter where there is no GPU, and are compiled for one all the same.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flash import DEVICE, INTERPRETED, compiled, needs_gpu, recorded, triton
from torch.utils._python_dispatch import TorchDispatchMode

import flash
import fused
from cache import FlashCache, make
from fused import Product
from linear import FORMATS, Int4Linear, Int8Linear, Linear, fixed
from model import Config, Rotary, load, random_model
from native import ADD, SET, SWIGLU

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Norm:
    eps = 0.1  # so large that it shows

    def __init__(self, size):
        self.weight = torch.randn(size, device=DEVICE)

    def __call__(self, x):
        return torch.nn.functional.rms_norm(x.double(), self.weight.shape, self.weight.double(), self.eps)


# ---- products


def packed(numbers, each):
    """numbers 0 to 15 [out, in] in torch's order for CUDA, as its source has it: eight numbers of a lane to a word."""
    outputs, inputs = numbers.shape
    words = torch.zeros(outputs // 8, inputs // (32 * each), 32, each, dtype=torch.int64)
    strips, blocks, lanes, groups = (torch.arange(size) for size in words.shape)
    rows = strips[:, None, None, None] * 8 + lanes[:, None] // 4
    first = blocks[:, None, None] * 32 * each + groups * 32 + lanes[:, None] % 4 * 2
    for place, behind in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
        words |= numbers[rows, first + behind].long() << 4 * place
    return words.where(words < 2**31, words - 2**32).int()


def matrix(kind, inputs, outputs, bias=False):
    """A matrix of each kind, and the values that it stands for, [out, in] float64."""
    weight = torch.randn(outputs, inputs) / inputs**0.5
    if kind == "int4":
        made, numbers = Int4Linear(inputs, outputs, bias), torch.randint(16, (outputs, inputs))
        steps = torch.randn(inputs // 32, outputs, 2) / inputs**0.5
        made.steps = fixed(steps.bfloat16().to(DEVICE))
        made.packed = fixed(packed(numbers, next(e for e in (4, 2, 1) if inputs % (32 * e) == 0)).to(DEVICE))
        step, middle = made.steps.cpu().double().transpose(0, 1).repeat_interleave(32, 1).unbind(-1)
        values = (numbers - 8) * step + middle
    elif kind == "int8":
        made = Int8Linear(inputs, outputs, bias)
        made.pack(weight.to(DEVICE), torch.bfloat16)
        values = made.packed.double() * made.steps.double()[:, None]
    else:
        made = Linear(inputs, outputs, bias)
        made.weight = fixed(weight.to(DEVICE, kind))
        values = made.weight.double()
    if bias:
        made.bias = fixed(torch.randn(outputs).to(DEVICE, made.dtype))
    return made, values.to(DEVICE)


def check(kind, inputs, outputs, ending=SET, normed=False, bias=False):
    made, values = matrix(kind, inputs, outputs, bias)
    norm, x = Norm(inputs) if normed else None, torch.randn(1, inputs, device=DEVICE)
    expected = (norm(x) if normed else x.double()) @ values.T + (made.bias.double() if bias else 0)
    if ending == SWIGLU:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    product = Product(made, norm, ending)
    if ending == ADD:
        y = torch.ones(1, outputs, device=DEVICE)
        product.add(y, x)
        y -= 1
    else:
        y = product(x)
    # 128 + n is exact, and a sum of such products rounds as 128 of them would.
    error = 2e-4 if kind == "int4" else 2e-5
    torch.testing.assert_close(y.double(), expected, atol=error * (1 + expected.abs().max().item()), rtol=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([*DTYPES, "int8", "int4"]),
    st.one_of(st.integers(1, 130), st.sampled_from([576, 2000, 2049, 4100])),
    st.one_of(st.integers(1, 20), st.sampled_from([33, 130])),
    st.sampled_from([SET, ADD, SWIGLU]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_products_are_those_of_the_stored_values(kind, inputs, outputs, ending, normed, bias, seed):
    torch.manual_seed(seed)
    inputs, outputs = (inputs % 70 * 32 + 32, outputs % 4 * 64 + 64) if kind == "int4" else (inputs, 2 * outputs)
    check(kind, inputs, outputs, ending, normed, bias)


@needs_gpu
@pytest.mark.parametrize("kind", [*DTYPES, "int8", "int4"])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 28672), (14336, 4096), (576, 576)])
def test_products_of_real_sizes(kind, inputs, outputs):
    torch.manual_seed(0)
    for ending in (SET, ADD, SWIGLU):
        check(kind, inputs, outputs, ending, normed=ending != ADD)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, as it counts in numpy
def test_gates_far_from_zero_are_those_of_silu():
    made = Linear(1, 2, bias=True)
    made.weight, made.bias = (fixed(torch.tensor(x, device=DEVICE)) for x in ([[1.0], [0.0]], [0.0, 1.0]))
    for gate in (-1e30, -100.0, -80.0, 0.0, 20.0, 100.0, 3e4):
        x = torch.tensor([[gate]], device=DEVICE)
        torch.testing.assert_close(Product(made, None, SWIGLU)(x), torch.nn.functional.silu(x))


@pytest.mark.parametrize("kind", [*DTYPES, "int8", "int4"])
def test_what_is_not_a_number_is_not_hidden(kind):
    made, _ = matrix(kind, 64, 64)
    x = torch.ones(1, 64, device=DEVICE)
    x[0, 5] = torch.nan
    assert Product(made)(x).isnan().all()
    assert Product(made, Norm(64))(x).isnan().all()


@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_order_of_4_bits_is_undone(each):
    numbers = torch.randint(16, (24, 128), dtype=torch.int32)
    assert torch.equal(fused.unpacked(packed(numbers, each)), numbers)


@needs_gpu
@pytest.mark.parametrize("inputs", [96, 192, 4096])
def test_torch_orders_4_bits_so(inputs):
    assert fused.order_is_known()
    made = Int4Linear(inputs, 64)
    made.pack(torch.randn(64, inputs, device="cuda"), torch.bfloat16)
    x = torch.randn(1, inputs, device="cuda").bfloat16()
    torch.testing.assert_close(Product(made)(x.float()), made(x).float(), atol=0.5, rtol=0.02)


# ---- positions


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 6, 16, 80, 128]), st.booleans(), st.booleans()
)  # fmt: skip
def test_heads_are_normed_and_turned(group, kv_heads, dim, normed, turned):
    """As model.py has them, from the same qkv; the heads of v are left alone."""
    config = Config(8, 16, 8, 1, group * kv_heads, kv_heads, dim, qk_norm=normed, rms_norm_eps=0.1)
    model = random_model(config, DEVICE)
    attention = model.layers[0].self_attn
    attention.turned = turned
    if normed:
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight = fixed(torch.randn(dim, device=DEVICE))
    model.layers[0].input_layernorm.weight = fixed(torch.randn(16, device=DEVICE))
    x, places = torch.randn(1, 16, device=DEVICE), Rotary(config, DEVICE)(torch.tensor([7], device=DEVICE))
    expected = attention(model.layers[0].input_layernorm(x), *places)
    for mine, theirs in zip(fused.Halves(model.layers[0]).before(x, *places), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# ---- a model

FAMILY = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied, odd sizes": {"tie_word_embeddings": True, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10},
    "window": {"model_type": "mistral", "sliding_window": 7},
}


@pytest.mark.parametrize(
    ("kind", "mode", "settings"),
    [*(("flash", None, name) for name in FAMILY), ("paged", "int8", "biases"), ("int4", None, "biases")],
)  # fmt: skip
def test_steps_of_a_model_are_the_steps_of_torch(kind, mode, settings, tmp_path):
    """Over the seam, whatever the cache keeps; passes of several tokens are still torch's own."""
    folder = tiny_folder(tmp_path, num_hidden_layers=2, **FAMILY[settings])
    models = [load(folder, DEVICE, torch.float32, mode) for _ in range(2)]
    for model in models:
        for layer in model.layers:  # whatever the device has made of them
            vars(layer).pop("before", None), vars(layer).pop("after", None)
        vars(model).pop("head", None)
    fused.quicken(models[1])
    assert all("before" in vars(layer) and "after" in vars(layer) for layer in models[1].layers)
    config, logits = models[0].config, []
    for model in models:
        kv_cache = FlashCache(config, 40, DEVICE, torch.float32) if kind == "flash" else make(kind, config, 40, DEVICE)
        for n in (9, 1, 5, 1):
            kv_cache.extend(n)
            logits.append(model.head(model(torch.arange(n, device=DEVICE) * 7 + kv_cache.length, kv_cache)))
    torch.testing.assert_close(torch.cat(logits[4:]), torch.cat(logits[:4]), atol=2e-3, rtol=0)


class Others(TorchDispatchMode):
    """What torch is asked for beside memory and views of it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not re.search("empty|view|split|slice|select|reshape", str(op)):
            self.names.append(str(op))
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("normed", [False, True])
def test_a_layer_is_seven_launches(normed, monkeypatch):
    """The seventh brings splits together, and the interpreter's lone processor has none."""
    config = Config(16, 16, 16, 1, 4, 2, 4, qk_norm=normed)
    model, kv_cache = random_model(config, DEVICE), FlashCache(config, 200, DEVICE, torch.bfloat16)
    layer, x, places = model.layers[0], torch.zeros(1, 16, device=DEVICE), Rotary(config, DEVICE)
    fused.quicken(model)
    kv_cache.extend(1)
    cos, sin = places(kv_cache.positions)
    own = recorded(monkeypatch, fused, "_product", "_turn")
    attention = recorded(monkeypatch, flash, "_attend_split", "_merge")
    with Others() as others:
        layer(x, cos, sin, kv_cache)
    assert (len(own), len(attention), others.names) == (5, 2 if DEVICE == "cuda" else 1, [])


def test_a_matrix_in_an_unknown_order_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(fused, "order_is_known", lambda: False)
    model = random_model(Config(64, 64, 96, 1, 2), DEVICE, torch.bfloat16, "int4")
    usual = dict(vars(model.layers[0]))
    fused.quicken(model)
    assert vars(model.layers[0]) == usual


@needs_gpu
@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_a_model_on_a_gpu_makes_its_steps_so(mode):
    from graph import Graph

    model = random_model(Config(512, 256, 512, 2, 4, 2), "cuda", torch.bfloat16, mode)
    assert "before" in vars(model.layers[0]) and "head" in vars(model)
    usual = random_model(Config(512, 256, 512, 2, 4, 2), "cuda", torch.bfloat16, mode)
    for layer in usual.layers:
        del layer.before, layer.after
    del usual.head
    caches = [make("contiguous", model.config, 64, "cuda", torch.bfloat16) for _ in range(2)]
    graph = Graph(model, caches[0])
    for token in range(10):
        for kv_cache in caches:
            kv_cache.extend(1)
        token = torch.tensor([token], device="cuda")
        theirs = usual.head(usual(token, caches[1]))
        torch.testing.assert_close(graph(token), theirs, atol=0.05 * theirs.abs().max().item(), rtol=0)


# ---- compiled


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8", "int4"])
@pytest.mark.parametrize(("inputs", "outputs", "ending"), [(4096, 28672, SWIGLU), (14336, 4096, ADD), (576, 576, SET)])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(kind, inputs, outputs, ending, monkeypatch, tmp_path):
    """With the sizes of real models, for an H200: they load 16 bytes at a time, or 8 where torch has packed so, and
    registers hold all."""
    if INTERPRETED:
        pytest.skip("done by a Triton that compiles, in another process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fused, "processors", lambda device: 132)
    launches, norm, each = recorded(monkeypatch, fused, "_product", "_turn"), Norm(inputs), 4
    made = (FORMATS[kind][0] if isinstance(kind, str) else Linear)(inputs, outputs)
    if kind == "int4":
        each = next(each for each in (4, 2, 1) if inputs % (32 * each) == 0)
        shape = outputs // 8, inputs // 32 // each, 32, each
        made.packed = fixed(torch.empty(shape, dtype=torch.int32, device="meta"))
        made.steps = fixed(torch.empty((inputs // 32, outputs, 2), dtype=torch.bfloat16, device="meta"))
    elif kind == "int8":
        made.packed = fixed(torch.empty((outputs, inputs), dtype=torch.int8, device="meta"))
        made.steps = fixed(torch.empty(outputs, dtype=torch.bfloat16, device="meta"))
    else:
        made.weight = fixed(torch.empty((outputs, inputs), dtype=kind, device="meta"))
    Product(made, norm if ending != ADD else None, ending)(torch.empty((1, inputs), device="meta"))
    kernel = compiled(*launches[0])
    assert re.search(rf"ld\.global\S*evict_first\S*\.v{each}\.b32", kernel.asm["ptx"])
    assert spilled(kernel, tmp_path) <= 16


def test_turning_compiles_for_a_gpu_that_is_not_there(monkeypatch, tmp_path):
    if INTERPRETED:
        pytest.skip("done by a Triton that compiles, in another process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = random_model(Config(8, 16, 8, 1, 4, 2, 128, qk_norm=True))
    launches = recorded(monkeypatch, fused, "_product", "_turn")
    fused.Halves(model.layers[0]).before(torch.zeros(1, 16), *Rotary(model.config)(torch.tensor([7])))
    assert spilled(compiled(*launches[1]), tmp_path) == 0


def spilled(kernel, folder):
    """Bytes that a thread keeps in memory for want of registers."""
    (folder / "kernel").write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("no cuobjdump")
    told = subprocess.run([tool, "-res-usage", folder / "kernel"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])


@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles in this process")
def test_the_kernels_compile():
    command = [sys.executable, "-m", "pytest", __file__, "-k", "for_a_gpu"]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
