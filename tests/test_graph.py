"""graph.py and the cache it needs: a step reads nothing from the host, and a host that is a step behind changes no
answer."""

import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import CHAT, environment
from test_generate import GREEDY, PROMPT, session_over, text_of, tokens_of, user
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import native
from cache import FlashCache, make
from generate import Drafts, NotFinite, Sampler, Sampling, Session, VerifyingSession
from graph import Graph, Reading
from model import load
from speculate import Lookup
from tokenizer import Tokenizer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Computed(Graph):
    """The step itself, and no replay of it."""

    def __call__(self):
        return self._step()


class AheadSession(Session):
    """A session that is a step ahead of its reader, as on a GPU; its steps are computed and not replayed."""

    def __init__(self, *args):
        super().__init__(*args)
        self._graphs = Computed


@pytest.fixture
def session(tiny_gqa):
    return session_over(tiny_gqa, cls=AheadSession)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3, temperature=2, repeat_penalty=1.3, top_k=40)])
@pytest.mark.parametrize("limit", [1, 2, 30, None])
def test_a_step_ahead_is_the_same_answer(tiny, sampling, limit):
    sampling = Sampling(**{**vars(sampling), "max_tokens": limit})
    plain, ahead = session_over(tiny, capacity=60), session_over(tiny, capacity=60, cls=AheadSession)
    prompt = list(PROMPT)
    for turn in range(2):
        answer = tokens_of(plain, prompt, sampling)
        assert tokens_of(ahead, prompt, sampling) == answer
        assert (ahead.last.stop, ahead.tokens) == (plain.last.stop, plain.tokens)
        assert len(ahead.tokens) - 1 <= ahead.cache.length <= len(ahead.tokens)
        prompt += answer[:3] + [40 + turn]


def test_the_step_after_the_last_is_taken_back(successor):
    session = session_over(successor, cls=AheadSession)
    assert text_of(session, user("hi")) == "Hélo, wrd!"
    assert session.last.stop == "eos"
    assert session.cache.length == len(session.tokens)
    assert text_of(session, user("hi"), Sampling(temperature=0, stop=("lo",))) == "Hé"
    assert session.cache.length <= len(session.tokens)


def test_no_step_begins_that_nobody_wants(session, monkeypatch):
    passes, forward = [], session.model.forward
    monkeypatch.setattr(session.model, "forward", lambda *args: (passes.append(len(args[0])), forward(*args))[1])
    tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=5))
    assert passes == [len(PROMPT), 1, 1, 1, 1]


ENDS = st.tuples(st.sampled_from(["close", "interrupt", "fail"]), st.integers(0, 6))


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(3, 12), min_size=1, max_size=30), min_size=1, max_size=4),
    ends=st.lists(
        st.tuples(st.sampled_from(["close", "interrupt", "fail"]), st.integers(0, 6)), min_size=4, max_size=4
    ),
)
def test_an_answer_that_ends_early_leaves_no_trace(both, prompts, ends):
    ahead, plain = both
    forward = ahead.model.forward
    for prompt, (how, after) in zip(prompts, ends, strict=False):
        try:
            for n, _ in enumerate(ahead.generate(prompt, Sampling(temperature=0, max_tokens=8))):
                if n == after and how == "close":
                    break
                if n == after and how == "interrupt":
                    ahead.interrupt()
                if n == after and how == "fail":
                    ahead.model.forward = fail
        except KeyboardInterrupt:
            pass
        ahead.model.forward = forward
        assert ahead.cache.length <= len(ahead.tokens)
    sampling = Sampling(temperature=0, max_tokens=6)
    plain.cache.truncate(0)
    assert tokens_of(ahead, prompts[-1], sampling) == tokens_of(plain, prompts[-1], sampling)


def fail(*_):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def both(tiny_gqa):
    return session_over(tiny_gqa, cls=AheadSession), session_over(tiny_gqa)


