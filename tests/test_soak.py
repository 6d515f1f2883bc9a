"""A long conversation, and a program that is killed: nothing is lost, nothing grows, and nothing is wrong."""

import json
import os
import random
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch

from cache import NoCache, make
from conversation import Conversation
from generate import Sampling, Session, passes
from model import load
from show import ChatError
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TURNS = 300


class Silence:
    """An output that shows nothing; ``at_step`` is called with each step."""

    def __init__(self):
        self.at_step = lambda: None

    def start(self, session) -> None: ...

    def after_pass(self, session) -> None: ...

    def step(self, session, step) -> None:
        self.at_step()

    def stop(self) -> None: ...

    def done(self, session) -> None: ...


def conversation_over(folder: Path, context: int = 400) -> Conversation:
    model, tokenizer = load(folder), Tokenizer.from_folder(folder)
    session = Session(model, make("contiguous", model.config, context), tokenizer)
    return Conversation(session, Sampling(temperature=1, max_tokens=12), Silence(), "S", on_full="drop")


def next_logits(session, cache) -> torch.Tensor:
    """What comes after all tokens, by what a cache holds of them."""
    cache.truncate(min(cache.length, len(session.tokens) - 1))
    *_, hidden = passes(session.model, cache, session.tokens, 64)
    return session.model.head(hidden[-1:])


def fresh_logits(session) -> torch.Tensor:
    return next_logits(session, NoCache(session.model.config, session.cache.capacity, "cpu", session.cache.dtype))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def turn(conversation: Conversation, chance: random.Random) -> None:
    """Something that a person may do, now and then broken off."""

    def break_off():
        if chance.random() < 0.02:
            raise KeyboardInterrupt  # as the second Ctrl-C does

    conversation.output.at_step = break_off
    text = "".join(chance.choices("abc dé\n日", k=chance.randrange(1, 40)))
    actions = [lambda: conversation.say(text)] * 5 + [
        conversation.retry,
        conversation.go_on,
        lambda: conversation.edit(text) if conversation.messages else None,
        lambda: conversation.undo(chance.randrange(1, 3)),
    ]
    timer = threading.Timer(chance.random() * 0.02, conversation.session.interrupt)
    if chance.random() < 0.3:
        timer.start()
    with suppress(KeyboardInterrupt, ChatError):
        chance.choice(actions)()
    timer.cancel()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_300_turns_hold_memory_flat_and_the_cache_right(tiny_gqa, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    conversation, chance, sizes = conversation_over(tiny_gqa), random.Random(7), []
    session = conversation.session
    for n in range(TURNS):
        turn(conversation, chance)
        if n % 10 == 9:
            conversation.save("soak")
        if n % 50 == 49:
            conversation.load("soak")
        if session.tokens:
            torch.testing.assert_close(next_logits(session, session.cache), fresh_logits(session), atol=1e-4, rtol=0)
        sizes.append(resident())
    settled = sizes[TURNS // 3 :]
    slope = numpy.polyfit(range(len(settled)), settled, 1)[0]
    with capsys.disabled():
        print(f"\n{slope:.0f} bytes a turn, {settled[-1] - settled[0]} in {len(settled)} turns")
    assert slope < 4096
    assert not list((tmp_path / "kv-chat" / "sessions").glob(".*"))

    conversation.save("soak")
    program = (
        "import sys, json; sys.path.insert(0, 'tests'); from test_soak import *\n"
        f"conversation = conversation_over(Path({str(tiny_gqa)!r})); conversation.load('soak')\n"
        "session = conversation.session; held = session.cache.length\n"
        "print(json.dumps([held, conversation.messages, next_logits(session, session.cache).tolist()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    held, messages, logits = json.loads(done.stdout)
    assert (held, messages) == (session.cache.length, conversation.messages)
    torch.testing.assert_close(torch.tensor(logits), fresh_logits(session), atol=1e-4, rtol=0)


KILLED = """
import os, random, signal, sys, time
sys.path.insert(0, "tests")
from test_soak import *
torch.set_num_threads(1)
conversation = conversation_over(Path(sys.argv[1]))
conversation.say("x" * 200)
conversation.save("whole")
for n in range(20):
    child = os.fork()
    if not child:
        while True:  # each file has its own number in the text and in the tokens
            n += 1
            said = [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "!"}]
            conversation.here.messages = said
            conversation.session.tokens = [n % 200] * conversation.session.cache.length
            conversation.save("whole")
    time.sleep(random.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    conversation.load("whole")
    number = conversation.messages[0]["content"]
    assert n == 0 or number.isdigit()
    assert not number.isdigit() or set(conversation.session.tokens) == {int(number) % 200}
print(n + 1)
"""


def test_session_that_is_killed_while_it_saves_leaves_a_whole_file(tiny_gqa, tmp_path):
    known = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", KILLED, tiny_gqa]
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr
