"""What each kind of cache does in its own way, against plain lists of tensors and the papers' own words."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_cache import CACHED, EXACT, TOKENS, logits_of, made, recomputed

from cache import make
from generate import passes
from model import Config, Rotary, load, rotate
from seam import CacheFull, Piece, _by_hand, _fold, _partial, attention

ROOT = Path(__file__).parent.parent
SHAPE = Config(
    vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
WIDE = replace(SHAPE, head_dim=32)  # so wide that the kernels for a CPU serve every kind
WHOLE = [kind for kind in CACHED if kind != "sinks"]  # those that forget nothing; sinks have their own tests
ERROR = dict.fromkeys(EXACT, 1e-5) | {"int8": 0.1, "int4": 1.5}


class Plain:
    """A cache as one would write it first: a list of keys and values for each layer, and attention in float64."""

    def __init__(self, config):
        self.config, self.held = config, [[] for _ in range(config.num_hidden_layers)]

    def attend(self, layer, q, k, v):
        held, start = self.held[layer], len(self.held[layer])
        held.extend(zip(k, v, strict=True))
        keys, values = (torch.stack(x).double().repeat_interleave(2, 1) for x in zip(*held, strict=True))
        at, slots = torch.arange(start, len(held))[:, None], torch.arange(len(held))
        hidden = (slots > at) | (slots <= at - (self.config.windows[layer] or 10**9))
        scores = torch.einsum("thd,shd->hts", q.double(), keys) / self.config.head_dim**0.5
        return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).float()

    def truncate(self, length):
        for held in self.held:
            del held[length:]


class Machine(RuleBasedStateMachine):
    """Any operations in any order: a kind of cache gives what the plain one gives."""

    kind, config = "contiguous", SHAPE

    def __init__(self):
        super().__init__()
        self.cache, self.plain = self.new(), Plain(self.config)
        self.random = torch.Generator().manual_seed(0)

    def new(self):
        return made(self.kind, self.config, 150)

    def qkv(self, n):
        return [torch.randn(n, heads, self.config.head_dim, generator=self.random) for heads in (4, 2, 2)]

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 15, 16, 17, 31, 32, 33, 64]))
    def forward(self, n):
        if self.cache.length + n > 150:
            with pytest.raises(CacheFull):
                self.cache.extend(n)
            return
        self.cache.extend(n)
        start = self.cache.length - n
        assert self.cache.positions.tolist() == list(range(start, start + n))
        for layer in range(self.config.num_hidden_layers):
            qkv = self.qkv(n)
            expected, got = self.plain.attend(layer, *qkv), self.cache.attend(layer, *qkv)
            torch.testing.assert_close(got, expected, atol=ERROR[self.kind], rtol=0)

    @precondition(lambda self: self.cache.length)
    @rule(data=st.data())
    def cut(self, data):
        wanted = data.draw(st.integers(0, self.cache.length))
        length = self.cache.reusable(wanted)
        assert length == wanted or self.kind == "window"
        self.cache.truncate(length)
        self.plain.truncate(length)

    @rule(n=st.sampled_from([1, 7, 40]))
    def break_off(self, n):
        """An interrupt between the layers of a pass."""
        held = self.cache.length
        if held + n > 150:
            return
        self.cache.extend(n)
        self.cache.attend(0, *self.qkv(n))
        held = self.cache.reusable(held)
        self.cache.truncate(held)
        self.plain.truncate(held)

    @rule()
    def keep(self):
        """What is kept is all that there is to it: another cache goes on from it."""
        counts, state = self.cache.counts(), {name: tensor.clone() for name, tensor in self.cache.state()}
        self.cache = self.new()
        self.cache.restore(counts, state.__getitem__)

    @invariant()
    def sizes(self):
        assert self.cache.length == self.cache.held == len(self.plain.held[0])
        if self.kind in EXACT and self.kind != "window":
            assert (
                self.cache.bytes_used
                == self.cache.length * self.config.num_hidden_layers * 2 * 2 * self.config.head_dim * 4
            )


@pytest.mark.parametrize("kind", WHOLE)
def test_any_operations_give_what_plain_lists_give(kind):
    class OfKind(Machine):
        pass

    OfKind.kind, OfKind.config = kind, WIDE
    OfKind.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
    OfKind.TestCase().runTest()


@pytest.mark.parametrize("kind", WHOLE)
def test_any_operations_in_a_model_of_one_layer_give_what_plain_lists_give(kind):
    class OfKind(Machine):
        pass

    OfKind.kind, OfKind.config = kind, replace(SHAPE, num_hidden_layers=1, windows=(None,), rotary=(True,))
    OfKind.TestCase.settings = settings(max_examples=6, stateful_step_count=15, deadline=None)
    OfKind.TestCase().runTest()


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("window", [1, 5, 40])
def test_any_operations_in_layers_with_a_window_give_what_plain_lists_give(kind, window, monkeypatch):
    monkeypatch.setattr("cache.WindowCache.SLACK", 9)

    class OfKind(Machine):
        pass

    OfKind.kind, OfKind.config = kind, replace(WIDE, windows=(window, None))
    OfKind.TestCase.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)
    OfKind.TestCase().runTest()


# ---- attention in pieces


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_attention_over_pieces_is_attention_over_the_whole_by_the_kernel_and_by_hand(data):
    """Also where a query sees nothing of a piece, and where scores are so large that exp alone would overflow."""
    tokens, cuts = data.draw(st.integers(1, 9)), sorted(data.draw(st.sets(st.integers(1, 39), max_size=4)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scale = data.draw(st.sampled_from([1, 200]))
    q = torch.randn(tokens, 4, 8, generator=random) * scale
    k, v = torch.randn(2, 2, 40, 8, generator=random)
    hidden = torch.rand(tokens, 40, generator=random) < data.draw(st.sampled_from([0, 0.5, 0.97]))
    hidden[:, 0] = False  # the first piece has something for every query
    mask = torch.zeros(tokens, 40).masked_fill(hidden, -torch.inf)
    ends = [0, *cuts, 40]
    pieces = [Piece(k[:, a:b], v[:, a:b], mask[:, a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    whole = attention(q, [Piece(k, v, mask)])
    error = 1e-5 if scale == 1 else 2e-4  # float32 itself rounds scores of 1,000 to 6e-5
    torch.testing.assert_close(attention(q, pieces), whole, atol=error, rtol=0)
    grouped = q.unflatten(1, (2, -1)).permute(1, 2, 0, 3)
    for piece in pieces:
        for a, b in zip(_partial(grouped, piece), _by_hand(*_fold(grouped, piece), False), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


def test_causal_attention_by_hand_is_the_kernels():
    q, k, v = torch.randn(2, 2, 7, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    piece = Piece(k, v, causal=True)
    for a, b in zip(_partial(q, piece), _by_hand(*_fold(q, piece), True), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# ---- window


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """Mistral with a window of 20 in each layer."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = tiny_folder(tmp_path_factory.mktemp("models") / "mistral")
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "vocab_size": 259, "sliding_window": 20, "initializer_range": 0.2}
    MistralForCausalLM(MistralConfig(**settings)).save_pretrained(folder)
    return load(folder, dtype=torch.float32)


