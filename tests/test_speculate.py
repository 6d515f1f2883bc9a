"""speculate.py: a draft changes how many passes an answer takes, and nothing else."""

from collections import Counter

import pytest
import torch
from conftest import says, successor_folder, tiny_folder, token_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import PROMPT, session_over, text_of, tokens_of, user

from cache import KINDS, make
from generate import Drafts, Sampling, Session
from model import load
from speculate import DraftModel, Lookup

LONG = Sampling(temperature=0, max_tokens=60)


class Wrong(Drafts):
    """Never right."""

    def propose(self, tokens, most):
        return [(tokens[-1] + 1) % 259] * min(3, most)


class Oracle(Drafts):
    """Knows the answer, and goes wrong now and then."""

    def __init__(self, answer, prompt, wrong_at=()):
        self.said, self.wrong_at, self.passes = prompt + answer, wrong_at, 0

    def propose(self, tokens, most):
        self.passes += 1
        ahead = self.said[len(tokens) : len(tokens) + min(5, most)]
        return [(t + 1) % 259 if len(tokens) + i in self.wrong_at else t for i, t in enumerate(ahead)]


@pytest.fixture
def session(tiny_gqa):
    session = session_over(tiny_gqa)
    session.tokenizer.stop_ids = set()
    return session


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"int4"}))
@pytest.mark.parametrize("sampling", [LONG, Sampling(temperature=1.5, seed=7, max_tokens=60, repeat_penalty=1.2)])
def test_tokens_are_the_same_with_any_draft_and_without(kind, sampling, tiny_gqa):
    plain = session_over(tiny_gqa, kind)
    plain.tokenizer.stop_ids = set()
    prompt = PROMPT * 3
    answer = tokens_of(plain, prompt, sampling)
    draft_model = DraftModel(session_over(tiny_gqa))
    for drafts in (Lookup(), Wrong(), Oracle(answer, prompt), Oracle(answer, prompt, {40, 41, 60}), draft_model):
        session = session_over(tiny_gqa, kind)
        session.tokenizer.stop_ids, session.drafts = set(), drafts
        for _ in range(2):  # again, over what the first time has left in the cache
            assert tokens_of(session, prompt, sampling) == answer
            assert session.tokens == prompt + answer
            assert session.cache.length in (len(session.tokens) - 1, 0)


def test_a_right_draft_saves_passes_and_a_wrong_one_costs_none(session):
    answer = tokens_of(session, PROMPT, LONG)
    session.drafts = Oracle(answer, PROMPT)
    assert tokens_of(session, PROMPT, LONG) == answer
    assert session.drafts.passes == 10  # after the prompt's own, six tokens each, and the last one five
    session.drafts = Oracle(answer, PROMPT, wrong_at=range(500))
    assert tokens_of(session, PROMPT, LONG) == answer
    assert session.drafts.passes == 58  # the last token has none behind it
    assert session.last.decode_tokens == 59
    assert (session.last.accepted_tokens, session.last.drafted_tokens) == (0, 58 * 5 - 10)


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_draft_never_runs_past_the_limit_or_the_context(limit, tiny_gqa):
    plain, drafted = session_over(tiny_gqa), session_over(tiny_gqa, capacity=len(PROMPT) + limit)
    for session in (plain, drafted):
        session.tokenizer.stop_ids = set()
    answer = tokens_of(plain, PROMPT, LONG)
    drafted.drafts = Oracle(answer, PROMPT)
    assert tokens_of(drafted, PROMPT, LONG) == answer[:limit] and drafted.last.stop == "context"
    assert tokens_of(drafted, PROMPT, Sampling(temperature=0, max_tokens=limit)) == answer[:limit]
    assert drafted.last.stop == "length"


@pytest.mark.parametrize(("stop", "text"), [((), "Hélo, wrd!"), ((", w",), "Hélo"), (("rd",), "Hélo, w")])
def test_a_stop_within_a_draft_ends_the_answer_there(stop, text, tmp_path):
    plain = session_over(successor_folder(tmp_path, says("Hélo, wrd!")))
    prompt = plain.tokenizer.chat(user("hi"))
    answer = tokens_of(plain, prompt, LONG)
    session = session_over(tmp_path)
    for more in ([2, 5, 6], [token_of(33)] * 4, []):
        session.drafts = Oracle(answer + more, prompt)
        assert text_of(session, user("hi"), Sampling(temperature=0, stop=stop)) == text
        assert session.last.stop == ("stop" if stop else "eos")
        assert session.last.generated_tokens <= len(answer)


def test_sampled_tokens_follow_the_same_distribution_with_a_draft(session, monkeypatch):
    """The second token of 4,000 short answers, drafted as what is likeliest."""
    logits = torch.zeros(259).index_fill(0, torch.tensor([5, 6, 7]), 9.0)
    logits[5] += 1
    monkeypatch.setattr(session, "_logits", lambda draft: logits.expand(1 + len(draft), -1))
    session.drafts = Oracle([5] * 9, PROMPT)
    counts, total = Counter(), 1000
    for seed in range(total):
        counts.update(tokens_of(session, PROMPT, Sampling(temperature=1, seed=seed, max_tokens=4))[1:])
    p = torch.softmax(logits, -1)
    for token in (5, 6, 7):
        assert counts[token] / (3 * total) == pytest.approx(p[token].item(), abs=0.03)


