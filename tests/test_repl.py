"""repl.py in a terminal: what a person types and sees, and that nothing is lost."""

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from terminal import ANSWER, STEPS, SUMMARY, Terminal

import repl


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    """Where the history is kept, as XDG_STATE_HOME names it."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def _terminal(successor, state):
    terminal = Terminal(state, "--model", successor, "--stats", "summary")
    yield terminal
    terminal.child.close(force=True)


@pytest.fixture
def terminal(_terminal):
    """A conversation without a message yet; the program is the same for all the tests, which is quicker."""
    _terminal.say("/clear")
    return _terminal


PASTE = "\x1b[200~{}\x1b[201~"


def reused(lines: list[str]) -> int:
    return int(SUMMARY.search("".join(lines))[2])


def new(lines: list[str]) -> int:
    return int(SUMMARY.search("".join(lines))[1])


def test_turn_is_answered_and_the_next_reuses_the_cache(terminal):
    first, second = terminal.say("hi"), terminal.say("and?")
    assert first[1] == second[1] == ANSWER
    prompt = sum(map(int, SUMMARY.search("".join(first)).groups()[:2]))
    assert reused(second) == prompt + STEPS


def test_clear_forgets_the_conversation(terminal):
    first = terminal.say("hi")
    terminal.say("and?")
    assert terminal.say("/clear")[1] == "chat: the conversation is empty; a system message stays"
    again = terminal.say("hi")
    assert new(again) + reused(again) == new(first) + reused(first)


def test_help_names_every_command(terminal):
    lines = terminal.say("/help")
    assert all(any(line.startswith(f"/{name}") for line in lines) for name in repl.COMMANDS)


@pytest.mark.parametrize("line", ["/nonsense", "/nonsense here", "/"])
def test_unknown_command_is_named_and_not_sent(terminal, line):
    lines = terminal.say(line)
    assert len(lines) == 2
    assert lines[1].startswith("chat: no command /") and "/help" in lines[1]


def test_stats_mode_changes(terminal):
    assert terminal.say("/stats off") == ["> /stats off"]
    assert terminal.say("hi") == ["> hi", ANSWER]
    terminal.say("/stats step")
    lines = terminal.say("hi")
    assert sum("/512 tokens" in line and " ms " in line for line in lines) == STEPS
    assert ANSWER in lines
    assert terminal.say("/stats loud")[1].startswith("chat: /stats takes one of off, summary, live, step")
    terminal.say("/stats live")
    lines = terminal.say("hi")
    assert lines[:2] == ["> hi", ANSWER] and not any("[cache" in line for line in lines)
    terminal.say("/stats summary")


def test_ctrl_c_at_an_empty_prompt_does_not_leave(terminal):
    row = terminal.screen.cursor.y
    terminal.type("\x03")
    terminal.until(lambda: terminal.screen.cursor.y > row)
    terminal.ready()
    assert terminal.say("hi")[1] == ANSWER


def test_ctrl_c_drops_the_line_being_typed(terminal):
    terminal.type("never mind")
    terminal.see("never mind")
    terminal.type("\x03")
    terminal.ready()
    assert terminal.say("hi")[1] == ANSWER


def test_pasted_line_that_starts_with_a_slash_is_a_message(terminal):
    assert ANSWER in terminal.say(PASTE.format("/clear"))
    assert (
        terminal.say("/clear")[1] == "chat: the conversation is empty; a system message stays"
    )  # the next one, typed, is a command


def test_paste_of_several_lines_is_one_message(terminal):
    counts = [new(terminal.say(text)) for text in ("hi", PASTE.format("/clear\r\nhi\rho\n") + "!")]
    typed = len(["<|im_end|>", "\n", "<|im_start|>", *"user\n", *"/clear\nhi\nho\n!"])
    assert counts[1] == typed + len(["<|im_end|>", "\n", "<|im_start|>", *"assistant\n"])


def test_paste_during_an_answer_waits_as_one_message(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-n", "900")
    terminal.received = b""
    terminal.type("hi\r")
    terminal.see("ababab")
    assert b"\x1b[?2004h" in terminal.received.partition(b"abab")[0]  # the terminal is asked to mark pastes
    terminal.screen.reset()
    terminal.type(PASTE.format("/clear\rand more"))
    terminal.see("> /clear")
    terminal.see("and more")
    assert "the conversation is empty" not in "\n".join(terminal.screen.shown)


def test_alt_enter_is_a_new_line_in_the_message(terminal):
    terminal.say("hi")
    assert new(terminal.say("a\x1b\rb")) - new(terminal.say("a")) == len("\nb")


def test_history_is_private_and_lies_under_xdg_state_home(terminal, state):
    terminal.say("remember me")
    (history,) = state.rglob("history")
    assert "+remember me" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    terminal.screen.reset()
    terminal.type("\x1b[A")  # up
    terminal.see("remember me")
    terminal.type("\x03")
    terminal.ready()


def test_history_file_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = repl.private_file(tmp_path / "deep" / "history")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_damaged_history_and_the_ways_to_leave(successor, tmp_path):
    (tmp_path / "kv-chat").mkdir()
    (tmp_path / "kv-chat" / "history").write_bytes(b"\n# 2024\n+caf\xe9 \xff\x00\n+")
    terminal = Terminal(tmp_path, "--model", successor, columns=20)
    text = "a message that is longer than the screen is wide"
    assert ANSWER in terminal.say(text)
    terminal.type("\x04")
    assert terminal.end() == 0


def test_state_folder_that_cannot_be_made_does_not_stop_the_chat(successor, tmp_path):
    (tmp_path / "file").touch()
    terminal = Terminal(tmp_path / "file", "--model", successor)
    terminal.see("chat: messages are not kept")
    assert ANSWER in terminal.say("hi")
    terminal.type("/quit\r")
    assert terminal.end() == 0


def test_dumb_terminal_gets_no_escape_codes(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, term="dumb")
    assert ANSWER in terminal.say("hi")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.received


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-c", "50000", "--stats", "live")
    for _ in range(2):
        terminal.screen.reset()
        terminal.type("hi\r")
        terminal.see("ababab")
        terminal.see("[cache ")
        terminal.type("\x03")
        terminal.see("| interrupt |")
        terminal.ready()
        assert not any("[cache " in line for line in terminal.screen.shown)
    terminal.type("\x04")
    assert terminal.end() == 0


def test_turn_that_does_not_fit_is_one_line_and_the_chat_goes_on(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "-c", "60", "--stats", "off")
    assert terminal.say("hi") == ["> hi", ANSWER]
    lines = terminal.say("x" * 50)
    assert len(lines) == 2
    assert re.fullmatch(r"chat: the prompt has \d+ tokens and the context holds 60; shorten .*", lines[1])
    terminal.say("/clear")
    assert terminal.say("hi") == ["> hi", ANSWER]
    terminal.type("/quit\r")
    assert terminal.end() == 0


def test_a_template_that_refuses_is_quoted_and_the_chat_goes_on(successor, tmp_path):
    folder = shutil.copytree(successor, tmp_path / "strict")
    refusal = "{% for m in messages if m.content == 'no' %}{{ raise_exception('not a word of that') }}{% endfor %}"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = refusal + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    terminal = Terminal(tmp_path, "--model", folder, "--stats", "off")
    assert terminal.say("no")[1] == "chat: the chat template refuses this conversation: not a word of that"
    assert terminal.say("hi") == ["> hi", ANSWER]