@pytest.mark.parametrize("chunk", [1, 5, 20, 21, 64, 200])
def test_a_window_cache_keeps_the_window_alone_and_gives_what_a_recompute_gives(sliding, chunk, monkeypatch):
    monkeypatch.setattr("cache.WindowCache.SLACK", 8)
    cache, tokens = make("window", sliding.config, 300), TOKENS * 2
    assert cache.bytes_reserved == 28 * cache.bytes_per_token == sum(ring.nbytes for ring in cache.rings)
    torch.testing.assert_close(logits_of(sliding, cache, tokens, chunk), recomputed(sliding, tokens), atol=1e-4, rtol=0)
    assert (cache.length, cache.bytes_used) == (240, cache.bytes_reserved)


def test_a_window_cache_is_cut_back_as_far_as_it_kept_and_says_so(sliding, monkeypatch):
    monkeypatch.setattr("cache.WindowCache.SLACK", 8)
    cache, tokens = make("window", sliding.config, 300), TOKENS * 2
    logits_of(sliding, cache, tokens, 30)
    assert [cache.reusable(length) for length in (240, 239, 232, 231, 230, 20, 0)] == [240, 239, 232, 231, 0, 0, 0]
    with pytest.raises(ValueError, match="230"):
        cache.truncate(230)
    cache.truncate(231)
    other = tokens[:231] + [5, 6, 7]
    torch.testing.assert_close(logits_of(sliding, cache, other), recomputed(sliding, other), atol=1e-4, rtol=0)


