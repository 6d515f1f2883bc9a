"""graph.py and the cache it needs: a step reads nothing from the host, and a host that is a step behind changes no
answer."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import CHAT, environment
from test_generate import GREEDY, PROMPT, session_over, text_of, tokens_of, user

from cache import FlashCache, make
from generate import NotFinite, Sampling, Session
from graph import Graph
from model import load

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class AheadSession(Session):
    """A session that is a step ahead of its reader, as on a GPU; its steps are computed and not replayed."""

    def __init__(self, *args):
        super().__init__(*args)
        self._graph = self._replayed

    def _replayed(self, token):
        return self.model.head(self.model(token.clamp(min=0), self.cache))


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


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_replay_is_the_step_itself(tiny, dtype):
    model = load(tiny, "cuda", dtype)
    caches = [make("contiguous", model.config, 64, "cuda", dtype) for _ in range(2)]
    graph = Graph(model, caches[0])
    for cache in caches:
        cache.extend(len(PROMPT))
        model(torch.tensor(PROMPT, device="cuda"), cache)
    token = torch.tensor([5], device="cuda")
    for _ in range(30):
        for cache in caches:
            cache.extend(1)
        rows = graph(token), model.head(model(token, caches[1]))
        torch.testing.assert_close(*rows, atol=1e-2, rtol=0)
        assert rows[0].argmax() == rows[1].argmax()
        token = rows[0].argmax(-1)


@needs_gpu
def test_a_chat_on_a_gpu_answers_as_one_that_waits_for_each_step(tiny):
    from tokenizer import Tokenizer

    model = load(tiny, "cuda", torch.float32)
    sessions = [
        Session(model, make("contiguous", model.config, 200, "cuda", torch.float32), Tokenizer.from_folder(tiny))
        for _ in range(2)
    ]
    assert isinstance(sessions[0].cache, FlashCache)
    sessions[1]._graph = None
    for prompt in (PROMPT, PROMPT[:5] + [40], [9]):
        one, other = (tokens_of(session, prompt, Sampling(temperature=0, max_tokens=60)) for session in sessions)
        assert one == other
