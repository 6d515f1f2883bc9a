"""The caches: each changes nothing but the speed, and takes exactly the bytes that the arithmetic says."""

import pytest
import torch
from conftest import HEADS
from hypothesis import given, settings
from hypothesis import strategies as st

import cache as cache_module
import native
import seam
from cache import KINDS, StagedCache, make
from generate import passes
from model import Config, load
from seam import CacheFull

TOKENS = [(37 * i * i + 11 * i + 5) % 259 for i in range(120)]

# How far the logits of the tiny models, whose standard deviation is about 2, may be from a recompute.
ERROR = dict.fromkeys(("contiguous", "paged", "offload", "staged", "mapped", "window", "sinks"), 1e-4)
ERROR |= {"int8": 0.2, "int4": 4.0}
CACHED = list(ERROR)
EXACT = [kind for kind in CACHED if ERROR[kind] == 1e-4]


def made(kind, config, capacity, dtype=torch.float32, folder=None):
    """A cache of a kind; ``mapped`` is offload in a file, and ``staged`` offload as it is on a device with memory of
    its own."""
    if kind == "staged":
        return StagedCache(config, capacity, "cpu", dtype)
    if kind == "mapped":
        return make("offload", config, capacity, dtype=dtype, folder=folder or ".")
    return make(kind, config, capacity, dtype=dtype)


def logits_of(model, cache, tokens, chunk=512):
    """Logits [V] after ``tokens``; computes what the cache does not hold."""
    for hidden in passes(model, cache, tokens, chunk):
        last = hidden[-1:]
    return model.head(last)[0]


def recomputed(model, tokens):
    return logits_of(model, make("none", model.config, len(tokens)), tokens)


@pytest.fixture(scope="module")
def model(tiny):
    return load(tiny, dtype=torch.float32)


@pytest.fixture(params=CACHED)
def cache(request, model):
    return made(request.param, model.config, 128)


def same(a, b, cache=None):
    """Equal within the error of the kind, and where that is rounding, with the same likeliest token."""
    error = ERROR.get(cache.kind if cache else "contiguous")
    torch.testing.assert_close(a, b, atol=error, rtol=0)
    assert error > 1e-4 or a.argmax() == b.argmax()


# ---- right


def test_each_step_gives_the_logits_of_a_recompute(model, cache):
    for end in range(20, 110, 2):
        same(logits_of(model, cache, TOKENS[:end]), recomputed(model, TOKENS[:end]), cache)
        assert cache.length == end


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 33, 119, 120, 500])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(model, cache, chunk):
    same(logits_of(model, cache, TOKENS, chunk), recomputed(model, TOKENS), cache)


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 95, 96, 97])
def test_another_continuation_after_a_cut_is_as_if_the_first_had_never_been(model, cache, cut):
    logits_of(model, cache, TOKENS[:100], 30)
    cache.truncate(cut)
    other = TOKENS[:cut] + [200, 13, 7, 99]
    same(logits_of(model, cache, other), recomputed(model, other), cache)
    more = other + TOKENS[:18]
    same(logits_of(model, cache, more, 9), recomputed(model, more), cache)


def test_an_error_in_the_middle_of_the_cache_would_be_seen(model):
    """The tests above can fail: one wrong key in the middle moves the logits."""
    cache = make("contiguous", model.config, 128)
    logits_of(model, cache, TOKENS[:60])
    cache.keys_values[1, 0, :, 30] *= -1
    assert (logits_of(model, cache, TOKENS[:61]) - recomputed(model, TOKENS[:61])).abs().max() > 1e-3


@pytest.mark.parametrize("kind", CACHED)
def test_results_do_not_depend_on_the_capacity(model, kind):
    tight, wide = made(kind, model.config, 97), made(kind, model.config, 1000)
    chunk = tight.missing(TOKENS, 40)  # sinks take smaller parts of a smaller cache
    assert torch.equal(
        logits_of(model, tight, TOKENS[:97], len(chunk)), logits_of(model, wide, TOKENS[:97], len(chunk))
    )