# ---- sinks


class PlainSinks:
    """StreamingLLM as the paper tells it: keys are kept as they were before rotation, and turned anew at each step by
    their place among those kept."""

    def __init__(self, config):
        self.config, self.rotary, self.held = config, Rotary(config), [[] for _ in range(config.num_hidden_layers)]

    def turned(self, x, positions):
        return rotate(x, *self.rotary(torch.tensor(positions)))

    def attend(self, layer, q, k, v):
        """q and k not rotated; the tokens of a pass see each other as they stand."""
        held, start = self.held[layer], len(self.held[layer])
        held.extend(zip(k, v, strict=True))
        keys, values = (torch.stack(x) for x in zip(*held, strict=True))
        keys = self.turned(keys, list(range(len(held)))).repeat_interleave(2, 1).double()
        q = self.turned(q, list(range(start, len(held)))).double()
        scores = torch.einsum("thd,shd->hts", q, keys) / 8**0.5
        hidden = torch.arange(len(held))[None, :] > torch.arange(start, len(held))[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(2, 1).double()).float()


def test_sinks_and_the_recent_past_are_attended_at_their_places_in_the_cache():
    config = replace(SHAPE, rotary=(True, False))
    cache, plain = make("sinks", config, 60, sinks=4), PlainSinks(config)
    random, held = torch.Generator().manual_seed(0), 0
    for n in [1, 5, 3, 7, 7, 7, 7, 7, 7] + [7, 1, 1, 3] * 30:
        if held + n > 60:  # forgets an eighth of the 56 that are no sinks
            held -= 7
            for layer in plain.held:
                del layer[4:11]
        held += n
        cache.extend(n)
        assert (cache.held, cache.positions.tolist()) == (held, list(range(held - n, held)))
        for layer in range(2):
            q, k, v = (torch.randn(n, heads, 8, generator=random) for heads in (4, 2, 2))
            turned = [plain.turned(x, list(range(held - n, held))) if config.rotary[layer] else x for x in (q, k)]
            if not config.rotary[layer]:
                plain.turned, kept = lambda x, positions: x, plain.turned
            expected = plain.attend(layer, q, k, v)
            if not config.rotary[layer]:
                plain.turned = kept
            torch.testing.assert_close(cache.attend(layer, *turned, v), expected, atol=2e-5, rtol=0)
    assert cache.length == cache.held + cache.forgotten == 51 + 30 * 12


def test_a_chat_without_end_holds_its_memory_and_cuts_what_is_recent(tiny_gqa_model):
    cache, tokens = make("sinks", tiny_gqa_model.config, 64), TOKENS * 8
    logits_of(tiny_gqa_model, cache, tokens, 16)
    assert (cache.length, cache.longest) == (960, 2**31)
    assert 56 <= cache.held <= 64 and cache.forgotten == 960 - cache.held
    assert cache.bytes_used == cache.held * cache.bytes_per_token <= cache.bytes_reserved
    recent = cache.forgotten + 5
    assert [cache.reusable(n) for n in (960, recent, recent - 1, 300, 3)] == [960, recent, 4, 4, 3]
    cache.truncate(cache.reusable(300))
    assert (cache.length, cache.held, cache.forgotten) == (4, 4, 0)
    torch.testing.assert_close(
        logits_of(tiny_gqa_model, cache, TOKENS[:60]), recomputed(tiny_gqa_model, TOKENS[:60]), atol=1e-4, rtol=0
    )


