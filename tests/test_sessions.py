"""Sessions on disk, and branches: what comes back is what was kept, or it is refused by name."""

import json
import os
import stat

import pytest
import torch
from conftest import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from test_generate import PROMPT, session_over, tokens_of

from cache import KINDS, make
from generate import Sampling, Session, SessionError, SessionMismatch
from model import load
from seam import CacheFull

TEN = Sampling(temperature=0, max_tokens=10)
SAVED = sorted(KINDS.keys() - {"none"})


@pytest.mark.parametrize("kind", SAVED)
def test_a_restored_session_goes_on_as_the_kept_one_and_computes_nothing_again(kind, tiny, tmp_path):
    kept = session_over(tiny, kind)
    kept.tokenizer.stop_ids = set()
    tokens_of(kept, PROMPT * 8, TEN)
    kept.save(tmp_path / "chat", "what was said")
    restored = session_over(tiny, kind)
    restored.tokenizer.stop_ids = set()
    assert restored.load(tmp_path / "chat") == "what was said"
    assert (restored.tokens, restored.cache.length) == (kept.tokens, kept.cache.length)
    assert restored.cache.bytes_used == kept.cache.bytes_used
    follow_up = [*kept.tokens, 44, 45]
    for session in (kept, restored):
        session.answer = tokens_of(session, follow_up, TEN)
        assert session.last.reused_tokens == 8 * 11 + 9
    assert kept.answer == restored.answer
    for a, b in zip(kept.cache.state(), restored.cache.state(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])


@pytest.mark.parametrize("kind", SAVED)
def test_the_file_holds_the_used_part_alone_and_is_private(kind, tiny_gqa, tmp_path):
    session = session_over(tiny_gqa, kind, capacity=20000)
    tokens_of(session, PROMPT * 8, TEN)
    session.save(tmp_path / "chat")
    size = (tmp_path / "chat").stat().st_size
    session.cache.extend(1)  # so that quantized kinds have settled
    assert size < session.cache.bytes_used + 2**17 < 20000 * session.cache.bytes_per_token
    assert stat.S_IMODE((tmp_path / "chat").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["chat"]
    with safe_open(tmp_path / "chat", framework="pt") as file:  # any tool reads it
        assert file.get_tensor("tokens").tolist() == session.tokens


def test_a_restored_session_may_have_another_capacity_if_it_fits(tiny_gqa, tmp_path):
    session = session_over(tiny_gqa)
    tokens_of(session, PROMPT, TEN)
    session.save(tmp_path / "chat")
    small, large = session_over(tiny_gqa, capacity=15), session_over(tiny_gqa, capacity=500)
    large.load(tmp_path / "chat")
    assert tokens_of(large, session.tokens + [7], TEN) == tokens_of(session, session.tokens + [7], TEN)
    with pytest.raises(CacheFull, match=r"20 tokens .* 15"):
        small.load(tmp_path / "chat")
    assert (small.tokens, small.cache.length) == ([], 0)


def other_weights(folder, tiny_gqa):
    session = session_over(tiny_gqa)
    with torch.no_grad():
        session.model.layers[1].self_attn.qkv_proj.weight.mul_(1.01)
    return session


def other_config(folder, tiny_gqa):
    return session_over(tiny_folder(folder, rope_theta=20000.0))


def other_dtype(folder, tiny_gqa):
    session = session_over(tiny_gqa)
    return Session(
        session.model, make("contiguous", session.model.config, 256, dtype=torch.bfloat16), session.tokenizer
    )


def other_kind(folder, tiny_gqa):
    return session_over(tiny_gqa, "int8")


def other_tokenizer(folder, tiny_gqa):
    session = session_over(tiny_gqa)
    return Session(session.model, session.cache, Other(session.tokenizer))


class Other:
    """A tokenizer with two pieces exchanged."""

    def __init__(self, tokenizer):
        self.stop_ids, self.strips_first_space = set(), False
        self.piece = lambda token: tokenizer.piece({50: 51, 51: 50}.get(token, token))


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("weights", other_weights),
        ("config", other_config),
        ("dtype", other_dtype),
        ("cache kind", other_kind),
        ("tokenizer", other_tokenizer),
    ],
)
def test_a_session_of_another_model_or_cache_is_refused_by_the_part_that_differs(part, other, tiny_gqa, tmp_path):
    session = session_over(tiny_gqa)
    tokens_of(session, PROMPT, TEN)
    session.save(tmp_path / "chat", "its text")
    stranger = other(tmp_path / "other", tiny_gqa)
    before = tokens_of(stranger, [9, 8, 7], TEN)
    with pytest.raises(SessionMismatch, match=part) as caught:
        stranger.load(tmp_path / "chat")
    assert (caught.value.part, caught.value.about) == (part, "its text")
    assert stranger.cache.length == 12 and stranger.tokens == [9, 8, 7, *before]


