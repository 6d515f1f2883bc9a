"""flash.py: what it computes is plain attention over the gathered pages, and nothing else is read or matters.

Without a GPU the kernels run in Triton's interpreter, which cannot multiply bfloat16, and whether they compile for a
GPU is tested all the same.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # conftest.py
triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

import flash  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
NAN = float("nan")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU")
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_gpu)]
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
HEADS = {"MHA": (2, 2), "GQA": (9, 3), "GQA of 4": (8, 2), "MQA": (5, 1)}
PAGE = 16


class Batch:
    """Sequences in a paged cache of two layers, their pages in random order; all that none of them holds, and all that
    lies before ``window``, is NaN. ``shared`` pages at the start are the same ones for all."""

    def __init__(self, lengths, heads=(4, 2), dim=16, dtype=torch.float32, page=PAGE, window=None, shared=0, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.page, self.window, width = page, window, max(1, *(-(-length // page) for length in lengths)) + 1
        pages = torch.randperm(len(lengths) * width + 1, generator=random).int()
        tables = pages[1:].view(len(lengths), width)
        tables[:, :shared] = tables[0, :shared]
        keys_values = torch.full((2, 2, heads[1], len(pages) * page, dim), NAN)
        for table, length in zip(tables, lengths, strict=True):
            slots = self.slots(table, length)
            keys_values[1][:, :, slots] = torch.randn((2, heads[1], len(slots), dim), generator=random)
        q = torch.randn((len(lengths), heads[0], dim), generator=random)
        self.q, self.keys_values = q.to(DEVICE, dtype), keys_values.to(DEVICE, dtype)
        self.tables, self.lengths = tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def slots(self, table, length):
        """The slots that a query of a sequence sees, oldest first."""
        slots = (table[:, None].long() * self.page + torch.arange(self.page, device=table.device)).flatten()[:length]
        return slots if self.window is None else slots[-self.window :]

    def attend(self, splits=None, rows=slice(None), new=None):
        keys, values = self.keys_values[1]
        q, tables, lengths = self.q[rows], self.tables[rows], self.lengths[rows]
        return flash.paged_attention(q, keys, values, tables, lengths, self.page, splits, self.window, new)

    def take_newest(self):
        """K and V [B, Hkv, D] float32 of the newest tokens, which the cache then does not hold."""
        slots = [
            self.slots(table, length)[-1] for table, length in zip(self.tables, self.lengths.tolist(), strict=True)
        ]
        new = self.keys_values[1][:, :, slots].transpose(1, 2).float()
        self.keys_values[1][:, :, slots] = NAN
        return tuple(new)

    def reference(self):
        """[B, Hq, D] float64, from copies of the pages."""
        results = []
        for q, table, length in zip(self.q, self.tables, self.lengths.tolist(), strict=True):
            k, v = self.keys_values[1][:, :, self.slots(table, length)].double()
            q = q.double().unflatten(0, (len(k), -1))
            results.append((torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v).flatten(0, 1))
        return torch.stack(results)

    def check(self, splits=None):
        result = self.attend(splits)
        assert result.dtype is self.q.dtype
        tolerance = max(torch.finfo(self.keys_values.dtype).eps, 1e-5)
        torch.testing.assert_close(result.double(), self.reference(), atol=tolerance, rtol=tolerance)


# ---- right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_attention_is_that_over_the_gathered_pages(heads, dim, dtype):
    Batch([70, 33], heads, dim, dtype).check()


@pytest.mark.parametrize("splits", [1, 3, 9])
@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 63, 64, 65, 128, 129, 200])
def test_any_length_in_any_number_of_splits(length, splits):
    Batch([length]).check(splits)


@pytest.mark.parametrize("splits", [1, 5])
def test_lengths_may_be_mixed_and_pages_shared(splits):
    Batch([200, 1, 64, 33], (9, 3)).check(splits)
    Batch([70, 50, 65], (9, 3), shared=3).check(splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 2, PAGE, 64, 65, 100, 1000])
def test_a_window_shows_only_the_newest_tokens(window, splits):
    Batch([150, 64, 1], window=window).check(splits)


def test_the_cache_may_keep_another_dtype_than_the_query():
    batch = Batch([70], dtype=torch.float16)
    batch.q = batch.q.float()
    batch.check()


def test_large_scores_do_not_overflow():
    batch = Batch([150])
    batch.q *= 1000
    batch.check(splits=2)


def test_a_sequence_of_no_tokens_gives_zeros():
    for splits in (1, 3):
        assert Batch([0, 20]).attend(splits)[0].eq(0).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 24, 80]),
    page=st.sampled_from([1, 3, 16, 32, 256]),
    splits=st.integers(1, 6) | st.none(),
    window=st.integers(1, 160) | st.none(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_attention_is_right_whatever_the_shapes(lengths, group, kv_heads, dim, page, splits, window, dtype):
    Batch(lengths, (group * kv_heads, kv_heads), dim, dtype, page, window).check(splits)


# ---- the newest token, stored on the way


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 150), st.sampled_from([1, 16, 17, 64, 65])), min_size=1, max_size=3),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 24, 80]),
    page=st.sampled_from([1, 3, 16, 256]),
    splits=st.integers(1, 6) | st.none(),
    window=st.integers(1, 160) | st.none(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_a_new_token_is_stored_and_seen(lengths, group, kv_heads, dim, page, splits, window, dtype):
    """As if it had been stored before; all else in the cache is untouched."""
    batch = Batch(lengths, (group * kv_heads, kv_heads), dim, dtype, page, window)
    whole, expected = batch.keys_values.clone(), batch.reference()
    result = batch.attend(splits, new=batch.take_newest())
    torch.testing.assert_close(batch.keys_values, whole, atol=0, rtol=0, equal_nan=True)
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_new_token_is_rounded_as_the_cache_keeps_it():
    """Also for its own score; k and v may be views."""
    batch = Batch([70, 33], dtype=torch.float16)
    k, v = (x + 1e-4 * torch.randn_like(x) for x in batch.take_newest())
    before = batch.attend(splits=3, new=(k.half(), v.half()))
    wide = torch.cat((k, v * NAN, v), 1)
    assert torch.equal(batch.attend(3, new=(wide[:, :2], wide[:, 4:])), before)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_sequence_of_no_tokens_stores_nothing(splits):
    batch = Batch([0, 20])
    before, new = batch.keys_values.clone(), torch.randn(2, 2, 2, 16, device=DEVICE)
    new[:, 1] = batch.keys_values[1][:, :, batch.slots(batch.tables[1], 20)[-1]]
    assert batch.attend(splits, new=tuple(new))[0].eq(0).all()
    torch.testing.assert_close(batch.keys_values, before, atol=0, rtol=0, equal_nan=True)


# ---- what must not matter, to the bit


def test_neighbours_do_not_matter():
    batch = Batch([150, 1, 64, 33], (9, 3))
    together = batch.attend(splits=3)
    for i in range(4):
        assert torch.equal(batch.attend(3, slice(i, i + 1))[0], together[i])


def test_where_the_pages_lie_does_not_matter():
    """The same tokens in one piece, which is how a contiguous cache is read."""
    batch = Batch([150])
    keys, values = batch.keys_values[1][:, :, batch.slots(batch.tables[0], 150)]
    table = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    one_piece = flash.paged_attention(batch.q, keys, values, table, batch.lengths, page_size=150, splits=2)
    assert torch.equal(one_piece, batch.attend(splits=2))


def test_the_rest_of_a_table_does_not_matter():
    """Entries that no token needs may be anything: these would lead out of the memory."""
    batch = Batch([64, 33])
    before = batch.attend(splits=2)
    batch.tables[0, 4:], batch.tables[1, 3:] = 2**31 - 1, -(2**31)
    assert torch.equal(batch.attend(splits=2), before)


def test_a_query_may_be_a_view():
    batch = Batch([70, 33])
    before = batch.attend()
    batch.q = torch.cat([batch.q, batch.q * NAN], 1)[:, : batch.q.shape[1]]
    assert torch.equal(batch.attend(), before)


def test_keys_that_lie_otherwise_are_refused():
    keys = torch.zeros(2, 8, 16).mT.contiguous().mT
    with pytest.raises(ValueError, match="laid out alike"):
        flash.paged_attention(torch.zeros(1, 2, 16), keys, keys, *torch.ones(2, 1, 1, dtype=torch.int32), 8)


# ---- on a GPU


@needs_gpu
def test_a_captured_launch_follows_lengths_and_tables():
    batch, other = Batch([200, 1]), Batch([64, 129], seed=1)
    batch.attend(splits=4)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = batch.attend(splits=4)
    batch.tables[:, : other.tables.shape[1]] = other.tables
    batch.lengths.copy_(other.lengths)
    batch.q.copy_(other.q)
    batch.keys_values[:, :, :, : other.keys_values.shape[3]] = other.keys_values
    graph.replay()
    assert torch.equal(result, other.attend(splits=4))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float16, 80), (torch.float32, 128)])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(dtype, dim, monkeypatch, tmp_path):
    """With the settings that they are launched with, for an H100 or H200: in its memory, and loading ahead."""
    if INTERPRETED:
        pytest.skip("done by a Triton that compiles, in another process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = recorded(monkeypatch, flash, "_attend_split", "_merge")
    batch = Batch([70], (4, 2), dim, dtype)
    batch.attend(splits=88)
    batch.attend(splits=88, new=batch.take_newest())
    split, merge, storing, _ = (compiled(*launch) for launch in launches)
    for kernel in (split, storing):
        assert kernel.metadata.shared <= 227 * 1024 // 2, "two programs should fit one processor"
        assert "cp.async" in kernel.asm["ptx"]
        assert ("mma.sync" in kernel.asm["ptx"]) == (dtype is not torch.float32)
    assert merge.asm["cubin"]


@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles in this process")
def test_the_kernels_compile():
    command = [sys.executable, "-m", "pytest", __file__, "-k", "compile_for"]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def recorded(monkeypatch, module, *names):
    """The launches, which are not made, of a module's kernels from now on: kernel, arguments and settings."""
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = triton.JITFunction(kernel.fn)

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append((self.kernel, args, kwargs))

    for name in names:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
    return launches


def compiled(kernel, args, kwargs):
    from triton.backends.compiler import GPUTarget

    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    args = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constant = {param.name: args[param.name] for param in kernel.params if param.is_constexpr}
    constant |= {name: None for name, value in args.items() if value is None}
    types = {name: triton.runtime.jit.mangle_type(value) for name, value in args.items()}
    aligned = [name for name, value in args.items() if isinstance(value, torch.Tensor) or name.endswith("stride")]
    source = triton.compiler.ASTSource(
        kernel,
        types | dict.fromkeys(constant, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constant.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, GPUTarget("cuda", 90, 32), options)