def test_numbers_that_overflow_while_a_step_is_ahead_are_one_clear_error(session):
    head, calls = session.model.head, []
    session.model.head = lambda hidden: (calls.append(1), head(hidden) * (torch.nan if len(calls) > 3 else 1))[1]
    with pytest.raises(NotFinite):
        tokens_of(session, PROMPT, GREEDY)
    session.model.head = head
    assert session.cache.length <= len(PROMPT)
    assert tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=3))


@pytest.mark.parametrize("drafts", [Drafts, Lookup])
def test_an_answer_that_never_began_leaves_the_next_one_alone(drafts, session):
    session.drafts = drafts()
    sampling = Sampling(temperature=2, seed=5, max_tokens=8)
    alone = tokens_of(session, PROMPT, sampling)
    never = session.generate([9], Sampling(temperature=2, seed=6, max_tokens=8))
    answer = session.generate(PROMPT, sampling)
    tokens = [next(answer).token]
    assert list(never) == []
    assert tokens + [step.token for step in answer] == alone


# ---- captured, and replayed by a stand-in for CUDA


class Recording(TorchDispatchMode):
    """What torch does while this is on, to be done again on the same memory.

    Raises AssertionError for what a device would have to be waited for: its numbers, those that go to it, sizes that
    depend on them; and for random numbers that no graph keeps count of.
    """

    WAITS = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique")

    def __init__(self, generators):
        super().__init__()
        self.generators, self.done = generators, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, kwargs = operation._schema.name.partition("::")[2], kwargs or {}
        assert not name.startswith(self.WAITS), f"{name} in a step"
        if generator := kwargs.get("generator"):  # another object for the same one
            known = [each._cdata for each in self.generators]
            assert generator._cdata in known, f"{name} with a generator that no graph knows"
        result = operation(*args, **kwargs)
        held = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        fresh = [x.untyped_storage().data_ptr() not in held for x in tensors(result)]
        self.done.append((operation, args, kwargs, result, fresh))
        return result

    @torch.inference_mode()
    def replay(self):
        for operation, args, kwargs, result, fresh in self.done:
            for old, new, is_fresh in zip(tensors(result), tensors(operation(*args, **kwargs)), fresh, strict=True):
                if is_fresh:  # else it is memory of something that was written to already
                    old.copy_(new)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class OneStream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


class RecordedGraph:
    """torch.cuda.CUDAGraph, as far as graph.py knows it."""

    captured = 0

    def __init__(self):
        self.generators, self.recording = [], None

    def register_generator_state(self, generator):
        assert self.recording is None, "too late"
        self.generators.append(generator)

    def replay(self):
        self.recording.replay()


@contextmanager
def recorded(graph, stream):
    RecordedGraph.captured += 1
    with Recording(graph.generators) as recording:
        yield
    graph.recording = recording