@pytest.mark.parametrize("capacity", [8, 40, 64])
def test_a_full_cache_with_sinks_forgets_at_the_same_tokens_with_a_draft(capacity, tiny_gqa):
    model, tokenizer = load(tiny_gqa, dtype=torch.float32), session_over(tiny_gqa).tokenizer
    tokenizer.stop_ids = set()
    plain, drafted, looking = (Session(model, make("sinks", model.config, capacity), tokenizer) for _ in range(3))
    sampling = Sampling(temperature=0, max_tokens=200)
    answer = tokens_of(plain, PROMPT * 5, sampling)
    drafted.drafts, looking.drafts = Oracle(answer, PROMPT * 5, set(range(70, 260, 7))), Lookup()
    for session in (drafted, looking):
        assert tokens_of(session, PROMPT * 5, sampling) == answer
        assert session.cache.forgotten == plain.cache.forgotten > 100


def test_a_session_whose_draft_was_cut_by_a_stop_string_is_saved_as_it_stands(tmp_path):
    model = successor_folder(tmp_path / "model", says("Hélo, wrd!"))
    plain, session = session_over(model), session_over(model)
    prompt = plain.tokenizer.chat(user("hi"))
    session.drafts = Oracle(tokens_of(plain, prompt, LONG), prompt)
    assert text_of(session, user("hi"), Sampling(temperature=0, stop=("é",))) == "H"
    assert session.cache.length <= len(session.tokens)
    session.save(tmp_path / "chat")
    assert session_over(model).load(tmp_path / "chat") == ""


def test_pages_that_others_hold_are_no_place_for_a_draft(tiny_gqa):
    sessions = [session_over(tiny_gqa, "paged", capacity=128) for _ in range(2)]
    answers = []
    for session, drafts in zip(sessions, (Drafts(), Lookup()), strict=True):
        session.tokenizer.stop_ids, session.drafts = set(), drafts
        tokens_of(session, PROMPT * 5, Sampling(temperature=0, max_tokens=10))
        branch = session.fork()
        assert branch.drafts is drafts
        answers.append(tokens_of(branch, session.tokens, Sampling(temperature=0)))
    assert answers[0] == answers[1] and len(answers[0]) > 20


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(3, 6), min_size=4, max_size=30), min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_abandoned_drafted_answers_leave_no_trace(shared, prompts, stops):
    session, plain = shared
    for prompt, stop in zip(prompts, stops, strict=False):
        for n, _ in enumerate(session.generate(prompt, LONG)):
            assert session.tokens[: len(prompt)] == prompt
            if n == stop:
                break
    assert tokens_of(session, prompts[-1], LONG) == tokens_of(plain, prompts[-1], LONG)


def test_an_answer_that_is_left_for_another_hands_out_no_more_of_its_tokens(session):
    answer = tokens_of(session, PROMPT, LONG)
    session.drafts = Oracle(answer, PROMPT)
    old = session.generate(PROMPT, LONG)
    assert [next(old).token, next(old).token] == answer[:2]
    new = tokens_of(session, [9, 8, 7], Sampling(temperature=0, max_tokens=5))
    assert list(old) == [] and session.tokens == [9, 8, 7, *new]


@pytest.fixture(scope="module")
def shared(tiny_gqa):
    sessions = session_over(tiny_gqa), session_over(tiny_gqa)
    for each in sessions:
        each.tokenizer.stop_ids = set()
    sessions[0].drafts = Lookup()
    return sessions


# ---- lookup


def proposals(lookup, said, answer):
    """Each draft, and how much of it came true, while ``answer`` is said after ``said``; and the passes it takes."""
    lookup.begin(said)
    tokens, drafts, done = list(said), [], 0
    while done < len(answer):
        draft = lookup.propose(tokens, 15)
        accepted = sum(1 for a, b in zip(draft, answer[done:-1], strict=False) if a == b) if draft else 0
        accepted = next((i for i, (a, b) in enumerate(zip(draft, answer[done:], strict=False)) if a != b), accepted)
        if draft:
            lookup.judge(len(draft), accepted)
        drafts.append((draft, accepted))
        tokens += answer[done : done + accepted + 1]
        done += accepted + 1
    return drafts


def test_what_is_quoted_is_drafted_in_growing_parts():
    file = [(i * i * 31 + i) % 997 for i in range(400)]
    drafts = proposals(Lookup(), [1, 2, 3, *file, 4, 5], file)
    assert len(drafts) < 400 / 10
    assert max(len(draft) for draft, _ in drafts) == 15


def test_the_newest_place_counts_and_a_draft_ends_with_what_is_known():
    lookup = Lookup()
    lookup.begin([])
    assert lookup.propose([1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3], 15) == [20, 21, 1]
    assert lookup.propose([1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3], 1) == [20]
    assert lookup.propose([1, 2], 15) == []
    assert lookup.propose([1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3, 7, 8, 9], 15) == []


def test_drafts_that_miss_fall_silent_and_one_that_hits_wakes_them():
    """A text in which any three tokens come back, and something else follows each time."""
    text = [t for i in range(400) for t in (1, 2, 3, 100 + i)]
    drafts = proposals(Lookup(), [1, 2, 3, 99], text)
    missed = sum(1 for draft, accepted in drafts if draft and not accepted)
    assert missed < 0.03 * len(text)


def test_a_draft_model_that_is_the_model_itself_is_always_right(session, tiny_gqa):
    twin = session_over(tiny_gqa)
    twin.tokenizer.stop_ids = set()
    answer = tokens_of(session, PROMPT, LONG)
    session.drafts = DraftModel(twin)
    assert tokens_of(session, PROMPT, LONG) == answer
    assert session.drafts._length > 4


def test_another_model_drafts_and_the_answer_stays(session, tiny_gqa, tmp_path):
    answer = tokens_of(session, PROMPT, LONG)
    small = load(tiny_folder(tmp_path / "small", num_hidden_layers=1), dtype=torch.float32)
    session.drafts = DraftModel(Session(small, make("contiguous", small.config, 40), session.tokenizer))
    assert tokens_of(session, PROMPT, LONG) == answer
