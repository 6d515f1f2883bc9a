"""generate.py: what is reused, how tokens are drawn, where answers end, and nothing lost when something breaks."""

import math

import pytest
import torch
from conftest import says, successor_folder, token_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KINDS, make
from generate import NotFinite, Sampling, Session, Speech, VerifyingSession, chunk_size, penalize, probabilities
from model import load
from seam import CacheFull
from tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 200, 33, 5, 90, 121, 8, 64, 250, 31]


def session_over(folder, kind="contiguous", capacity=256, cls=Session):
    model = load(folder, dtype=torch.float32)
    return cls(model, make(kind, model.config, capacity), Tokenizer.from_folder(folder))


def tokens_of(session, prompt, sampling):
    return [step.token for step in session.generate(prompt, sampling)]


def text_of(session, messages, sampling=GREEDY):
    return "".join(step.text for step in session.generate(session.tokenizer.chat(messages), sampling))


def user(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def session(tiny_gqa):
    return session_over(tiny_gqa)


# ---- the cache changes nothing


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"int4"}))
def test_every_kind_of_cache_gives_the_same_greedy_tokens_over_several_turns(kind, tiny):
    told, plain = session_over(tiny, kind), session_over(tiny, "none")
    prompt = list(PROMPT)
    for turn in range(3):
        answer = tokens_of(told, prompt, Sampling(temperature=0, max_tokens=20))
        assert answer == tokens_of(plain, prompt, Sampling(temperature=0, max_tokens=20))
        prompt += answer + [40 + turn, 7]


def test_the_session_always_knows_what_the_cache_holds(session):
    for prompt in (PROMPT, PROMPT[:4] + [77, 78], [9], PROMPT * 3):
        for _ in session.generate(prompt, Sampling(temperature=0, max_tokens=9)):
            assert session.cache.length == len(session.tokens) - 1
        assert session.tokens[: len(prompt)] == prompt


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(3, 12), min_size=1, max_size=30), min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
def test_abandoned_answers_and_changed_prompts_leave_no_trace(shared_session, fresh_model, prompts, stops):
    """After any history, an answer is what a new session would say."""
    for prompt, stop in zip(prompts, stops, strict=False):
        for n, _ in enumerate(shared_session.generate(prompt, Sampling(temperature=0, max_tokens=8))):
            if n == stop:
                break
    new = Session(fresh_model, make("contiguous", fresh_model.config, 256), shared_session.tokenizer)
    sampling = Sampling(temperature=0, max_tokens=6)
    assert tokens_of(shared_session, prompts[-1], sampling) == tokens_of(new, prompts[-1], sampling)


@pytest.fixture(scope="module")
def shared_session(tiny_gqa):
    return session_over(tiny_gqa)


@pytest.fixture(scope="module")
def fresh_model(shared_session):
    return shared_session.model


def test_only_what_is_new_is_computed_and_at_least_one_token(session):
    first = tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=4))
    assert (session.last.prompt_tokens, session.last.reused_tokens) == (11, 0)
    follow_up = PROMPT + first + [99, 98]
    tokens_of(session, follow_up, Sampling(temperature=0, max_tokens=1))
    # The last token of the first answer was drawn and never fed to the model.
    assert (session.last.prompt_tokens, session.last.reused_tokens) == (17, 11 + 3)
    again = tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=4))
    assert (session.last.reused_tokens, again) == (10, first)


def test_a_verifying_session_reports_the_distance_to_a_recompute(tiny):
    session = session_over(tiny, cls=VerifyingSession)
    steps = list(session.generate(PROMPT, Sampling(temperature=0, max_tokens=12)))
    assert all(step.max_abs_diff < 1e-4 and step.argmax_equal for step in steps)
    session.cache.keys_values[:, 1, :, 3] += 1  # spoil the value of one token
    steps = list(session.generate(session.tokens + [50], Sampling(temperature=0, max_tokens=2)))
    assert all(step.max_abs_diff > 1e-2 for step in steps)