def memory_of(cache):
    """All tensors in which a cache keeps K and V."""
    if cache.kind == "paged":
        return [cache.pool.keys_values]
    if cache.kind == "window":
        return cache.rings
    if cache.kind in ("int8", "int4"):
        return [*cache.packed, *cache.scales, cache._recent[0]]
    return [cache.keys_values, *getattr(cache, "_windows", [])]


@pytest.mark.parametrize("kind", CACHED)
def test_what_was_never_written_is_never_read(model, kind):
    cache = made(kind, model.config, 128)
    for tensor in memory_of(cache):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
    same(logits_of(model, cache, TOKENS, 7), recomputed(model, TOKENS), cache)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_chunks_and_cuts_gives_the_logits_of_a_recompute(tiny_gqa_model, data):
    cache = made(data.draw(st.sampled_from(CACHED)), tiny_gqa_model.config, 100)
    held = []
    for _ in range(data.draw(st.integers(1, 6))):
        held = held[: data.draw(st.integers(0, len(held)))]
        cache.truncate(len(held))
        held = held + data.draw(st.lists(st.integers(0, 258), min_size=1, max_size=101 - len(held)))
        if len(held) > 100 and cache.kind != "sinks":
            with pytest.raises(CacheFull):
                cache.extend(len(held) - cache.length)
        held = held[:100]
        chunk = data.draw(st.integers(1, 40))
        if cache.length == len(held):
            cache.truncate(len(held) - 1)
        same(logits_of(tiny_gqa_model, cache, held, chunk), recomputed(tiny_gqa_model, held), cache)


@pytest.fixture(scope="module")
def tiny_gqa_model(tiny_gqa):
    return load(tiny_gqa, dtype=torch.float32)


def test_a_cache_that_keeps_nothing_holds_nothing(model):
    cache = make("none", model.config, 128)
    logits_of(model, cache, TOKENS)
    assert (cache.length, cache.held, cache.bytes_used, cache.bytes_reserved, cache.bytes_per_token) == (0,) * 5


@pytest.mark.parametrize("kind", EXACT)
def test_a_cache_may_keep_another_dtype_than_the_model_has(model, kind):
    cache = made(kind, model.config, 128, torch.bfloat16)
    difference = logits_of(model, cache, TOKENS, 50) - recomputed(model, TOKENS)
    assert 1e-4 < difference.abs().max() < 0.5


# ---- lengths


def test_tokens_that_do_not_fit_are_refused_and_nothing_changes(model, cache):
    before = logits_of(model, cache, TOKENS)
    with pytest.raises(CacheFull, match=r"(129|249) tokens .* 128"):
        cache.extend(9 if cache.kind != "sinks" else 129)
    assert cache.length == 120
    cache.truncate(119)
    same(logits_of(model, cache, TOKENS), before, cache)


def test_a_cut_is_by_length_and_refuses_what_is_not_there(model):
    for kind in CACHED:
        cache = made(kind, model.config, 400)
        cache.extend(300)
        for wrong in (-1, 301):
            with pytest.raises(ValueError, match=str(wrong)):
                cache.truncate(wrong)
            assert cache.length == 300
        for length in (299, 257, 256, 255, 1, 0):
            cache.truncate(length)
            assert cache.length == cache.held == length
            if kind in EXACT:
                assert cache.bytes_used == length * cache.bytes_per_token


def test_kernels_for_a_cpu_do_not_read_what_is_attended_on_a_device(model):
    """Its memory is the host's, and q, k and v are not."""
    assert StagedCache(model.config, 64, "cpu", model.dtype)._kernels is None


def test_a_device_that_triton_cannot_serve_is_left_to_torch():
    assert not seam.triton_serves(torch.device("cpu"))
    assert seam.triton_serves(torch.device("cuda")) <= torch.cuda.is_available()


