"""batch.py and lines.py: an answer among many is the one that it would be alone, pages are held once and never lost,
and a file of prompts is answered line by line whatever happens."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pexpect
import pytest
import torch
from conftest import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import CHAT, environment

import chat
import lines
import native
from batch import Batch, Sequence
from cache import CacheFull, make
from generate import Sampler, Sampling, Session
from model import Layer, load
from paged import FlashBatch, NativeBatch, PagedBatch, PagedCache, Pool
from tokenizer import Tokenizer

CONTEXT = 96
GREEDY = Sampling(temperature=0)


class Engine:
    """A tiny model whose attention matters, and what it says to a prompt alone."""

    def __init__(self, folder):
        self.folder = folder
        self.model, self.tokenizer = load(folder, dtype=torch.float32), Tokenizer.from_folder(folder)
        self.known = {}

    def batch(self, pages, context=CONTEXT):
        return Batch(self.model, self.tokenizer, Pool(self.model.config, pages, "cpu", torch.float32), context)

    def alone(self, prompt, sampling, context=CONTEXT):
        key = tuple(prompt), sampling, context
        if key not in self.known:
            session = Session(self.model, make("contiguous", self.model.config, context), self.tokenizer)
            for _ in session.generate(prompt, sampling):
                pass
            turn = session.last
            self.known[key] = session.tokens[len(prompt) :], turn.text, turn.stop, turn.generated_tokens
        return self.known[key]

    def cache(self, pool, capacity=10_000):
        return PagedCache(self.model.config, capacity, "cpu", torch.float32, pool)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(tiny_folder(tmp_path_factory.mktemp("models") / "sharp", initializer_range=0.5))


def check_pool(batch):
    """Every page is referenced by exactly those that hold it."""
    held = [page for sequence in batch.running for page in sequence.cache.block_table]
    assert batch.pool.references == [held.count(page) for page in range(len(batch.pool.references))]
    assert batch.pool.free == batch.pool.references.count(0)
    assert all(not sequence.cache.block_table for sequence in batch.waiting)


def finish(batch):
    """Run to the end; the sequences by index."""
    ended = {}
    while batch.busy:
        for sequence in batch.step():
            assert sequence.index not in ended
            ended[sequence.index] = sequence
        check_pool(batch)
    assert batch.pool.free == len(batch.pool.references)
    return ended


def told(sequence):
    turn = sequence.turn
    return sequence.tokens[turn.prompt_tokens :], turn.text, turn.stop, turn.generated_tokens


def prompt_of(length, seed=0):
    draw = random.Random(length * 1000 + seed)
    return [draw.randrange(3, 259) for _ in range(length)]


# ---- each answer is the one it would be alone


@pytest.mark.parametrize("pages", [6, 9, 200])
def test_answers_of_mixed_lengths_are_those_of_single_runs(engine, pages):
    batch = engine.batch(pages)
    wanted = {}
    for i, length in enumerate((1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 80, 95, 96, 2)):
        sampling = Sampling(temperature=0, max_tokens=(None, 1, 16, 17, 30)[i % 5])
        batch.add(i, prompt_of(length), sampling)
        wanted[i] = engine.alone(prompt_of(length), sampling)
    assert {i: told(sequence) for i, sequence in finish(batch).items()} == wanted


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_prompts_in_any_order_over_any_pool_are_answered_as_alone(engine, data):
    pages = data.draw(st.integers(6, 24))
    batch, wanted, ended = engine.batch(pages), {}, {}
    lengths = st.integers(1, CONTEXT)
    for i in range(data.draw(st.integers(1, 8))):
        # Prompts of one beginning, so that pages are shared, given up and found again.
        prompt = prompt_of(96)[: data.draw(lengths)] + data.draw(st.lists(st.integers(3, 258), max_size=3))
        prompt = prompt[:CONTEXT]
        heat = data.draw(st.sampled_from([0.0, 0.8]))
        sampling = Sampling(temperature=heat, seed=i, max_tokens=data.draw(st.none() | st.integers(0, 40)))
        batch.add(i, prompt, sampling)
        wanted[i] = engine.alone(prompt, sampling)
        for _ in range(data.draw(st.integers(0, 5))):
            ended |= {sequence.index: sequence for sequence in batch.step()}
            check_pool(batch)
    ended |= finish(batch)
    assert {i: told(sequence) for i, sequence in ended.items()} == wanted


def test_layers_that_see_a_window_see_it_in_a_batch_too(engine):
    model = load(engine.folder, dtype=torch.float32)
    model.config = replace(model.config, windows=(7, None, 20))
    batch = Batch(model, engine.tokenizer, Pool(model.config, 20, "cpu", torch.float32), CONTEXT)
    sampling, lengths = Sampling(temperature=0, max_tokens=30), (3, 16, 40)
    for i, length in enumerate(lengths):
        batch.add(i, prompt_of(length), sampling)
    ended = finish(batch)
    for i, length in enumerate(lengths):
        session = Session(model, make("none", model.config, CONTEXT), engine.tokenizer)
        list(session.generate(prompt_of(length), sampling))
        assert ended[i].tokens == session.tokens


def test_a_full_pool_makes_the_youngest_wait_and_changes_no_draw(engine, monkeypatch):
    given_up = []
    give_up = Batch._give_up
    monkeypatch.setattr(Batch, "_give_up", lambda self: (given_up.append(self.running[-1].index), give_up(self)))
    batch = engine.batch(8)
    sampling = [Sampling(temperature=1, seed=i, repeat_penalty=1.3, max_tokens=60) for i in range(6)]
    for i in range(6):
        batch.add(i, prompt_of(14, i), sampling[i])
    ended = finish(batch)
    assert given_up and 0 not in given_up
    assert [told(ended[i]) for i in range(6)] == [engine.alone(prompt_of(14, i), sampling[i]) for i in range(6)]


def test_a_long_prompt_enters_in_chunks_while_others_go_on(engine):
    batch = engine.batch(100, context=400)
    batch._size = 24
    batch.add(0, prompt_of(5), Sampling(temperature=0.9, seed=1, max_tokens=60))
    batch.step()
    batch.add(1, prompt_of(200), Sampling(temperature=0, max_tokens=5))
    talking = batch.running[0].turn
    for n in range(2, 8):
        batch.step()
        assert talking.generated_tokens == n or talking.stop != "interrupt"
        assert sum(len(sequence.cache.slots) for sequence in batch.running) <= 24
    ended = finish(batch)
    assert told(ended[1]) == engine.alone(prompt_of(200), Sampling(temperature=0, max_tokens=5), 400)


def test_a_model_whose_positions_depend_on_the_length_answers_each_as_alone(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    engine = Engine(tiny_folder(tmp_path, 0.5, rope_parameters=scaling, max_position_embeddings=32))
    batch = engine.batch(40)
    for i, length in enumerate((10, 40, 60)):
        batch.add(2 * i, prompt_of(length), Sampling(temperature=0.9, seed=3, max_tokens=20), samples=2)
    for i, sequence in finish(batch).items():
        sampling = Sampling(temperature=0.9, seed=3 + i % 2, max_tokens=20)
        assert told(sequence) == engine.alone(prompt_of((10, 40, 60)[i // 2]), sampling)


def test_a_pass_that_fails_loses_nothing(engine, monkeypatch):
    batch = engine.batch(30)
    for i in range(4):
        batch.add(i, prompt_of(40) + [i + 5], Sampling(temperature=0.8, seed=i, max_tokens=20))
    forward, left = Layer.forward, [0, 2, 7, 25]

    def broken(self, *pass_):
        left[0] -= self.layer == 1
        if self.layer == 1 and left[0] < 0 and len(left) > 1:
            left.pop(0)
            raise KeyboardInterrupt
        return forward(self, *pass_)

    monkeypatch.setattr(Layer, "forward", broken)
    monkeypatch.setattr(NativeBatch, "for_kernels", PagedBatch.for_kernels)  # or no layer is on its own
    ended = {}
    while batch.busy:
        try:
            ended |= {sequence.index: sequence for sequence in batch.step()}
        except KeyboardInterrupt:
            assert batch.pool.free == 30 and not batch.pool.named
    assert len(left) == 1
    for i in range(4):
        sampling = Sampling(temperature=0.8, seed=i, max_tokens=20)
        assert told(ended[i]) == engine.alone(prompt_of(40) + [i + 5], sampling)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["extend", "forward", "draw", "take"]), st.integers(0, 60)), max_size=5))
def test_an_interrupt_anywhere_in_a_step_leaves_a_batch_that_goes_on(engine, moments):
    """Greedy, since a draw that nobody has seen is drawn again."""
    batch, ended = engine.batch(12), {}
    for i in range(3):
        batch.add(2 * i, prompt_of(30) + [i + 5], Sampling(temperature=0, max_tokens=9), samples=2)
    places = {"extend": Sequence, "forward": Layer, "draw": Sampler, "take": Sequence}
    while batch.busy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeBatch, "for_kernels", PagedBatch.for_kernels)  # or no layer is on its own
            if moments:
                name, count = moments.pop()
                whole, left = getattr(places[name], name), [count]

                def broken(*arguments, left=left, whole=whole):
                    left[0] -= 1
                    if left[0] == -1:
                        raise KeyboardInterrupt
                    return whole(*arguments)

                patch.setattr(places[name], name, broken)
            try:
                ended |= {sequence.index: sequence for sequence in batch.step()}
            except KeyboardInterrupt:
                assert batch.pool.free == 12
    assert len(ended) == 6 and batch.pool.free == 12
    for i, sequence in ended.items():
        assert told(sequence) == engine.alone(prompt_of(30) + [i // 2 + 5], Sampling(temperature=0, max_tokens=9))


def test_numbers_that_overflow_end_one_answer_and_not_its_neighbours(engine):
    batch = engine.batch(30)
    for i in range(3):
        batch.add(i, prompt_of(20, i), Sampling(temperature=0, max_tokens=9))
    batch.waiting[1].sampler.draw = lambda row: torch.tensor(-1)
    ended = finish(batch)
    assert "overflowed" in ended[1].error
    assert told(ended[2]) == engine.alone(prompt_of(20, 2), Sampling(temperature=0, max_tokens=9))


def test_prompts_that_cannot_be_are_refused_and_change_nothing(engine):
    batch = engine.batch(4)
    with pytest.raises(ValueError, match="empty"):
        batch.add(0, [], GREEDY)
    with pytest.raises(ValueError, match="vocabulary"):
        batch.add(0, [5000], GREEDY)
    with pytest.raises(CacheFull, match="97 tokens and the context holds 96.*--ctx-size"):
        batch.add(0, prompt_of(97), GREEDY)
    with pytest.raises(CacheFull, match="65 tokens and the pool holds 64.*--pool"):
        batch.add(0, prompt_of(65), GREEDY)
    assert not batch.busy
    batch.add(0, prompt_of(64), GREEDY)
    (sequence,) = batch.step()
    assert (sequence.turn.stop, sequence.turn.generated_tokens) == ("context", 0)


# ---- pages


def used(batch):
    return len(batch.pool.references) - batch.pool.free


@pytest.mark.parametrize("length", [95, 96, 97])
def test_a_shared_beginning_is_computed_once_and_held_once(engine, length):
    batch = engine.batch(100, context=200)
    system, n = prompt_of(length), 8
    for i in range(n):
        batch.add(i, system + prompt_of(10, i), Sampling(temperature=0, max_tokens=3))
    batch.step()
    assert len(batch.running) == n
    whole = length // 16
    assert used(batch) == whole + n * (-(-(length + 10) // 16) - whole)
    assert [sequence.turn.reused_tokens for sequence in batch.running] == [0] + [whole * 16] * (n - 1)
    finish(batch)


@pytest.mark.parametrize("length", [32, 40])
def test_samples_hold_their_prompt_once_and_copy_what_they_write_into(engine, length):
    batch = engine.batch(100)
    batch.add(0, prompt_of(length), Sampling(temperature=1, seed=7, max_tokens=6), samples=5)
    batch.step()
    assert used(batch) == -(-length // 16) and len(batch.running) == 5
    batch.step()
    assert used(batch) == length // 16 + len(batch.running)
    ended = finish(batch)
    for i in range(5):
        sampling = Sampling(temperature=1, seed=7 + i, max_tokens=6)
        assert told(ended[i]) == engine.alone(prompt_of(length), sampling)
    assert len({sequence.turn.text for sequence in ended.values()}) > 1


def test_samples_that_do_not_fit_together_take_turns(engine):
    batch = engine.batch(6)
    batch.add(0, prompt_of(40), Sampling(temperature=1, seed=7), samples=7)
    for i, sequence in finish(batch).items():
        assert told(sequence) == engine.alone(prompt_of(40), Sampling(temperature=1, seed=7 + i))


def test_what_is_wasted_is_less_than_a_page_for_each_sequence(engine):
    batch, context = engine.batch(400), CONTEXT
    for i in range(64):
        batch.add(i, prompt_of(1 + i * 37 % 80, i), Sampling(temperature=0, max_tokens=16))
    while batch.busy:
        batch.step()
        if batch.running:
            lengths = [sequence.cache.length for sequence in batch.running]
            assert 0 <= used(batch) * 16 - sum(lengths) < 16 * len(lengths)
            assert used(batch) * 16 < len(lengths) * context


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pages_hold_what_a_plain_list_of_tokens_would(engine, data):
    """Any order of growing, cutting, branching and sharing on several sequences: contents, references, free pages."""
    pool = Pool(engine.model.config, data.draw(st.integers(1, 12)), "cpu", torch.float32, page_size=4)
    held: list[tuple[PagedCache, list[int]]] = []

    def row(tokens, at):  # what a token's key is made of: all tokens up to it, as in a model
        return float(hash(tuple(tokens[: at + 1])) % 100_003)

    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["new", "extend", "extend", "truncate", "fork", "publish", "release"]))
        if action == "new" or not held:
            cache, tokens = engine.cache(pool), [data.draw(st.integers(0, 1)) for _ in range(9)]
            cache.adopt(tokens)
            assert cache.length < len(tokens)
            held.append((cache, tokens[: cache.length]))
            continue
        i = data.draw(st.integers(0, len(held) - 1))
        cache, tokens = held[i]
        if action == "extend":
            more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            before = list(cache.block_table)
            try:
                cache.extend(len(more))
            except CacheFull:
                assert (cache.length, cache.block_table) == (len(tokens), before)
            else:
                tokens = tokens + more
                rows = torch.tensor([row(tokens, at) for at in range(len(tokens) - len(more), len(tokens))])
                for layer in range(3):
                    k = rows[None, :, None].expand(2, -1, 8)
                    cache._store(layer, k, -k)
        elif action == "truncate":
            tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
            cache.truncate(len(tokens))
        elif action == "fork":
            held.append((cache.fork(), tokens))
        elif action == "publish":
            cache.publish(tokens)
        else:
            cache.truncate(0)
            tokens = []
        held[i] = cache, tokens
        for cache, tokens in held:
            assert cache.length == len(tokens)
            assert len(cache.block_table) == -(-len(tokens) // 4)
            expected = torch.tensor([row(tokens, at) for at in range(len(tokens))])
            cache._masks = {}
            for keys, values in cache._read(2, 0, len(tokens)):
                now, expected = expected[: keys.shape[1]], expected[keys.shape[1] :]
                assert (keys == now[:, None]).all() and (values == -now[:, None]).all()
            assert not len(expected)
        table = [page for cache, _ in held for page in cache.block_table]
        assert pool.references == [table.count(page) for page in range(len(pool.references))]
        assert pool.free == pool.references.count(0)
    for cache, _ in held:
        cache.truncate(0)
    assert pool.free == len(pool.references)


@pytest.mark.parametrize("kernels", [FlashBatch, NativeBatch])
def test_kernels_give_the_same_pass(engine, kernels):
    if kernels is FlashBatch:
        pytest.importorskip("triton")
    elif native.library() is None:
        pytest.skip("no C compiler")
    pool = Pool(engine.model.config, 40, "cpu", torch.float32)
    pool.keys_values.fill_(torch.nan)
    logits = []
    for kind in (PagedBatch, kernels):
        caches = [engine.cache(pool) for _ in range(4)]
        for step in ((20, 1, 33, 16), (1, 1, 1, 7), (1, 1, 1, 1)):
            for cache, n in zip(caches, step, strict=True):
                cache.extend(n)
            tokens = torch.tensor([t for cache, n in zip(caches, step, strict=True) for t in prompt_of(64)[:n]])
            hidden = engine.model(tokens, kind(caches))
        logits.append(engine.model.head(hidden))
        for cache in caches:
            cache.truncate(0)
    torch.testing.assert_close(*logits, atol=2e-3, rtol=0)
    assert logits[0].argmax(-1).equal(logits[1].argmax(-1))


# ---- lines


def run(capsys, *argv):
    code = chat.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.fixture
def prompts(tmp_path):
    """Writes lines into a file, text as it stands and anything else as JSON."""

    def prompts(*asked):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in asked)
        (tmp_path / "in").write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
        return tmp_path / "in"

    return prompts


USER = {"role": "user", "content": "hi"}


def test_each_line_has_its_result_in_its_place(engine, prompts, capsys):
    asked = [
        "plain text",
        "",
        {"prompt": "one", "temp": 0, "max_tokens": 3},
        {"messages": [USER], "temperature": 0.5, "seed": 4, "stop": ["x", "y"], "top_k": 5, "top_p": 0.9},
        {"prompt": "with a system", "system": "be brief", "repeat_penalty": 1.1, "min_p": 0.1, "stop": "z"},
        "long " * 100,
        "last",
    ]
    code, results, err = run(
        capsys, "--model", engine.folder, "--batch", prompts(*asked), "--temp", 0, "-n", 8, "-c", 256
    )
    assert code == 0
    assert [result["index"] for result in results] == list(range(7))
    assert results[1] == {"index": 1, "error": "the prompt is empty"}
    assert "--ctx-size" in results[5]["error"]
    for i in (0, 2, 3, 4, 6):
        assert list(results[i]) == ["index", "text", "stop", "prompt_tokens", "generated_tokens"]
    ids = engine.tokenizer.chat([{"role": "user", "content": "last"}])
    _, text, stop, generated = engine.alone(ids, Sampling(temperature=0, max_tokens=8), 256)
    expected = {"text": text, "stop": stop, "prompt_tokens": len(ids), "generated_tokens": generated}
    assert results[6] == {"index": 6, **expected}
    assert results[2]["generated_tokens"] <= 3
    assert "7 lines answered" in err and err.count("\n") == 1


BAD = [
    ('{"prompt": ', "not a JSON object"),
    ("[" * 100_000, None),
    ('{"prompt":' + "[" * 100_000, "not a JSON object"),
    ({"prompt": 5}, "prompt must be text"),
    ({"prompt": " "}, "prompt is empty"),
    ({}, "either prompt or messages"),
    ({"prompt": "a", "messages": [USER]}, "either prompt or messages"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": ["hi"]}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, "a message needs a role and a content"),
    ({"messages": [{"role": "user", "content": 3}]}, "must be text"),
    ({"messages": [{"role": [], "content": "a"}]}, "must be text"),
    ({"messages": [{"role": "system", "content": "a"}, USER], "system": "b"}, "system"),
    ({"prompt": "a", "system": 3}, "system must be text"),
    ({"prompt": "a", "temprature": 3}, "unknown key 'temprature'"),
    ({"prompt": "a", "temp": "3"}, "temperature must be a number"),
    ({"prompt": "a", "temp": None}, "temperature must be a number"),
    ({"prompt": "a", "temp": True}, "temperature must be a number"),
    ('{"prompt": "a", "temp": NaN}', "temperature is nan"),
    ({"prompt": "a", "top_k": 1.5}, "top_k must be a whole number"),
    ({"prompt": "a", "top_p": 2}, "top_p is 2, and must be from 0 to 1"),
    ({"prompt": "a", "seed": -1}, "seed is -1"),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens must be a whole number"),
    ({"prompt": "a", "stop": 3}, "stop must be text"),
    ({"prompt": "a", "stop": [3]}, "stop must be text"),
    ({"prompt": "a", "stop": [""]}, "stop string must not be empty"),
]


def test_a_bad_line_says_what_is_wrong_and_the_others_are_answered(engine, prompts, capsys):
    asked = [line for bad, _ in BAD for line in (bad, "good")]
    arguments = ("--model", engine.folder, "-c", 200, "--temp", 0, "-n", 2, "--stats", "off")
    code, results, err = run(capsys, *arguments, "--batch", prompts(*asked))
    assert (code, err, len(results)) == (0, "", 2 * len(BAD))
    for (line, said), result in zip(BAD, results[::2], strict=True):
        assert set(result) == {"index", "error"}, line
        assert said is None or said in result["error"], line
        assert "\n" not in result["error"]
    assert len({result["text"] for result in results[1::2]}) == 1


@settings(max_examples=60, deadline=None)
@given(
    line=st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.dictionaries(
                st.sampled_from(["prompt", "messages", "role", "content", "system", "seed", "stop", "temp", "x"]), inner
            )
            | st.lists(inner, max_size=3)
        ),
    ).map(lambda value: json.dumps({"prompt": "a", **value} if isinstance(value, dict) else value).encode())
)
def test_any_line_is_answered_or_refused_in_words(engine, line):
    requests = lines.Requests(engine.tokenizer, Sampling())
    try:
        ids, sampling = requests.read(line, 0)
    except (ValueError, lines.TokenizerError) as error:
        assert str(error)
    else:
        assert ids and isinstance(sampling, Sampling)


def test_a_seed_is_the_lines_own_whatever_its_neighbours(engine, prompts, capsys):
    def texts(*asked):
        arguments = ("--model", engine.folder, "-c", 200, "--seed", 5, "--temp", 1, "-n", 9)
        return [result["text"] for result in run(capsys, *arguments, "--batch", prompts(*asked))[1]]

    together = texts("hi", "hi", "hi", "hi")
    assert len(set(together)) > 1
    assert texts("other", "hi", {"prompt": "longer than that"}, "hi")[1::2] == together[1::2]
    assert texts("x", {"prompt": "hi", "seed": 5})[1] == together[0]


def test_reading_ahead_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(lines, "AHEAD", 5)
    batch, taken, done = engine.batch(200, context=300), [0], []

    class Endless:
        ended = False

        def get(self, wait):
            taken[0] += 1
            self.ended = taken[0] > 60
            return None if self.ended else b'{"prompt": "first", "max_tokens": 60}' if taken[0] == 1 else b"hi"

    requests = lines.Requests(engine.tokenizer, Sampling(temperature=0, max_tokens=1))
    output, most = lines.InOrder(done.append), []
    lines.answer_lines(batch, Endless(), requests, output, lambda: most.append(taken[0] - output.next))
    assert [result["index"] for result in done] == list(range(60))
    assert max(most) <= 5 + 1


# ---- files and signals

MANY = [f"question {i} " * (i % 4 + 1) for i in range(24)]


def answers(engine, asked, path):
    """The result file of an undisturbed run."""
    code = chat.main(arguments(engine, asked, path))
    assert code == 0
    return path.read_bytes()


def arguments(engine, asked, path):
    argv = ["--model", engine.folder, "-c", 200, "--temp", 0, "-n", 20, "--stats", "off", "--pool", 400]
    return [str(arg) for arg in (*argv, "--batch", asked, "-o", path)]


def test_killed_at_any_moment_it_goes_on_and_the_file_is_the_same(engine, prompts, tmp_path):
    """The moments are drawn by how far the file has come, since a clock would tell another one on another machine."""
    asked, path = prompts(*MANY), tmp_path / "out"
    whole = answers(engine, asked, tmp_path / "whole")
    for length in sorted(random.Random(0).sample(range(1, len(whole) // 2), 5)):
        child = start_chat(*arguments(engine, asked, path))
        while not path.exists() or path.stat().st_size < length:
            assert child.poll() is None, child.stderr.read()  # it is still at it
            time.sleep(0.001)
        child.kill()
        child.wait()
        assert whole.startswith(path.read_bytes())
    assert answers(engine, asked, path) == whole
    assert whole.count(b"\n") == len(MANY)


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_that_was_cut_off_is_written_again(engine, prompts, tmp_path, cut):
    asked, path = prompts(*MANY[:6]), tmp_path / "out"
    whole = answers(engine, asked, path)
    path.write_bytes(whole[:-cut])
    assert answers(engine, asked, path) == whole
    assert answers(engine, asked, path) == whole  # and with nothing left to do


@pytest.mark.parametrize("content", [b"my diary\n", b'{"index": 1, "text": ""}\n', b"{}\n", b"[]\n", b"\xff\n"])
def test_a_file_that_holds_anything_else_is_left_alone(engine, prompts, tmp_path, capsys, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    assert chat.main(arguments(engine, prompts("hi"), path)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"chat: {path}: its line 1 is no result") and err.count("\n") == 1
    assert path.read_bytes() == content


def start_chat(*argv, **options):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, CHAT, *map(str, argv)]
    return subprocess.Popen(command, **{**streams, "bufsize": 0, "env": environment(), **options})


def test_stdin_is_read_as_it_comes_and_a_terminated_run_ends_clean(engine):
    """Each question is answered before the next one is asked; then SIGTERM comes while it waits."""
    process = start_chat("--model", engine.folder, "--batch", "-", "-n", 4, "-c", 200)
    for i in range(3):
        process.stdin.write(f"question {i}\n".encode())
        assert json.loads(process.stdout.readline())["index"] == i
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    assert process.returncode in (143, -signal.SIGTERM)
    assert b"Traceback" not in process.stderr.read()


def test_ctrl_c_keeps_what_is_answered_and_exits_130(engine, tmp_path):
    path = tmp_path / "out"
    process = start_chat("--model", engine.folder, "--batch", "-", "-n", 50, "-c", 200, "-o", path)
    process.stdin.write(b"hi\n" * 20_000)
    deadline = time.monotonic() + 20
    while (not path.exists() or not path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"stopped before the end" in err and b"Traceback" not in err
    results = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert results and [result["index"] for result in results] == list(range(len(results)))


def test_a_closed_pipe_ends_quietly(engine, prompts):
    asked = prompts(*["hi"] * 3000)
    process = start_chat("--model", engine.folder, "--batch", asked, "-n", 4, "-c", 200)
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(20), process.stderr.read()) == (0, b"")


def test_a_terminal_sees_how_far_it_is_and_then_a_summary(engine, prompts, tmp_path):
    command = f"{sys.executable} {CHAT} --model {engine.folder} --batch {prompts(*MANY)} -n 9 -c 200 -o {tmp_path}/out"
    terminal = pexpect.spawn("sh", ["-c", command], env=environment(), encoding="utf-8", dimensions=(24, 60))
    terminal.expect(r"\r\d+ answered, \d+ under way, \d+ of 50 pages, \d+ tokens in [^\r\n]*\x1b\[K", timeout=30)
    terminal.expect(r"\r\x1b\[Kchat: 24 lines answered, \d+ tokens in", timeout=30)
    terminal.expect(pexpect.EOF, timeout=10)
    terminal.close()
    assert terminal.exitstatus == 0


# ---- samples, and what is refused


@pytest.fixture
def no_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)


def test_samples_follow_each_other_with_their_seeds(engine, no_stdin, capsys):
    argv = ["--model", engine.folder, "-p", "hi", "-c", 200, "--seed", 3, "--temp", 1, "-n", 6, "--samples", 3]
    code, results, err = run(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    assert [(result["index"], result["seed"]) for result in results] == [(0, 3), (1, 4), (2, 5)]
    assert chat.main([*map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert out == "\n".join(result["text"] + "\n" for result in results)
    assert [line.split(":")[1] for line in err.splitlines()] == [
        f" sample {i + 1} of 3, seed {3 + i}" for i in range(3)
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--batch", "nowhere"], "nowhere: No such file"),
        (["--batch", "/"], "/: Is a directory"),
        (["--batch", __file__, "-o", "/"], "/: Is a directory"),
        (["--batch", __file__, "-o", "/dev/null"], "/dev/null: not a file of its own"),
        (["--batch", __file__, "--cache", "none"], "--cache none"),
        (["--samples", "2", "-p", "hi", "--cache", "contiguous"], "--cache contiguous"),
        (["--batch", __file__, "-p", "hi"], "--prompt does not go with --batch"),
        (["--batch", __file__, "--compile"], "--compile does not go with --batch"),
        (["--samples", "2", "-p", "hi", "--verify"], "--verify does not go with --samples"),
        (["--samples", "0", "-p", "hi"], "--samples"),
        (["-o", "x", "-p", "hi"], "--output needs --batch"),
        (["--pool", "8", "-p", "hi"], "--pool needs"),
        (["--batch", __file__, "--top-p", "3"], "top_p is 3.0"),
        (["--samples", "2", "-p", "hi", "-c", "8"], "--ctx-size"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(engine, no_stdin, capsys, argv, said):
    assert chat.main(["--model", str(engine.folder), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("chat: ") and err.count("\n") == 1 and said in err