def test_a_verifying_session_goes_on_when_the_middle_is_forgotten(tiny_gqa):
    session = session_over(tiny_gqa, "sinks", capacity=40, cls=VerifyingSession)
    session.tokenizer.stop_ids = set()
    steps = list(session.generate(PROMPT, Sampling(temperature=0, max_tokens=60)))
    assert len(steps) == 60
    assert max(step.max_abs_diff for step in steps[:25]) < 1e-4 < steps[-1].max_abs_diff


# ---- drawing


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0])


def kept(**options):
    return probabilities(LOGITS, Sampling(temperature=1, **options)).nonzero().flatten().tolist()


def test_probabilities_are_the_softmax_of_the_logits():
    expected = torch.tensor([0.6095, 0.2242, 0.1360, 0.0303])
    torch.testing.assert_close(probabilities(LOGITS, Sampling(temperature=1)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_p": 0.6}, [0]),
        ({"top_p": 0.61}, [0, 1]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 5_000_000}, [0, 1, 2, 3]),
        ({"top_k": 3, "min_p": 0.3}, [0, 1]),
    ],
)
def test_filters_keep_what_they_promise(options, tokens):
    assert kept(**options) == tokens
    assert probabilities(LOGITS, Sampling(temperature=1, **options)).sum().item() == pytest.approx(1)


def test_the_penalty_lowers_negative_logits_too_and_counts_a_token_once():
    seen = torch.tensor([True, True, False])
    lowered = penalize(torch.tensor([2.0, -2.0, 1.0]), seen, 1.3)
    torch.testing.assert_close(lowered, torch.tensor([1.53846, -2.6, 1.0]), atol=1e-5, rtol=0)


def test_the_penalty_moves_an_answer_away_from_what_was_said(session):
    plain = tokens_of(session, [7, 7, 7, 7], Sampling(temperature=0, max_tokens=30))
    penalized = tokens_of(session, [7, 7, 7, 7], Sampling(temperature=0, max_tokens=30, repeat_penalty=20))
    assert len(set(penalized)) > len(set(plain))


def test_draws_follow_the_probabilities(session, monkeypatch):
    """4,000 draws from p = .6095 .2242 .1360 .0303: each count within 5 standard deviations."""
    monkeypatch.setattr(Session, "_logits", lambda self, draft: LOGITS[None])
    object.__setattr__(session.model.config, "vocab_size", 259)
    session.tokenizer.stop_ids = set()
    session.cache.capacity = 5000
    drawn = tokens_of(session, [0], Sampling(temperature=1, seed=1, max_tokens=4000))
    for token, p in enumerate([0.6095, 0.2242, 0.1360, 0.0303]):
        assert abs(drawn.count(token) - 4000 * p) < 5 * math.sqrt(4000 * p * (1 - p))


def test_the_same_seed_gives_the_same_tokens_and_no_seed_a_new_one_each_time(session):
    sampling = Sampling(temperature=1.5, max_tokens=20)
    first, seed = tokens_of(session, PROMPT, sampling), session.last.seed
    second = tokens_of(session, PROMPT, sampling)
    assert session.last.seed != seed
    assert second != first
    assert tokens_of(session, PROMPT, Sampling(temperature=1.5, max_tokens=20, seed=seed)) == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 2},
        {"repeat_penalty": 0},
        {"seed": -1},
        {"max_tokens": -1},
        {"stop": ("",)},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


# ---- ending


def test_a_stop_token_ends_the_answer_and_has_no_step(successor):
    session = session_over(successor)
    steps = list(session.generate(session.tokenizer.chat(user("hi")), GREEDY))
    assert (session.last.stop, session.last.text) == ("eos", "Hélo, wrd!")
    assert session.last.generated_tokens == len(steps) == len("Hélo, wrd!".encode())
    assert 2 not in [step.token for step in steps]


def test_each_stop_token_ends_the_answer(successor):
    session = session_over(successor)
    session.tokenizer.stop_ids |= {token_of(ord("w"))}
    assert text_of(session, user("hi")) == "Hélo, "
    assert session.last.stop == "eos"


