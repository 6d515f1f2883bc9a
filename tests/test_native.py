"""The kernels for a CPU: what they compute is what torch computes, and without them everything is as it was."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from conftest import HEADS, tiny_folder
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_chat import environment, start

import native
from cache import make
from linear import FORMATS, Int4Linear, Linear, Whole, fixed
from model import Config, Llama, RMSNorm, Rotary, load, random_model
from native import ADD, FEW, SET, SWIGLU, Matrix
from paged import PagedBatch, Pool
from seam import Piece, attention

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("two_threads")


@needs_compiler
def test_the_kernels_are_there():
    assert native.library() is not None


# ---- products


def matrix(kind, inputs, outputs, bias):
    """A matrix of each kind, and the values that it stands for, [out, in] float64."""
    weight = torch.randn(outputs, inputs) / inputs**0.5
    if isinstance(kind, torch.dtype):
        made = Linear(inputs, outputs, bias)
        made.weight = fixed(weight.to(kind))
        values = made.weight.double()
    else:
        made = FORMATS[kind][0](inputs, outputs, bias)
        made.pack(weight, torch.bfloat16)
        wide = type(made)(inputs, outputs)
        wide.packed, wide.steps = made.packed, fixed(made.steps.float())
        values = wide.product(torch.eye(inputs)).T.double()  # in float32: by torch
    if bias:
        made.bias = fixed(torch.randn(outputs).to(made.dtype))
    return made, values


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([*DTYPES, "int8", "int4"]),
    st.one_of(st.integers(1, FEW), st.sampled_from([17, 31, 33, 100, 129, 150])),
    st.one_of(st.integers(1, 130), st.sampled_from([768, 769, 1600])),
    st.integers(1, 70),
    st.sampled_from([SET, ADD, SWIGLU]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_products_are_those_of_the_stored_values(kind, tokens, inputs, outputs, ending, normed, bias, seed):
    torch.manual_seed(seed)
    inputs, outputs = (inputs % 60 * 32 + 32, outputs % 9 * 128 + 128) if kind == "int4" else (inputs, 2 * outputs)
    made, values = matrix(kind, inputs, outputs, bias)
    assume(native.takes(made))  # torch orders 4 bits in its own way on each processor
    norm = RMSNorm(inputs, 1e-5) if normed else None
    x, expected = torch.randn(tokens, inputs), torch.zeros(())
    if normed:
        norm.weight = fixed(torch.randn(inputs))
    wide = torch.nn.functional.rms_norm(x.double(), (inputs,), norm.weight.double(), 1e-5) if normed else x.double()
    expected = wide @ values.T + (made.bias.double() if bias else 0)
    if ending == SWIGLU:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    product = Matrix(made, norm, ending)
    if ending == ADD:
        y = torch.ones(tokens, outputs)
        native.perform([product.job(y, x, ADD)])
        y -= 1
    else:
        y = product(x)
    torch.testing.assert_close(y.double(), expected, atol=2e-5 * (1 + expected.abs().max().item()), rtol=0)


class Doubled(Whole):
    """Two ranks whose parts are alike."""

    def join(self, product):
        return 2 * product


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_ranks_bring_together_has_the_bias_once(tokens):
    made, _ = matrix(torch.float32, 16, 8, bias=True)
    made.part, x = Doubled(), torch.randn(tokens, 16)
    torch.testing.assert_close(Matrix(made)(x), made(x), atol=1e-5, rtol=1e-5)


@needs_compiler
def test_gates_far_from_zero_are_those_of_silu():
    made, x = Linear(1, 2), torch.tensor([[-1e30], [-100.0], [-80.0], [0.0], [20.0], [100.0], [3e4]])
    made.weight = fixed(torch.tensor([[1.0], [0.0]]))
    made.bias = fixed(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(Matrix(made, None, SWIGLU)(x), torch.nn.functional.silu(x))


@needs_compiler
@pytest.mark.parametrize("kind", [*DTYPES, "int8", "int4"])
def test_what_is_not_a_number_is_not_hidden(kind):
    made, _ = matrix(kind, 64, 64, False)
    x = torch.ones(1, 64)
    x[0, 5] = torch.nan
    assert not native.takes(made) or Matrix(made)(x).isnan().all()
    assert attend(x.view(1, 1, 64), torch.ones(1, 9, 64), torch.ones(1, 9, 64)).isnan().all()


# ---- positions


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_heads_are_normed_and_turned(tokens, normed, turned, tiny_gqa):
    """As model.py has them; the heads of v are left alone."""
    model = load(tiny_gqa)
    layer, config = model.layers[0], model.config
    halves, attention = native.Halves(layer), layer.self_attn
    if normed:
        norms = RMSNorm(config.head_dim, 1e-6), RMSNorm(config.head_dim, 1e-6)
        for norm in norms:
            norm.weight = fixed(torch.randn(config.head_dim))
        halves.norms = attention.q_norm, attention.k_norm = norms
    halves.turned = attention.turned = turned
    x, places = torch.randn(tokens, config.hidden_size), Rotary(config)(torch.arange(7, 7 + tokens))
    expected = attention(layer.input_layernorm(x), *places)
    for mine, theirs in zip(halves.before(x, *places), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# ---- attention


def attend(q, k, v, *cuts):
    """By the kernel, k and v [Hkv, S, D] being read in the stretches between the cuts."""
    stretches = [(0, a, b) for a, b in pairwise((0, *cuts, k.shape[1]))]
    return native.held([(k, v)])[0].attend(q, native.Seen([(1, stretches)]))


@needs_compiler
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([16, 48, 64, 80, 128]),
    st.one_of(st.integers(1, 300), st.sampled_from([128, 129, 1024, 2500])),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_attention_of_one_query_is_that_of_the_formula(dtype, kv_heads, group, dim, tokens, sharp, mixed, seed):
    """Also over tokens first instead of heads first, as pages have them, and where a score is far above the others."""
    torch.manual_seed(seed)
    q = sharp * torch.randn(1, kv_heads * group, dim)
    shape = (tokens, kv_heads, dim) if mixed else (kv_heads, tokens, dim)
    k, v = (torch.randn(shape).to(dtype) for _ in range(2))
    k, v = (k.transpose(0, 1), v.transpose(0, 1)) if mixed else (k, v)
    scores = torch.einsum("hgd,hsd->hgs", q.view(kv_heads, group, dim).double(), k.double()) / dim**0.5
    expected = (scores.softmax(-1) @ v.double()).view(1, -1, dim)
    y = attend(q, k, v)
    close = {"atol": 2e-6 * (5 + sharp), "rtol": 1e-4}  # a score of 100 is off by 1e-5 in float32
    torch.testing.assert_close(y.double(), expected, **close)
    if tokens > 1:  # in stretches
        cuts = sorted(torch.randint(1, tokens, (2,)).unique().tolist())
        torch.testing.assert_close(attend(q, k, v, *cuts).double(), expected, **close)


@needs_compiler
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "window", "sinks", "int8", "int4"])
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.one_of(st.integers(1, 90), st.just(1)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 4, 8]),
    st.integers(0, 2**32),
)
def test_a_pass_attends_over_what_the_cache_holds(kind, window, dtype, passes, group, seed):
    """In each layout, its own tokens stored: what ``_read`` tells, in float64, each query up to itself."""
    torch.manual_seed(seed)
    config = Config(8, 64, 8, 1, 2 * group, 2, 32, windows=(window,), rotary=(True,))
    kv_cache = make(kind, config, 150 if kind == "sinks" else 360, "cpu", dtype)  # sinks forget
    for n in passes:
        while n > 0:
            now = min(n, max(1, kv_cache.room))
            kv_cache.extend(now)
            q, k, v = (3 * torch.randn(now, heads, 32) for heads in (2 * group, 2, 2))
            held, n = kv_cache._kernels[0], n - now
            y = held.attend(q, kv_cache._seen(0), (k, v))
            first = kv_cache._oldest(0)
            pieces = zip(*kv_cache._read(0, first, kv_cache.held), strict=True)
            keys, values = (torch.cat(list(part), 1).double() for part in pieces)
            assert torch.equal(keys[:, -now:], k.to(dtype).double().transpose(0, 1))
            at, places = torch.arange(first, kv_cache.held), torch.arange(kv_cache.held - now, kv_cache.held)[:, None]
            hidden = (at > places) | (at <= places - (window or 1000))
            scores = torch.einsum("thgd,hsd->hgts", q.view(now, 2, group, 32).double(), keys) / 32**0.5
            expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[:, None]
            expected = expected.permute(2, 0, 1, 3).reshape(y.shape)
            torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)  # scores of 30 are off by 1e-5


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=5),
    st.sampled_from([None, 1, 20]),
    st.sampled_from([1, 3, 7]),
    st.integers(0, 2**32),
)
def test_sequences_see_themselves_alone(sequences, window, group, seed):
    """Several of them in one call, their tokens scattered; what else lies in the memory may be anything."""
    torch.manual_seed(seed)
    total = sum(count + past for count, past in sequences)
    slots, memory = torch.randperm(2 * total).tolist(), torch.full((2, 2, 2 * total, 16), torch.nan)
    q, k, v = (torch.randn(sum(count for count, _ in sequences), heads, 16) for heads in (2 * group, 2, 2))
    where, expected, query = [], [], 0
    for count, past in sequences:
        own, slots = slots[: count + past], slots[count + past :]
        memory[:, :, own[:past]] = torch.randn(2, 2, past, 16)
        part = slice(query, query := query + count)
        keys, values = (
            torch.cat((x[:, own[:past]], new[part].transpose(0, 1)), 1) for x, new in zip(memory, (k, v), strict=True)
        )
        first = max(0, past + 1 - (window or 1000))
        where.append((count, [(0, slot, slot + 1) for slot in own[first:]]))
        at, places = torch.arange(count + past), torch.arange(past, count + past)[:, None]
        hidden = (at > places) | (at <= places - (window or 1000))
        scores = torch.einsum("thgd,hsd->hgts", q[part].view(count, 2, group, 16), keys) / 4
        expected.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[:, None]).permute(2, 0, 1, 3))
    y = native.held([memory])[0].attend(q, native.Seen(where, window), (k, v))
    torch.testing.assert_close(y, torch.cat(expected).reshape(y.shape), atol=2e-5, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("tokens", [2, 7, 40])
@pytest.mark.parametrize("heads", [1, 3, 12])
def test_tokens_that_a_query_does_not_see_weigh_nothing(tokens, heads):
    """Not a little: later values are so large that the smallest float times them would show."""
    q, k = torch.randn(tokens, heads, 16), torch.randn(tokens, 1, 16)
    v = torch.full((tokens, 1, 16), 1e38)
    v[0], memory = 0, torch.zeros(2, 1, tokens, 16)
    y = native.held([memory])[0].attend(q, native.Seen([(tokens, [(0, 0, tokens)])]), (k, v))
    assert not y[0].any() and y[1:].all()


# ---- steps


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made, wide = tmp_path_factory.mktemp("models"), {"hidden_size": 128, "intermediate_size": 128}
    for name, (heads, kv_heads) in HEADS.items():
        tiny_folder(made / name, 0.1, num_attention_heads=heads, num_key_value_heads=kv_heads, **wide)
    tiny_folder(made / "biased", 0.1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **wide)
    return made


def logits(model, kind):
    """Of a prompt, steps, and passes of a few tokens at once."""
    kv_cache, tokens, seen = make(kind, model.config, 128, model.device, model.dtype), [*range(40, 140)], []
    for n in (40, 1, 1, 1, FEW, 1, 2, 20, 1):
        kv_cache.extend(n)
        seen.append(model.head(model(torch.tensor(tokens[:n]), kv_cache)))
        tokens = tokens[n:]
    return torch.cat(seen)


@needs_compiler
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("name", [*HEADS, "biased"])
@pytest.mark.parametrize(
    ("dtype", "quantize", "error"),
    [
        *((torch.float32, None, 2e-5), (torch.float16, None, 0.01), (torch.bfloat16, None, 0.1)),
        *((None, "int8", 0.1), (None, "int4", 0.1), (torch.float32, "int8", 2e-5), (torch.float32, "int4", 2e-5)),
    ],
)
def test_steps_are_those_of_torch(name, dtype, quantize, error, kind, folders, monkeypatch):
    """Within the rounding of the dtype, which the kernels do less of."""
    fast = logits(load(folders / name, dtype=dtype, quantize=quantize), kind)
    monkeypatch.setattr(native, "library", lambda: None)
    usual = logits(load(folders / name, dtype=dtype, quantize=quantize), kind)
    torch.testing.assert_close(fast, usual, atol=error * usual.abs().max().item(), rtol=0)
    assert quantize or dtype is torch.float32 or not torch.equal(fast, usual)  # it was not the same code


@needs_compiler
@pytest.mark.parametrize("kind", ["contiguous", "paged", "window", "sinks", "int8", "int4", "offload"])
def test_all_layers_in_one_call_are_the_layers_one_by_one(kind, folders, tmp_path, monkeypatch):
    """To the bit; two conversations in turn, and several sequences at once where they share pages."""
    model, options = load(folders / "GQA"), {"folder": tmp_path} if kind == "offload" else {}

    def said():
        caches, out = [make(kind, model.config, 96, "cpu", torch.float32, **options) for _ in range(2)], []
        for n in (40, 1, 1, 30, 1):
            for place, kv_cache in enumerate(caches):
                kv_cache.extend(n)
                out.append(model(torch.arange(n) + 7 * place, kv_cache))
        if kind == "paged":
            caches[0].truncate(60)
            sequences = [caches[0], caches[0].fork(), caches[0].fork()]
            sequences[1].truncate(50)
            for _ in range(2):
                for sequence in sequences:
                    sequence.extend(1)
                out.append(model(torch.arange(3), PagedBatch.of(sequences)))
        return torch.cat(out)

    together, calls = said(), []
    one_by_one = partial(Llama.through, model)
    monkeypatch.setattr(model, "through", lambda *args: (calls.append(1), one_by_one(*args))[1])
    assert torch.equal(together, said()) and calls


@needs_compiler
def test_a_step_is_one_call(folders, monkeypatch):
    model, calls = load(folders / "GQA"), []
    kv_cache = make("contiguous", model.config, 96, "cpu", torch.float32)
    perform = native.perform
    monkeypatch.setattr(native, "perform", lambda jobs: (calls.append(len(jobs)), perform(jobs)))
    for n in (3, 1):
        calls.clear()
        kv_cache.extend(n)
        model(torch.arange(n), kv_cache)
    assert calls == [6 * len(model.layers)]


@needs_compiler
def test_passes_are_left_to_torch_where_it_multiplies_faster(folders, monkeypatch):
    """Also those of many sequences, each with a single token, which the kernels would attend."""
    model = load(folders / "GQA")
    pool, performed, perform = Pool(model.config, 40, "cpu", torch.float32), [], native.perform
    monkeypatch.setattr(native, "perform", lambda jobs: (performed.append(len(jobs)), perform(jobs)))
    for count in (FEW, FEW + 1):
        sequences = [pool.sequence(16) for _ in range(count)]
        for sequence in sequences:
            sequence.extend(1)
        performed.clear()
        model(torch.arange(count), PagedBatch.of(sequences))
        assert performed == ([6 * len(model.layers)] if count == FEW else [1] * len(model.layers))


@needs_compiler
def test_a_pass_that_breaks_off_while_it_is_made_leaves_nothing_behind(folders, monkeypatch):
    """Ctrl-C, or no memory: jobs over memory that is gone would write into what others have there now."""
    model, of = load(folders / "GQA"), native.Attend.of

    def hidden(tokens):
        kv_cache = make("contiguous", model.config, 96, "cpu", torch.float32)
        kv_cache.extend(tokens)
        return model(torch.arange(tokens), kv_cache)

    def broken(*args):
        raise KeyboardInterrupt

    for tokens in (7, 11):
        expected = hidden(tokens)
        hidden(3)
        monkeypatch.setattr(native.Attend, "of", broken)
        with pytest.raises(KeyboardInterrupt):
            hidden(tokens)
        monkeypatch.setattr(native.Attend, "of", of)
        assert torch.equal(hidden(tokens), expected)


@needs_compiler
def test_two_threads_may_share_a_model(folders):
    model = load(folders / "GQA")

    def said(start):
        kv_cache, out = make("contiguous", model.config, 96, "cpu", torch.float32), []
        for n in (9, *[1] * 20):
            kv_cache.extend(n)
            out.append(model(torch.arange(start, start + n), kv_cache))
        return torch.cat(out)

    alone = [said(start) for start in (1, 40)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(said, (1, 40)), alone))


def test_half_precision_is_attended_in_float32_where_the_processor_has_no_kernels_for_it(monkeypatch):
    q, k, v = (torch.randn(n, heads, 8) for n, heads in ((3, 4), (2, 5), (2, 5)))
    expected = attention(q, [Piece(k, v)])
    monkeypatch.setattr("seam.cpu_multiplies", lambda dtype: False)
    mask = torch.zeros(3, 5).half()
    for pieces in ([Piece(k.half(), v.half())], [Piece(k[:, :2].half(), v[:, :2].half(), mask[:, :2])]):
        whole = expected if pieces[0].mask is None else attention(q, [Piece(k[:, :2], v[:, :2])])
        torch.testing.assert_close(attention(q, pieces), whole, atol=2e-3, rtol=2e-3)


# ---- where there is no compiler


@needs_compiler
def test_it_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = native.built()
    assert file.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert native.built() == file
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@needs_compiler
def test_what_others_could_have_put_there_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.built().parent.chmod(0o777)
    with pytest.raises(PermissionError):
        native.built()


@needs_compiler
@pytest.mark.parametrize("left", [0, 100, 20_000, -1])
def test_a_library_that_is_not_whole_is_made_anew(left, tmp_path, monkeypatch):
    """As a full disk or a lost power leaves it; to load a part of one is a bus error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = native.built()
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    assert native.built() == file and len(file.read_bytes()) == len(whole)
    assert subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(file)!r}).lanes()"]).returncode == 0