def test_a_pass_that_fails_leaves_the_cache_as_it_was(model, cache, monkeypatch):
    logits_of(model, cache, TOKENS[:50])
    attend = type(cache).attend

    def broken(self, layer, *qkv):
        if layer == 2:
            raise KeyboardInterrupt
        return attend(self, layer, *qkv)

    monkeypatch.setattr(type(cache), "attend", broken)
    monkeypatch.setattr(type(cache), "for_kernels", lambda self, tokens: None)  # else nothing comes in between
    with pytest.raises(KeyboardInterrupt):
        logits_of(model, cache, TOKENS[:60])
    assert cache.length == 50
    monkeypatch.undo()
    same(logits_of(model, cache, TOKENS[:60]), recomputed(model, TOKENS[:60]), cache)


# ---- bytes


def config(layers, hidden, heads, kv_heads, head_dim=0):
    return Config(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=1,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )


@pytest.mark.parametrize(
    ("shape", "tokens", "bytes_"),
    [
        (config(32, 4096, 32, 32), 4096, 2_147_483_648),  # LLaMA-7B
        (config(80, 8192, 64, 64), 4096, 10_737_418_240),
        (config(80, 8192, 64, 8), 4096, 10_737_418_240 // 8),
        (config(16, 2048, 32, 8), 1, 32_768),  # Llama-3.2-1B
        (config(32, 4096, 32, 8), 1, 131_072),  # Llama-3.1-8B
        (config(32, 4096, 32, 32), 1, 524_288),  # Llama-2-7B
    ],
)
def test_bytes_are_those_of_the_published_arithmetic_in_16_bits(shape, tokens, bytes_):
    assert KINDS["contiguous"].bytes_for(shape, tokens, torch.float16) == bytes_
    assert KINDS["contiguous"].bytes_for(shape, tokens, torch.bfloat16) == bytes_


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reserved_bytes_are_those_of_the_memory_and_used_ones_grow_by_token(heads, dtype):
    shape = config(3, 64, *HEADS[heads])
    cache = make("contiguous", shape, 100, dtype=dtype)
    assert cache.bytes_reserved == cache.keys_values.nbytes == 3 * 2 * HEADS[heads][1] * 16 * dtype.itemsize * 100
    cache.extend(7)
    assert cache.bytes_used == cache.keys_values[:, :, :, :7].nbytes == 7 * cache.bytes_per_token


def test_keys_and_values_are_never_repeated_for_the_heads_of_a_group(monkeypatch):
    """Attention gets views of the cache's own memory, one for each KV head."""
    seen = []
    attention = seam.attention

    def spy(q, pieces):
        pieces = list(pieces)
        seen.extend(pieces)
        return attention(q, pieces)

    monkeypatch.setattr(seam, "attention", spy)
    monkeypatch.setattr(native, "library", lambda: None)  # whose kernel reads that memory by its address
    cache = make("contiguous", config(1, 64, 4, 2), 32)
    own = []
    for n in (5, 1, 3):
        cache.extend(n)
        q, k, v = torch.randn(n, 4, 16), torch.randn(n, 2, 16), torch.randn(n, 2, 16)
        own += [k, v]
        cache.attend(0, q, k, v)
    memory = {tensor.untyped_storage().data_ptr() for tensor in (cache.keys_values, *own)}
    assert len(seen) == 4  # the first pass, the step, and the third pass with what was held before it
    for piece in seen:
        assert piece.k.shape[0] == piece.v.shape[0] == 2
        assert {piece.k.untyped_storage().data_ptr(), piece.v.untyped_storage().data_ptr()} <= memory


def test_a_cache_that_the_device_has_no_room_for_is_refused_with_a_size_that_fits(monkeypatch):
    monkeypatch.setattr(cache_module, "free_memory", lambda device: 1_000_000)
    shape = config(32, 4096, 32, 8)
    with pytest.raises(CacheFull, match=r"131072 tokens needs 17,179,869,184 bytes.*--ctx-size 7 would fit"):
        make("contiguous", shape, 131_072, dtype=torch.bfloat16)