@pytest.mark.parametrize("limit", [0, 1, 5, 10])
def test_max_tokens_ends_the_answer_exactly(successor, limit):
    session = session_over(successor)
    steps = list(session.generate(session.tokenizer.chat(user("hi")), Sampling(temperature=0, max_tokens=limit)))
    assert (len(steps), session.last.stop) == (limit, "length")


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"sinks"}))
@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_prompt_and_answer_never_exceed_the_context(tiny_gqa, kind, room):
    session = session_over(tiny_gqa, kind, capacity=len(PROMPT) + room)
    session.tokenizer.stop_ids = set()
    assert len(tokens_of(session, PROMPT, GREEDY)) == room
    assert session.last.stop == "context"
    with pytest.raises(CacheFull, match=rf"{12 + room} tokens .* {11 + room}"):
        session.generate([*PROMPT, *range(room), 5])
    assert session.last.prompt_tokens == len(PROMPT)  # nothing changed


def test_a_chat_with_sinks_has_no_end(tiny_gqa):
    session = session_over(tiny_gqa, "sinks", capacity=40)
    session.tokenizer.stop_ids = set()
    tokens = tokens_of(session, PROMPT * 10, Sampling(temperature=0, max_tokens=50))
    assert (len(tokens), session.last.stop, session.last.prompt_tokens) == (50, "length", 110)
    assert session.tokens[: session.cache.length] == (PROMPT * 10 + tokens)[:-1]
    assert session.cache.held <= 40 and session.cache.forgotten == 159 - session.cache.held


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ((", w",), "Hélo"),
        (("Hé",), ""),
        (("!",), "Hélo, wrd"),
        (("é",), "H"),
        (("rd?", "d!"), "Hélo, wr"),
        (("lo, x", "wrd", "o, wr"), "Hél"),
        (("wrd!?",), "Hélo, wrd!"),
        (("zzz",), "Hélo, wrd!"),
    ],
)
def test_a_stop_string_ends_the_answer_and_no_part_of_it_leaks(successor, stop, text):
    session = session_over(successor)
    assert text_of(session, user("hi"), Sampling(temperature=0, stop=stop)) == text == session.last.text
    assert session.last.stop == ("eos" if text.endswith("!") else "stop")


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab€ ", max_size=30), stop=st.lists(st.text("ab€ ", min_size=1, max_size=4), max_size=3))
def test_text_in_pieces_is_the_text_up_to_the_first_stop_string(byte_tokenizer, text, stop):
    speech, pieces = Speech(byte_tokenizer, tuple(stop)), []
    for byte in text.encode():
        pieces.append(speech.add(token_of(byte)))
        if speech.ended:
            break
    pieces.append(speech.finish())
    # The first to be complete ends the answer; of several complete at once, the one that begins first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    first = min((end for end, _ in ends), default=None)
    expected = text if first is None else text[: min(start for end, start in ends if end == first)]
    assert "".join(pieces) == expected


@pytest.fixture(scope="module")
def byte_tokenizer(successor):
    return Tokenizer.from_folder(successor)


def test_text_waits_only_for_what_may_become_a_stop_string(byte_tokenizer):
    speech = Speech(byte_tokenizer, ("END",))
    shown = [speech.add(token_of(byte)) for byte in b"an E END"]
    assert shown == ["a", "n", " ", "", "E ", "", "", ""]


def test_an_incomplete_character_at_the_end_is_shown_as_decode_shows_it(tmp_path):
    chain = says("aé")
    del chain[token_of("é".encode()[0])]  # stop in the middle of the character
    session = session_over(successor_folder(tmp_path / "model", chain))
    steps = list(session.generate(session.tokenizer.chat(user("hi")), GREEDY))
    assert "".join(step.text for step in steps) == "a�" == session.tokenizer.decode(step.token for step in steps)


def test_an_interrupt_ends_the_answer_and_keeps_what_the_cache_holds(session):
    session.tokenizer.stop_ids = set()
    steps = []
    for step in session.generate(PROMPT, GREEDY):
        steps.append(step.token)
        if len(steps) == 5:
            session.interrupt()
    assert (session.last.stop, len(steps)) == ("interrupt", 5)
    tokens_of(session, PROMPT + steps + [9], Sampling(temperature=0, max_tokens=1))
    assert session.last.reused_tokens == len(PROMPT) + len(steps)