@needs_compiler
def test_another_processor_has_its_own(tmp_path, monkeypatch):
    """A home may be shared by machines, one of which has not the other's instructions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, read = native.built(), native.Path.read_bytes
    less = lambda path: b"flags : fpu" if path.name == "cpuinfo" else read(path)  # noqa: E731
    monkeypatch.setattr(native.Path, "read_bytes", less)
    assert native.built() != here


def answer(model, **more):
    """4 tokens of float32, greedy, by two threads."""
    command = ("--model", model, "-p", "hi", "--temp", "0", "-n", "4", "--device", "cpu")
    process = start(*command, env=environment(OMP_NUM_THREADS="2", **more))
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 0
    return said


@pytest.fixture(scope="module")
def usual_answer(tiny_gqa):
    return answer(tiny_gqa)


@pytest.mark.parametrize("fault", ["none", "broken", "full"])
def test_without_a_compiler_the_answer_is_the_same(fault, tiny_gqa, usual_answer, tmp_path):
    """None in PATH, one that fails, and no place for what it makes."""
    cases = {
        "none": {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        "broken": {"CC": "false", "XDG_CACHE_HOME": str(tmp_path)},
        "full": {"XDG_CACHE_HOME": "/proc"},
    }
    assert answer(tiny_gqa, **cases[fault]) == usual_answer != b""


@needs_compiler
def test_weights_that_the_kernels_cannot_read_are_left_to_torch(folders, monkeypatch):
    model = load(folders / "GQA", quantize="int4")
    usual = logits(model, "contiguous")
    monkeypatch.setattr(native, "rows_in_a_block", lambda: 0)
    other = load(folders / "GQA", quantize="int4")
    assert "before" not in vars(other.layers[0]) and not native.takes(other.layers[0].mlp.down_proj)
    torch.testing.assert_close(logits(other, "contiguous"), usual, atol=0.2 * usual.abs().max().item(), rtol=0)


@needs_compiler
def test_gate_and_up_in_one_block_of_4_bits_are_left_to_torch(monkeypatch):
    made = Int4Linear(32, 192)
    assert native.halves_apart(made) == (96 % native.block() == 0)
    for name in ("block", "rows_in_a_block"):  # as with vectors of 512 bits
        monkeypatch.setattr(native, name, lambda: 64)
    assert not native.halves_apart(made) and native.halves_apart(Int4Linear(32, 256))
    model = random_model(Config(64, 64, 96, 1, 2), dtype=torch.bfloat16, quantize="int4")
    assert "before" not in vars(model.layers[0])