def attention_by_lengths(q, keys, values, tables, lengths, page_size, window, new):
    """flash.paged_attention over the one page of a FlashCache, by torch, which Recording sees."""
    for held, its in zip((keys, values), new, strict=True):
        held.index_copy_(1, lengths.long() - 1, its.transpose(0, 1))
    slots = torch.arange(page_size)
    unseen = (slots >= lengths) | (slots < lengths - (page_size if window is None else window))
    scores = q.view(len(keys), -1, q.shape[-1]) @ keys.mT / q.shape[-1] ** 0.5
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).view(q.shape)


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for CUDA's graphs, on the CPU; counts them."""
    monkeypatch.setattr(native, "library", lambda: None)  # its kernels are no operations of torch
    monkeypatch.setitem(sys.modules, "flash", SimpleNamespace(paged_attention=attention_by_lengths))
    monkeypatch.setattr(RecordedGraph, "captured", 0)
    known = {"CUDAGraph": RecordedGraph, "graph": recorded, "Stream": OneStream, "current_stream": OneStream}
    for name, value in {**known, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return RecordedGraph


def pair_over(folder, cls=Session):
    """Two sessions that differ in nothing but that the first one's steps are replayed."""
    model = load(folder, dtype=torch.float32)
    replayed, plain = (
        cls(model, FlashCache(model.config, 200, "cpu", torch.float32), Tokenizer.from_folder(folder)) for _ in range(2)
    )
    for session in (replayed, plain):
        session.cache.keys_values.zero_()
        session.tokenizer.stop_ids = set()
    plain._graphs = None
    return replayed, plain


HOT = Sampling(temperature=1.5, seed=3, max_tokens=12)
WAYS = [
    Sampling(temperature=0, max_tokens=12),
    Sampling(temperature=0, repeat_penalty=5, max_tokens=12),
    HOT,
    replace(HOT, top_k=20),
    replace(HOT, top_p=0.8),
    replace(HOT, top_p=0.0),
    replace(HOT, min_p=0.05),
    replace(HOT, top_k=50, top_p=0.95, min_p=0.01, repeat_penalty=1.3),
]


@pytest.mark.parametrize("sampling", WAYS)
def test_replays_draw_what_steps_draw_one_by_one(sampling, cuda, tiny_gqa):
    """To the token, so that the runs that a capture needs have drawn nothing and marked nothing."""
    replayed, plain = pair_over(tiny_gqa)
    prompt = list(PROMPT)
    for turn in range(3):
        answer = tokens_of(plain, prompt, sampling)
        assert tokens_of(replayed, prompt, sampling) == answer
        assert len(answer) == 12
        prompt += [*answer[:5], 40 + turn]
    assert cuda.captured == 1


def test_a_graph_is_captured_anew_where_tokens_are_drawn_in_another_way(cuda, tiny_gqa):
    replayed, plain = pair_over(tiny_gqa)
    known = 0
    for n, sampling in enumerate(WAYS):
        for same in (sampling, replace(sampling, seed=8, max_tokens=7, stop=("zz",)), sampling):
            assert tokens_of(replayed, PROMPT, same) == tokens_of(plain, PROMPT, same)
            assert cuda.captured == known + 1
        known = n + 1


def test_one_token_needs_no_graph(cuda, tiny_gqa):
    replayed, _ = pair_over(tiny_gqa)
    assert len(tokens_of(replayed, PROMPT, replace(HOT, max_tokens=1))) == 1
    assert cuda.captured == 0


def test_the_same_seed_gives_the_same_replays(cuda, tiny_gqa):
    replayed, _ = pair_over(tiny_gqa)
    first, other = (tokens_of(replayed, PROMPT, replace(HOT, seed=seed)) for seed in (3, 4))
    assert tokens_of(replayed, PROMPT, HOT) == first != other


def test_drafts_may_come_and_go(cuda, tiny_gqa):
    replayed, plain = pair_over(tiny_gqa)
    prompt = PROMPT * 3
    for drafts in (Drafts(), Lookup(), Drafts(), Lookup(), Drafts()):
        replayed.drafts = drafts
        answer = tokens_of(plain, prompt, HOT)
        assert tokens_of(replayed, prompt, HOT) == answer
        prompt += answer[:9]
    assert cuda.captured == 1


def test_two_conversations_over_one_model_may_take_turns(cuda, tiny_gqa):
    replayed, plain = pair_over(tiny_gqa)
    other = Session(replayed.model, FlashCache(replayed.model.config, 90, "cpu", torch.float32), replayed.tokenizer)
    other.cache.keys_values.zero_()
    samplings = HOT, replace(HOT, seed=9, repeat_penalty=2)
    answers = [session.generate(PROMPT, way) for session, way in zip((replayed, other), samplings, strict=True)]
    pairs = [[step.token for step in steps] for steps in zip(*answers, strict=True)]
    assert [list(tokens) for tokens in zip(*pairs, strict=True)] == [tokens_of(plain, PROMPT, way) for way in samplings]


def test_each_replay_gives_the_logits_that_drew_its_token(cuda, tiny_gqa):
    replayed, _ = pair_over(tiny_gqa, VerifyingSession)
    steps = list(replayed.generate(PROMPT, HOT))
    assert all(step.max_abs_diff < 1e-4 and step.argmax_equal for step in steps)


def test_an_answer_that_overflows_or_breaks_off_leaves_the_graph_right(cuda, tiny_gqa):
    replayed, plain = pair_over(tiny_gqa)
    for n, _ in enumerate(replayed.generate(PROMPT, HOT)):
        if n == 4:
            replayed.interrupt()
    replayed.cache.keys_values[0, 1, :, 3] = torch.nan
    with pytest.raises(NotFinite):
        tokens_of(replayed, [*replayed.tokens, 50], HOT)
    replayed.cache.truncate(0)
    replayed.cache.keys_values.zero_()
    assert tokens_of(replayed, PROMPT, HOT) == tokens_of(plain, PROMPT, HOT)
    replayed._graph.token.fill_(-1)
    replayed.cache.extend(1)
    assert replayed._graph().isfinite().all()
    assert cuda.captured == 1


def test_a_step_that_needs_the_host_cannot_be_captured(cuda, tiny_gqa, monkeypatch):
    """By the stand-in as little as by CUDA."""

    def reads(self, logits):
        return torch.tensor(int(logits.argmax()))

    def writes(self, logits):
        logits = logits.clone()
        logits[0] = -1
        return logits.argmax()

    def draws(self, logits):
        return logits.clone().exponential_(generator=torch.Generator()).argmax()

    for draw, why in ((reads, "_local_scalar_dense"), (writes, "lift_fresh"), (draws, "no graph knows")):
        replayed, _ = pair_over(tiny_gqa)
        monkeypatch.setattr(Sampler, "draw", draw)
        with pytest.raises(AssertionError, match=why):
            tokens_of(replayed, PROMPT, HOT)


# ---- compiled


COMPILED = """
import sys, torch
from cache import make
from model import load

torch.manual_seed(0)
model = load(sys.argv[1], dtype=torch.float32)

def logits():
    kv_cache = make("contiguous", model.config, 64)
    kv_cache.extend(9)
    model(torch.arange(40, 49), kv_cache)
    for token in range(5):
        kv_cache.extend(1)
        yield model.head(model(torch.tensor([token]), kv_cache))

usual = torch.cat(list(logits()))
model.compile_steps()
torch.testing.assert_close(torch.cat(list(logits())), usual, atol=1e-5, rtol=1e-5)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_compiled_steps_are_the_steps(tiny_gqa):
    """In a process of its own: the compiler brings setuptools, which refuses to follow Python's own distutils."""
    known = {**environment(), "PYTHONPATH": str(Path(CHAT).parent)}
    subprocess.run([sys.executable, "-c", COMPILED, tiny_gqa], env=known, check=True, timeout=200)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_what_compiling_gains_is_told_and_a_loss_is_not_kept(tiny_gqa):
    known = ["--model", tiny_gqa, "-p", "hi", "--temp", "0", "-n", "20", "--device", "cpu", "--dtype", "float32"]
    runs = [
        subprocess.run([sys.executable, CHAT, *known, *more], env=environment(), capture_output=True, timeout=200)
        for more in ([], ["--compile"])
    ]
    assert runs[0].stdout and runs[0].stdout == runs[1].stdout
    form = r"chat: compiled in [\d.]+ s: ([\d.]+) tok/s before, ([\d.]+) after(, and so not kept)?\n"
    before, after, lost = re.match(form, runs[1].stderr.decode()).groups()
    assert float(before) == float(after) or (float(after) < float(before)) == bool(lost)


# ---- the cache


@pytest.mark.parametrize("window", [None, 7])
def test_the_cache_of_a_graph_attends_as_the_plain_one(tmp_path, window):
    pytest.importorskip("test_flash")  # which sets Triton's interpreter up
    model = load(tiny_folder(tmp_path, model_type="mistral", sliding_window=window), dtype=torch.float32)
    plain, static = make("contiguous", model.config, 40), FlashCache(model.config, 40, "cpu", torch.float32)
    static.keys_values.fill_(torch.nan)
    addresses = None
    for n in (9, 1, 1, 5, 1, -4, 1, 1, 1, 16, 1):
        if n < 0:
            plain.truncate(plain.length + n)
            static.truncate(static.length + n)
            continue
        tokens, hidden = torch.arange(n) * 7 + plain.length, []
        for cache in (plain, static):
            cache.extend(n)
            hidden.append(model.head(model(tokens, cache)))
        torch.testing.assert_close(*hidden, atol=2e-3, rtol=0)
        if n == 1:
            assert static.positions.tolist() == [static.length - 1]
            assert addresses in (None, static.positions.data_ptr())
            addresses = static.positions.data_ptr()
    for (name, one), (same, other) in zip(plain.state(), static.state(), strict=True):
        assert name == same
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


# ---- on a GPU


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_replay_is_the_step_itself(tiny, dtype):
    model = load(tiny, "cuda", dtype)
    caches = [make("contiguous", model.config, 64, "cuda", dtype) for _ in range(2)]
    graph = Graph(model, caches[0], Sampler(GREEDY, model.config.vocab_size, model.device))
    for cache in caches:
        cache.extend(len(PROMPT))
        model(torch.tensor(PROMPT, device="cuda"), cache)
    graph.token.fill_(5)
    for _ in range(30):
        token = graph.token.clone()
        for cache in caches:
            cache.extend(1)
        rows = graph(), model.head(model(token, caches[1]))
        torch.testing.assert_close(*rows, atol=1e-2, rtol=0)
        assert graph.token == rows[0].argmax() == rows[1].argmax()


@pytest.fixture
def on_gpu(tiny_gqa):
    """Two sessions that differ in nothing but that the first one's steps are replayed."""
    model, tokenizer = load(tiny_gqa, "cuda", torch.float32), Tokenizer.from_folder(tiny_gqa)
    tokenizer.stop_ids = set()
    sessions = [Session(model, make("contiguous", model.config, 200, "cuda", torch.float32), tokenizer) for _ in "ab"]
    assert isinstance(sessions[0].cache, FlashCache)
    sessions[1]._graphs = None
    return sessions


@needs_gpu
@pytest.mark.parametrize("sampling", WAYS)
def test_a_chat_on_a_gpu_answers_as_one_that_waits_for_each_step(on_gpu, sampling):
    """The sampled tokens too: torch promises that a replay draws what the operations one by one would."""
    for prompt in (PROMPT, PROMPT[:5] + [40], [9]):
        one, other = (tokens_of(session, prompt, replace(sampling, max_tokens=60)) for session in on_gpu)
        assert one == other


@needs_gpu
def test_on_a_gpu_settings_may_change_from_turn_to_turn_and_the_same_seed_is_the_same_answer(on_gpu):
    replayed, plain = on_gpu
    first = [tokens_of(replayed, PROMPT, sampling) for sampling in WAYS]
    for answer, sampling in zip(first, WAYS, strict=True):
        for session in (replayed, replayed, plain):
            assert tokens_of(session, PROMPT, sampling) == answer
    replayed.drafts = Lookup()
    assert tokens_of(replayed, PROMPT, WAYS[-1]) == first[-1]
    replayed.drafts = Drafts()
    assert tokens_of(replayed, PROMPT, WAYS[-1]) == first[-1]


@needs_gpu
def test_on_a_gpu_each_replay_gives_the_logits_that_drew_its_token(on_gpu):
    session = on_gpu[0]
    verifying = VerifyingSession(session.model, session.cache, session.tokenizer)
    assert all(step.max_abs_diff < 1e-2 for step in verifying.generate(PROMPT, HOT))


@needs_gpu
def test_on_a_gpu_a_replay_waits_for_nothing(on_gpu):
    session = on_gpu[0]
    tokens_of(session, PROMPT, replace(HOT, top_k=9, top_p=0.9))
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = Reading(session._graph.token)
        session.cache.extend(1)
        session._graph()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.value() == session.tokens[-1]  # as it was before the replay