def test_an_interrupt_in_a_prefill_ends_it_with_the_chunk_under_way(session):
    session._chunk = 4
    forward = session.model.forward

    def interrupted(tokens, cache):
        session.interrupt()
        return forward(tokens, cache)

    session.model.forward = interrupted
    assert tokens_of(session, PROMPT, GREEDY) == []
    assert (session.last.stop, session.cache.length) == ("interrupt", 4)


def test_overflow_is_one_clear_error_and_the_chat_lives(tiny_gqa):
    session = session_over(tiny_gqa)
    session.tokenizer.stop_ids = set()
    first = tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=5))
    embedding = session.model.embed_tokens.weight
    saved = embedding[100].clone()
    embedding[100] = torch.inf
    for temperature in (0, 1):
        with pytest.raises(NotFinite, match="--dtype"):
            tokens_of(session, PROMPT + [100, 4], Sampling(temperature=temperature))
    embedding[100] = saved
    assert tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=5)) == first


def test_prompts_that_cannot_be_are_refused(session):
    with pytest.raises(ValueError, match="empty"):
        session.generate([])
    for ids in ([259], [-1], [5, 10**6]):
        with pytest.raises(ValueError, match="vocabulary of 259"):
            session.generate(ids)


# ---- figures


def test_prefill_and_decode_are_timed_apart_and_add_up(session):
    session.tokenizer.stop_ids = set()
    steps = list(session.generate(PROMPT, Sampling(temperature=0, max_tokens=10)))
    turn = session.last
    assert turn.decode_s == pytest.approx(sum(step.seconds for step in steps))
    assert turn.decode_tok_s == pytest.approx(9 / turn.decode_s)  # the first token is the prompt's own
    assert turn.prefill_tok_s == pytest.approx(len(PROMPT) / turn.prefill_s)
    read = sum(session.model.bytes_per_step + n * session.cache.bytes_per_token for n in range(12, 21))
    assert turn.decode_bytes_s == pytest.approx(read / turn.decode_s)


def test_steps_report_the_cache_with_their_own_token(session):
    for n, step in enumerate(session.generate(PROMPT, Sampling(temperature=0, max_tokens=5)), 1):
        assert step.cache_tokens == len(PROMPT) + n
        assert step.cache_bytes == step.cache_tokens * session.cache.bytes_per_token


def test_prefill_chunks_shrink_as_models_grow(session):
    """135 million parameters at about 0.3 TFLOP/s: 256 tokens, 0.25 s; never below 16 tokens."""
    sizes = []
    for parameters in (10**6, 135 * 10**6, 10**9, 8 * 10**9, 10**12):
        session.model.__class__ = type("Sized", (type(session.model),), {"products_per_token": parameters})
        sizes.append(chunk_size(session.model))
    assert sizes == [2048, 256, 64, 16, 16]


@pytest.mark.parametrize("temperature", [1e-40, 1e-37, 1e-3, 1000])
def test_extreme_temperatures_draw_from_what_they_mean(temperature):
    p = probabilities(LOGITS, Sampling(temperature=temperature))
    assert p.isfinite().all()
    assert p[0] == 1 if temperature < 1 else p[0] == pytest.approx(0.25, abs=0.01)


def test_an_abandoned_answer_does_not_go_on_into_the_next(session):
    session.tokenizer.stop_ids = set()
    sampling = Sampling(temperature=0, max_tokens=6)
    expected = tokens_of(session, [40, 41, 42], sampling)
    old = session.generate(PROMPT, sampling)
    next(old)
    new = session.generate([40, 41, 42], sampling)
    first = next(new).token
    assert list(old) == []
    assert [first, *(step.token for step in new)] == expected


def test_an_interrupted_prefill_reports_what_it_computed(session):
    session._chunk = 4
    forward = session.model.forward
    session.model.forward = lambda tokens, cache: (session.interrupt(), forward(tokens, cache))[1]
    assert tokens_of(session, PROMPT, GREEDY) == []
    assert session.last.computed_tokens == 4
    assert session.last.prefill_tok_s == pytest.approx(4 / session.last.prefill_s)