def test_an_interrupt_while_the_middle_is_forgotten_leaves_the_sinks(tiny_gqa_model, monkeypatch):
    cache = make("sinks", tiny_gqa_model.config, 64)
    logits_of(tiny_gqa_model, cache, TOKENS[:64])

    def interrupted(self, x, by):
        raise KeyboardInterrupt

    monkeypatch.setattr(Config, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in passes(tiny_gqa_model, cache, TOKENS[:70], 8):
            pass
    monkeypatch.undo()
    assert (cache.length, cache.forgotten) == (4, 0)
    torch.testing.assert_close(
        logits_of(tiny_gqa_model, cache, TOKENS[:60]), recomputed(tiny_gqa_model, TOKENS[:60]), atol=1e-4, rtol=0
    )


def test_more_sinks_than_half_the_cache_are_refused():
    with pytest.raises(CacheFull, match="sinks are 33.* 64"):
        make("sinks", SHAPE, 64, sinks=33)


@pytest.fixture(scope="module")
def tiny_gqa_model(tiny_gqa):
    return load(tiny_gqa, dtype=torch.float32)


# ---- quantized


def stored(kind, k, v):
    """K and V [S, Hkv, D] as a cache gives them back, [Hkv, S, D], and how many of them are quantized."""
    config = replace(SHAPE, head_dim=k.shape[2], num_hidden_layers=1, windows=(None,), rotary=(True,))
    cache = make(kind, config, 4096)
    q = torch.randn(1, 4, k.shape[2])
    for x in (slice(0, len(k) - 1), slice(len(k) - 1, None)):
        cache.extend(len(k[x]))
        cache.attend(0, q.expand(len(k[x]), -1, -1), k[x], v[x])
    keys, values = zip(*cache._read(0, 0, cache.length), strict=True)
    return torch.cat(keys, 1), torch.cat(values, 1), cache._recent[1]


@pytest.mark.parametrize(("kind", "levels"), [("int8", 255), ("int4", 15)])
def test_a_quantized_value_is_off_by_at_most_half_a_step_and_the_newest_are_whole(kind, levels):
    k, v = torch.randn(2, 300, 2, 16)
    keys, values, quantized = stored(kind, k, v)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    assert quantized == 256  # of the 299 of the first pass, the newest 32 and a group that is not full are whole
    assert torch.equal(keys[:, 256:], k[:, 256:]) and torch.equal(values[:, 256:], v[:, 256:])
    groups = k[:, :256].unflatten(1, (-1, 32))  # a step for 32 tokens of a channel of K
    step = (groups.amax(2, True) - groups.amin(2, True)) / levels
    assert ((keys[:, :256].unflatten(1, (-1, 32)) - groups).abs() <= step / 2 + 1e-5).all()
    step = (v.amax(2, True) - v.amin(2, True)) / levels  # and for a token of V
    assert ((values - v).abs() <= step / 2 + 1e-5).all()
    assert not torch.equal(keys, k) and not torch.equal(values, v)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_channel_of_k_that_is_large_in_every_token_does_not_drown_the_others(kind):
    k, v = torch.randn(2, 300, 2, 16)
    plain = (stored(kind, k, v)[0][:, :, 1:] - k.transpose(0, 1)[:, :, 1:]).abs().max()
    k[:, :, 0] += 1000
    large = (stored(kind, k, v)[0][:, :, 1:] - k.transpose(0, 1)[:, :, 1:]).abs().max()
    assert large == plain


def test_a_channel_that_never_changes_is_exact():
    k = torch.full((300, 2, 16), 3.25)
    keys, values, _ = stored("int4", k, k)
    assert (keys == 3.25).all() and (values == 3.25).all()


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_quantized_bytes_are_those_of_the_tensors_scales_included(kind, bits):
    config = replace(SHAPE, head_dim=64)
    cache = make(kind, config, 1024, dtype=torch.float16)
    cache.extend(900)
    cache.extend(1)
    heads, settled = 2 * 2, 864  # layers times KV heads; of 900, the newest 32 and what fills no group are whole
    packed, scales = 2 * settled * 64 * bits // 8, (settled // 32 * 64 + settled) * 2 * 2
    assert cache.bytes_used == heads * (packed + scales + 2 * (901 - settled) * 64 * 2)
    assert cache.bytes_per_token == heads * (2 * 64 * bits // 8 + (64 // 32 * 2 + 1 * 2) * 2)
    whole = make("contiguous", config, 1024, dtype=torch.float16)
    assert cache.bytes_per_token / whole.bytes_per_token == {8: 0.546875, 4: 0.296875}[bits]
    kept = [*cache.packed, *cache.scales, cache._recent[0]]
    assert cache.bytes_reserved == sum(tensor.nbytes for tensor in kept)


def test_attention_makes_blocks_of_the_past_whole_and_never_all_of_it(monkeypatch):
    cache = make("int4", SHAPE, 4096)
    whole, seen = type(cache)._whole, []

    def spy(self, layer, first, last):
        seen.append(last - first)
        return whole(self, layer, first, last)

    monkeypatch.setattr(type(cache), "_whole", spy)
    for n in (4000, 1):
        cache.extend(n)
        cache.attend(0, *(torch.randn(n, heads, 8) for heads in (4, 2, 2)))
    assert sum(seen) == 3968 and max(seen) <= 1024


# ---- offloaded


def child(code):
    """Run Python in a process of its own; what it prints, as numbers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [float(word) for word in result.stdout.split()]


MEMORY = """
import torch
from pathlib import Path
from dataclasses import replace
from cache import make
from model import Config

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def reset():
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
    return memory("VmRSS")
"""
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")


@linux
def test_a_cache_in_a_file_is_eight_times_larger_than_the_memory_that_it_takes(tmp_path):
    """32 layers of 8 MiB in a file, of which two or three are in memory at a time; and the answers are right."""
    cache, grown, off = child(f"""{MEMORY}
config = Config(vocab_size=8, hidden_size=256, intermediate_size=8, num_hidden_layers=32, num_attention_heads=4)
cache = make("offload", config, 4096, folder={str(tmp_path)!r})
plain = make("contiguous", replace(config, num_hidden_layers=1, windows=(None,), rotary=(True,)), 4096)
def qkv(n, layer):
    random = torch.Generator().manual_seed(1000 * n + layer)
    return [torch.randn(n, 4, 64, generator=random) for _ in range(3)]
for n in [512] * 7 + [1] * 4:  # once, so that what torch itself needs is there
    plain.extend(n)
    last = plain.attend(0, *qkv(n, 31))
before, worst = reset(), 0
for n in [512] * 7 + [1] * 4:
    cache.extend(n)
    for layer in range(32):
        y = cache.attend(layer, *qkv(n, layer))
print(cache.keys_values.nbytes, memory("VmHWM") - before, (y - last).abs().max().item())
""")
    assert cache == 32 * 2 * 4096 * 256 * 4
    assert grown < cache / 8
    assert off == 0
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_folder_that_cannot_take_the_cache_is_refused_in_words(tmp_path):
    with pytest.raises(CacheFull, match=r"nowhere: No such file or directory; the cache takes 16,384 bytes there"):
        make("offload", SHAPE, 64, folder=tmp_path / "nowhere")


@linux
def test_a_long_prompt_takes_memory_by_its_length_and_not_by_its_square():
    """16,384 tokens through one layer; their cache is 64 MiB, and a matrix of scores would be 4 GiB."""
    needed, grown = child(f"""{MEMORY}
from generate import passes
from model import Llama, Rotary, DTYPES
config = Config(vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
model = Llama(config)
for module in model.modules():
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, torch.nn.Parameter(torch.randn(parameter.shape) * 0.05, requires_grad=False))
def prefill(n):
    cache = make("contiguous", config, n)
    for hidden in passes(model, cache, [i * i % 256 for i in range(n)], 1024):
        pass
    return cache.bytes_reserved
prefill(2048)
before = reset()
cache = prefill(16384)
print(cache + sum(p.nbytes for p in model.parameters()), memory("VmHWM") - before)
""")
    assert grown < 1.5 * needed