def test_a_session_of_other_sinks_is_refused(tiny_gqa, tmp_path):
    model = load(tiny_gqa)
    four, five = (make("sinks", model.config, 64, sinks=n) for n in (4, 5))
    tokenizer = session_over(tiny_gqa).tokenizer
    Session(model, four, tokenizer).save(tmp_path / "chat")
    with pytest.raises(SessionMismatch, match="cache kind"):
        Session(model, five, tokenizer).load(tmp_path / "chat")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_and_the_session_goes_on(saved, data):
    session, path, whole = saved
    at = data.draw(st.integers(0, len(whole) - 1))
    bytes_ = data.draw(st.sampled_from([whole[:at], whole[:at] + b"\xff" + whole[at + 1 :], whole[at:]]))
    path.write_bytes(bytes_)
    before = list(session.tokens)
    try:
        session.load(path)
    except SessionError as error:
        assert "\n" not in str(error) and str(path) in str(error)
    assert len(session.tokens) >= len(before) and session.cache.length <= len(session.tokens)
    tokens_of(session, PROMPT, TEN)


@pytest.fixture(scope="module")
def saved(tiny_gqa, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "chat"
    session = session_over(tiny_gqa)
    tokens_of(session, PROMPT, TEN)
    session.save(path)
    return session, path, path.read_bytes()


@pytest.mark.parametrize(
    "wrong", [{"format": "other"}, {}, {"counts": '{"length": 99}'}, {"counts": '{"length": -1}'}, {"counts": "[]"}]
)
def test_a_file_whose_numbers_cannot_be_is_refused(wrong, saved, tmp_path):
    session, _, whole = saved
    (tmp_path / "whole").write_bytes(whole)
    with safe_open(tmp_path / "whole", framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "wrong", {**metadata, **wrong} if wrong else {})
    with pytest.raises(SessionError, match="not a saved session"):
        session.load(tmp_path / "wrong")


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("wrong", ["missing", "shape", "counts"])
def test_a_load_that_fails_leaves_the_session_and_its_cache_as_they_were(kind, wrong, tiny_gqa, tmp_path):
    session, other = session_over(tiny_gqa, kind), session_over(tiny_gqa, kind)
    tokens_of(other, PROMPT * 8, TEN)
    other.save(tmp_path / "whole")
    with safe_open(tmp_path / "whole", framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if wrong == "missing":
        del tensors["cache.layers.2" if "cache.layers.2" in tensors else "cache.values"]
    elif wrong == "shape":
        tensors["cache.layers.2" if "cache.layers.2" in tensors else "cache.values"] = torch.zeros(2, 2, 1, 8)
    else:
        counts = json.loads(metadata["counts"])
        metadata["counts"] = json.dumps({**counts, "length": counts["length"] + 1})
    save_file(tensors, tmp_path / "wrong", metadata)
    answer = tokens_of(session, PROMPT, TEN)
    with pytest.raises(SessionError, match="not a saved session"):
        session.load(tmp_path / "wrong")
    assert (session.tokens, session.cache.length) == (PROMPT + answer, 20)
    assert tokens_of(session, PROMPT, TEN) == answer and session.last.reused_tokens == 10


def test_a_load_that_finds_no_pages_leaves_the_session_as_it_was(tiny_gqa, tmp_path):
    trunk = session_over(tiny_gqa, "paged", capacity=96)
    tokens_of(trunk, PROMPT * 7, TEN)
    trunk.save(tmp_path / "long")
    tokens_of(trunk, PROMPT * 2, TEN)
    branch = trunk.fork()
    held, tokens = trunk.cache.length, list(trunk.tokens)
    with pytest.raises(CacheFull, match="pages that are free"):
        branch.load(tmp_path / "long")
    assert (branch.cache.length, branch.tokens) == (held, tokens)
    trunk.cache.truncate(0)
    branch.load(tmp_path / "long")
    assert branch.cache.length == 7 * 11 + 9


def test_what_cannot_be_written_or_found_is_said_and_the_old_file_stays(saved, tmp_path, monkeypatch):
    session, _, _ = saved
    with pytest.raises(SessionError, match="No such file or directory"):
        session.load(tmp_path / "nowhere")
    with pytest.raises(SessionError, match="nothing was saved"):
        session.save(tmp_path / "no" / "folder")
    session.save(tmp_path / "chat", "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SessionError, match="No space left on device"):
        session.save(tmp_path / "chat", "new")
    monkeypatch.undo()
    assert (session.load(tmp_path / "chat"), os.listdir(tmp_path)) == ("old", ["chat"])


def test_what_killed_processes_left_is_removed_in_time(saved, tmp_path):
    session, _, _ = saved
    for name, age in ((".chat.old", 7200), (".chat.new", 10), (".other.old", 7200)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (os.stat(tmp_path / name).st_mtime - age,) * 2)
    session.save(tmp_path / "chat")
    assert sorted(os.listdir(tmp_path)) == [".chat.new", ".other.old", "chat"]


# ---- branches


def test_branches_share_their_past_and_go_their_own_ways(tiny):
    trunk, alone = session_over(tiny, "paged"), session_over(tiny, "contiguous")
    for session in (trunk, alone):
        session.tokenizer.stop_ids = set()
    tokens_of(trunk, PROMPT * 5, TEN)
    pool, used = trunk.cache.pool, len(trunk.cache.block_table)
    branch = trunk.fork()
    assert len(pool.references) - pool.free == used  # nothing was copied
    past = list(trunk.tokens)
    for session, more in ((branch, [5, 6, 7]), (trunk, [8, 9]), (branch, [5, 6, 7, 1]), (trunk, [8, 9, 2])):
        assert tokens_of(session, past + more, TEN) == tokens_of(alone, past + more, TEN)
        assert session.last.reused_tokens >= len(past) - 1
    assert sum(count == 2 for count in pool.references) == (len(past) - 1) // 16
    branch.cache.truncate(0)
    assert len(pool.references) - pool.free == len(trunk.cache.block_table)
    assert tokens_of(trunk, past + [8], TEN) == tokens_of(alone, past + [8], TEN)


def test_branches_need_pages(tiny_gqa):
    with pytest.raises(SessionError, match="--cache contiguous has none"):
        session_over(tiny_gqa).fork()


def test_a_full_pool_ends_the_answer_and_nothing_is_lost(tiny_gqa):
    trunk = session_over(tiny_gqa, "paged", capacity=64)
    trunk.tokenizer.stop_ids = set()
    tokens_of(trunk, PROMPT * 2, TEN)
    branch = trunk.fork()
    tokens_of(branch, branch.tokens, Sampling(temperature=0))
    assert branch.last.stop == "context" and len(branch.tokens) == branch.cache.longest == 48
    with pytest.raises(CacheFull, match=r"52 tokens and the context holds 32"):
        tokens_of(trunk, trunk.tokens + [3] * 20, TEN)
    with pytest.raises(CacheFull, match=r"tokens more need 2 pages of 16 tokens, and 1 of 4 pages are free"):
        trunk.cache.truncate(16)
        trunk.cache.extend(32)
    branch.cache.truncate(0)
    assert len(tokens_of(trunk, trunk.tokens[:22] + [3] * 20, TEN)) == 10
