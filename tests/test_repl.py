"""repl.py in a terminal: what a person types and sees, and that nothing is lost."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import says, successor_folder
from terminal import ANSWER, CHAT, STEPS, SUMMARY, Terminal, environment

import chat
import explain
import reader
import repl
from conversation import Conversation
from show import ChatError


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


class Talk:
    """A conversation in this process, which is quicker where nothing depends on keys."""

    def __init__(self, capsys, folder: Path, *options):
        args = chat.arguments(["--model", str(folder), "--stats", "off", *map(str, options)])
        output = chat.output_for(args)
        self.conversation = Conversation(chat.open_session(args), chat.sampling_of(args), output, args.system)
        self.repl, self.capsys = repl.Repl(self.conversation, None), capsys

    def say(self, line: str) -> str:
        """What is printed when a line is typed."""
        self.capsys.readouterr()
        self.repl._try(lambda: self.repl._take(line))
        return "".join(self.capsys.readouterr())

    def break_off(self, *errors: BaseException) -> None:
        """Each error ends an answer in its third step."""
        errors, count, step = list(errors), 0, self.conversation.output.step

        def third(session, each):
            nonlocal count
            count += 1
            step(session, each)
            if count == 3 and errors:
                count = 0
                raise errors.pop(0)

        self.conversation.output.step = third


@pytest.fixture
def talk(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return lambda *arguments: Talk(capsys, *arguments)


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
    assert ANSWER in terminal.say(PASTE.format('"""open'))
    assert ANSWER in terminal.say(PASTE.format("/clear"))
    assert (
        terminal.say("/clear")[1] == "chat: the conversation is empty; a system message stays"
    )  # the next one, typed, is a command


def test_paste_of_several_lines_is_one_message(terminal):
    counts = [new(terminal.say(text)) for text in ("hi", PASTE.format("/clear\r\nhi\rho\n") + "!")]
    typed = len(["<|im_end|>", "\n", "<|im_start|>", *"user\n", *"/clear\nhi\nho\n!"])
    assert counts[1] == typed + len(["<|im_end|>", "\n", "<|im_start|>", *"assistant\n"])


def test_paste_during_an_answer_waits_whole_as_one_message_and_ctrl_c_is_heard(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-c", "60000")
    said = ["hi", "Z" * 6000, "/clear\n" + "a line of more than the kernel's 4 kB\n" * 300 + "end"]
    terminal.received = b""
    for text, following in zip(said, [*said[1:], "/quit"], strict=True):
        terminal.screen.reset()
        terminal.type("\r" if text != "hi" else "hi\r")
        terminal.see("ababab")
        assert b"\x1b[?2004h" in terminal.received.partition(b"abab")[0]  # the terminal is asked to mark pastes
        terminal.type((PASTE.format(following.replace("\n", "\r")) if following in said else "") + "\x03")
        terminal.see("| interrupt |")
        terminal.see(following[-3:] if following in said else "\n>")
    terminal.say(f"/export {tmp_path}/chat.md")
    assert re.findall(r"## You\n\n(.*?)\n\n## Model", (tmp_path / "chat.md").read_text(), re.S) == said


def test_keys_do_not_show_in_an_answer_that_was_stopped_and_continued(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-c", "60000")
    terminal.type("hi\r")
    terminal.see("ababab")
    mode = termios.tcgetattr(terminal.child.child_fd)
    mode[3] |= termios.ECHO | termios.ICANON  # as a shell does
    termios.tcsetattr(terminal.child.child_fd, termios.TCSANOW, mode)
    terminal.child.kill(signal.SIGCONT)
    terminal.until(lambda: not termios.tcgetattr(terminal.child.child_fd)[3] & (termios.ECHO | termios.ICANON))


def test_paste_is_a_message_when_it_is_recalled_and_changed_and_no_longer_once_it_is_deleted(terminal):
    terminal.say(PASTE.format("/undo"))
    assert ANSWER in terminal.say("\x1b[A")  # up
    for text in ("//x is a comment", '"""a docstring"""'):
        terminal.say(PASTE.format(text))
        terminal.screen.reset()
        terminal.type("/edit-last\r")
        terminal.see(text)
        terminal.say("")
        assert f"> {text}" in [line.rstrip() for line in terminal.say("/history")]
    assert terminal.say(PASTE.format("/help") + "\x15/help quit")[-1].startswith("/quit")
    assert ANSWER in terminal.say(PASTE.format("foo") + '\x15"""a\rb"""')
    assert terminal.say("/history")[-3:] == ["> a", "b", ANSWER]


def test_ctrl_d_on_an_emptied_line_leaves_the_editing_and_not_the_chat(terminal):
    terminal.say("hi")
    terminal.screen.reset()
    terminal.type("/edit-last\r")
    terminal.see("> hi")
    terminal.type("\x15")
    terminal.ready()
    row = terminal.screen.cursor.y
    terminal.type("\x04")
    terminal.until(lambda: terminal.screen.cursor.y > row)
    terminal.ready()
    assert terminal.say("/history")[1:] == ["> hi", ANSWER]


def test_prompt_stands_where_the_person_sees_it(successor, tmp_path):
    command = f"exec {sys.executable} {CHAT} --model {successor} --stats off > {tmp_path}/out.txt"
    terminal = Terminal(tmp_path, command=command)
    terminal.type("hi\r")
    terminal.until(lambda: (tmp_path / "out.txt").read_text() == f"{ANSWER}\n")
    terminal.ready()


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
        path = reader.private_file(tmp_path / "deep" / "history")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_damaged_history_and_the_ways_to_leave(successor, tmp_path):
    (tmp_path / "kv-chat").mkdir()
    (tmp_path / "kv-chat" / "history").write_bytes(b"\n# 2024\n+caf\xe9 \xff\x00\n+")
    terminal = Terminal(tmp_path, "--model", successor, columns=20)
    assert not any(line == "ow" or line.startswith("ow ") for line in terminal.say("/help set"))
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


def test_dumb_terminal_gets_no_escape_codes_and_all_commands(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "--stats", "summary", term="dumb")
    assert ANSWER in terminal.say("hi")
    terminal.type('"""several\r')
    terminal.see("...")
    assert ANSWER in terminal.say('lines"""')
    terminal.type("/edit-last\r")
    terminal.see("several\nlines")
    terminal.say("one line")
    assert terminal.say("/history")[3:] == ["> one line", ANSWER]
    terminal.type("\x03")
    terminal.see("chat: Ctrl-D or /quit leaves")
    terminal.ready()
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
    lines = " ".join(terminal.say("x" * 50)[1:])
    assert re.fullmatch(r"chat: the prompt has \d+ tokens and the context holds 60; shorten .* oldest turns", lines)
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


# ---- writing


def test_every_command_and_key_is_in_the_help_and_one_command_has_its_own(terminal):
    lines = terminal.say("/help")
    assert all(any(line.startswith(f"/{name} ") for line in lines) for name in repl.COMMANDS)
    assert all(any(line.startswith(key) for line in lines) for key in reader.KEYS)
    assert terminal.say("/help undo")[1:] == [f"/{'undo [n]':<30} take back the last turn, or n of them"]
    assert "did you mean /undo?" in terminal.say("/help und")[1]


def test_unknown_command_suggests_the_nearest(terminal):
    assert terminal.say("/retyr")[1] == "chat: no command /retyr; did you mean /retry?; /help lists them"


def test_quotes_hold_several_lines_and_two_slashes_are_one(terminal):
    terminal.say("hi")
    block = new(terminal.say('"""a\r/clear\rb"""'))
    slash = new(terminal.say("//a"))
    plain = new(terminal.say("a"))
    assert block - plain == len("\n/clear\nb")
    assert slash - plain == len("/")


def test_editor_writes_a_message_and_one_that_fails_says_nothing(successor, tmp_path, monkeypatch):
    editor = tmp_path / "an editor"
    editor.write_text('#!/bin/sh\nprintf "more" >> "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", f"'{editor}'")
    monkeypatch.delenv("VISUAL", raising=False)
    terminal = Terminal(tmp_path, "--model", successor, "--stats", "off")
    assert terminal.say("/edit some and ")[-1] == ANSWER
    assert "> some andmore" in terminal.say("/history")
    editor.write_text("#!/bin/sh\nexit 1\n")
    assert "failed, and nothing was said" in terminal.say("/edit some")[-1]
    editor.unlink()
    assert "No such file" in " ".join(terminal.say("/edit some"))


def test_file_goes_before_the_next_message(terminal, tmp_path):
    (tmp_path / "notes of mine.txt").write_bytes(b"caf\xe9\n")
    assert "6 tokens, goes before" in "".join(terminal.say(f"/file {tmp_path}/notes of mine.txt"))
    terminal.say("what?")
    assert terminal.say("/history")[1:4] == ["> caf\N{REPLACEMENT CHARACTER}", "", "what?"]
    assert "no such file" in "".join(terminal.say(f"/file {tmp_path}"))
    assert "no such file" in "".join(terminal.say("/file /dev/zero"))


def test_tab_completes_commands_arguments_and_paths(terminal, tmp_path):
    (tmp_path / "unmistakable.txt").touch()
    terminal.screen.reset()
    for typed, completed in [
        ("/edit-", "> /edit-last"),
        ("/set min", "> /set min-p"),
        ("/stats su", "> /stats summary"),
        (f"/file {tmp_path}/unmis", f"> /file {tmp_path}/unmistakable.txt"),
    ]:
        terminal.type(typed)
        terminal.see(completed.rpartition(" ")[2].rpartition("/")[2])  # below the line
        terminal.type("\t")
        terminal.see(completed)
        terminal.type("\x03")
        terminal.ready()
    terminal.type("/s")
    terminal.see("show the system message, or set it")  # while typing
    terminal.type("\x03")
    terminal.ready()


def test_history_is_searched(terminal):
    terminal.say("find this again")
    terminal.say("hi")
    terminal.screen.reset()
    terminal.type("\x12find")
    terminal.see("find this again")
    terminal.type("\x03")
    terminal.ready()


def test_toolbar_shows_context_cache_speed_and_model(terminal):
    terminal.say("hi")
    terminal.see("32/512 tokens, 480 left │ 0.1 of 1.0 MiB │")
    terminal.see("tok/s │ successor, float32 on cpu")


def test_vi_mode_edits_as_vi_does(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "--vi", "--stats", "off")
    terminal.type("one two\x1b")
    time.sleep(0.8)  # an escape is one once no key follows
    terminal.say("0dwA!")
    assert terminal.say("/history")[1:] == ["> two!", ANSWER]


# ---- the conversation


def test_retry_undo_edit_last_and_clear_are_edits_of_one_conversation(terminal):
    first = terminal.say("hi")
    again = terminal.say("/retry")
    assert again[-3] == ANSWER or ANSWER in again
    assert (new(again), new(again) + reused(again)) == (1, new(first) + reused(first))
    terminal.say("and?")
    terminal.type("/edit-last\r")
    terminal.see("> and?")
    terminal.say("!")
    assert terminal.say("/history")[1:] == ["> hi", ANSWER, "> and?!", ANSWER]
    terminal.say("/edit-last other")
    assert terminal.say("/history")[3] == "> other"
    assert terminal.say("/undo")[1] == "chat: 1 turn left"
    assert terminal.say("/undo 2")[1] == "chat: there is 1 turn to take back"
    assert terminal.say("/undo x")[1] == "chat: x is no whole number"
    assert terminal.say("/history")[1:] == ["> hi", ANSWER]
    terminal.say("/clear")
    assert terminal.say("/retry")[1] == "chat: nothing was said yet"
    assert terminal.say("/continue")[1].startswith("chat: the last answer was not cut")


def test_system_message_is_shown_set_and_removed(terminal):
    assert terminal.say("/system")[1] == "(no system message)"
    plain = new(terminal.say("hi")) + reused(terminal.say("/retry"))
    terminal.say("/system BE")
    assert terminal.say("/system")[1] == "BE"
    lines = terminal.say("/retry")
    assert new(lines) + reused(lines) > plain - 5
    terminal.say("/system none")
    assert terminal.say("/system")[1] == "(no system message)"


def test_options_are_shown_set_and_refused(terminal):
    assert terminal.say("/set temp 0") == ["> /set temp 0"]
    assert terminal.say("/set max_tokens 3") == ["> /set max_tokens 3"]
    terminal.say("/set stop never mind")
    shown = "\n".join(terminal.say("/show"))
    assert re.search(r"^max-tokens +3 .*^temp +0.0 .*^stop +\('never mind',\) .*^on-full +stop ", shown, re.M | re.S)
    assert "Hé" in terminal.say("hi")
    for name in ("temp", "max-tokens", "stop"):
        terminal.say(f"/set {name} default")
    assert ANSWER in terminal.say("hi")
    assert terminal.say("/set temp hot")[1] == "chat: temp takes a number, not hot"
    assert terminal.say("/set top-k 1.5")[1] == "chat: top-k takes a whole number, not 1.5"
    assert terminal.say("/set temp -1")[1].startswith("chat: temperature is -1")
    assert terminal.say("/set warmth 3")[1].startswith("chat: /set takes max-tokens, temp")
    assert terminal.say("/set on-full maybe")[1].startswith("chat: /set takes")


def test_cache_and_tokens_explain_what_is_held(terminal):
    terminal.say("hi")
    terminal.say("and?")
    lines = terminal.say("/cache")
    assert lines[1] == "cache contiguous: 68 of 512 tokens"
    assert re.fullmatch(r"█{8}░{56}", lines[2])
    assert re.match(r"0.1 of 1.0 MiB used, 0.9 reserved and free; [\d.]+ [GM]iB more on the device", lines[3])
    assert lines[4] == "2,080 bytes a token, 2,080 in each of 1 layers"
    assert re.match(r"reused so far: [\d,]+ tokens that were not computed again, which saved \d+\.\d s", lines[5])
    assert re.match(r"turn 1 +you +2  answer +11  █+", lines[6])
    assert re.match(r"turn 2 +you +4  answer +11  █+", lines[7])
    assert lines[8] == "system message and chat template    40"
    terminal.say("/undo")
    assert terminal.say("/tokens")[-2:] == [
        "answer, 11 tokens:",
        r'"H" 42  "\xc3" 130  "\xa9" 105  "l" 78  "o" 81  "," 14  " " 223  "w" 89  "r" 84  "d" 70  "!" 3',
    ]
    assert terminal.say("/cache")[-1] == "no longer part of it, and held until the next turn    36"
    terminal.say("and?")
    lines = terminal.say("/tokens")
    assert lines[1] == "message, 25 tokens:"
    assert lines[2].startswith(r'<|im_end|> 2  "\n" ')
    assert lines[-2] == "answer, 11 tokens:"
    assert lines[-1].startswith('"H" ') and r'"\xc3"' in lines[-1]


def test_continue_goes_on_with_a_cut_answer(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-n", 7, "--stats", "summary")
    assert "abababa" in terminal.say("hi")
    lines = terminal.say("/continue")
    assert "bababab" in lines
    assert new(lines) == 1
    terminal.say("more")
    terminal.say("/undo")
    assert terminal.say("/history")[1:] == ["> hi", "abababa" + "bababab"]
    terminal.say("/set max-tokens default")
    terminal.screen.reset()
    terminal.type("go\r")
    terminal.see("ababab")
    terminal.type("\x03")
    terminal.see("| interrupt |")
    terminal.ready()
    terminal.say("/set max-tokens 2")
    assert new(terminal.say("/continue")) == 1


def test_transcript_is_exported_and_no_file_replaced(terminal, tmp_path):
    terminal.say("hi")
    path = tmp_path / "chat.md"
    assert terminal.say(f"/export {path}")[1].startswith("chat: written to")
    assert path.read_text() == f"## You\n\nhi\n\n## Model\n\n{ANSWER}\n"
    assert "File exists" in "".join(terminal.say(f"/export {path}"))
    assert terminal.say("/export")[1].startswith("chat: /export takes")


def test_another_model_goes_on_and_one_that_fails_leaves_the_old(terminal, successor, endless):
    terminal.say("hi")
    assert "no such model folder" in "".join(terminal.say("/model /nowhere/at/all"))
    assert terminal.say("/model")[1].startswith("chat: /model takes")
    assert ANSWER in terminal.say("and?")
    terminal.say("/set max-tokens 4")
    terminal.say(f"/model {endless}")
    lines = terminal.say("/retry")
    assert "abab" in lines and reused(lines) == 0
    assert terminal.say("/history")[1:] == ["> hi", ANSWER, "> and?", "abab"]
    terminal.say("/set max-tokens default")
    terminal.say(f"/model {successor}")


# ---- the context


def test_nearly_full_is_said_before_and_the_oldest_turns_are_dropped_when_asked(successor, tmp_path):
    options = ("--model", successor, "-c", 120, "--stats", "off", "--system", "S")
    terminal = Terminal(tmp_path, *options)
    terminal.say("hi")
    terminal.say("hi")
    assert not any("nearly full" in line for line in terminal.screen.shown)
    assert "nearly full, 9 of 120 tokens are left" in "".join(terminal.say("hi"))
    terminal.see("NEARLY FULL │ 111/120 tokens, 9 left")
    assert re.search(
        r"the prompt has \d+ tokens and the context holds 120; .*/set on-full drop", " ".join(terminal.say("hi"))
    )
    assert len(terminal.say("/history")) == 7
    terminal.say("/set on-full drop")
    lines = terminal.say("last")
    assert "the context of 120 tokens is full: the 2 oldest turns are dropped, and the system message stays" in "".join(
        lines
    )
    assert ANSWER in lines
    assert terminal.say("/history")[1:] == ["> hi", ANSWER, "> last", ANSWER]


# ---- how it begins and ends


def test_prompt_is_answered_and_the_conversation_goes_on(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "--stats", "off", "-p", "hi", "--interactive")
    assert ANSWER in terminal.screen.shown
    terminal.say("and?")
    assert terminal.say("/history")[1:] == ["> hi", ANSWER, "> and?", ANSWER]


@pytest.mark.parametrize(
    "endings, codes",
    [
        ([signal.SIGTERM], [143]),
        ([signal.SIGHUP], [129]),
        ([signal.SIGTERM, signal.SIGHUP], [143, 129]),
    ],
)
def test_signals_end_with_their_code_and_lose_nothing(endless, tmp_path, endings, codes):
    terminal = Terminal(tmp_path, "--model", endless, "-c", "50000", "--stats", "off")
    terminal.type("hi\r")
    terminal.see("ababab")
    for ending in endings:
        terminal.child.kill(ending)
    assert terminal.end() in codes
    assert b"Traceback" not in terminal.received
    terminal = Terminal(tmp_path, "--model", endless, "-c", "50000", "--stats", "off", "--load", "last")
    lines = terminal.say("/history")
    assert lines[1] == "> hi" and lines[2].startswith("ababab")
    for ending in endings:
        terminal.child.kill(ending)
    assert terminal.end() in codes
    assert b"Traceback" not in terminal.received and b"Unhandled" not in terminal.received


def test_ctrl_c_at_an_empty_prompt_says_how_to_leave(terminal):
    terminal.screen.reset()
    terminal.type("\x03")
    terminal.see("chat: Ctrl-D or /quit leaves")
    terminal.ready()


# ---- sessions on disk


def test_session_is_kept_and_goes_on_in_another_process_without_a_prefill(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "--system", "S")
    terminal.say("hi")
    held = sum(map(int, SUMMARY.search("".join(terminal.say("and?"))).groups()[:3]))
    assert terminal.say("/save it")[1].startswith("chat: kept, ")
    assert "did you mean it?" in terminal.say("/load its")[1]
    assert "is made of letters" in " ".join(terminal.say("/save ../it"))
    assert "is kept by itself" in terminal.say("/save last")[1]
    terminal.say("third")
    terminal.child.kill(signal.SIGKILL)
    folder = tmp_path / "kv-chat" / "sessions"
    assert stat.S_IMODE((folder / "it.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    terminal = Terminal(tmp_path, "--model", successor, "--load", "last")
    assert terminal.say("/history")[-2:] == ["> third", ANSWER]
    terminal.say("/load it")
    assert terminal.say("/system")[1] == "S"
    assert reused(terminal.say("third")) == held
    assert [line.split()[-1] for line in terminal.say("/sessions")[1:]] == ["it", "last"]
    assert terminal.say("/delete it")[1] == "chat: it is deleted"
    assert "no session it;" in terminal.say("/load it")[1]
    (folder / "last.safetensors").write_bytes(b"not one")
    assert "damaged" in "".join(terminal.say("/load last"))
    assert terminal.say("/history")[-2:] == ["> third", ANSWER]


def test_session_of_another_model_names_the_part_and_goes_on_from_its_text(successor, tiny_gqa, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor)
    terminal.say("hi")
    terminal.say("/save it")
    terminal.say(f"/model {tiny_gqa}")
    terminal.say("/clear")
    for answer, said in (("n", ["> /history"]), ("y", ["> /history", "> hi", ANSWER])):
        terminal.screen.reset()
        terminal.type("/load it\r")
        terminal.see("compute it from its text? [y/N]")
        assert "(weights)" in " ".join(terminal.screen.shown)
        terminal.type(f"{answer}\r")
        terminal.until(lambda: terminal.screen.shown[terminal.screen.cursor.y] == ">")
        assert terminal.say("/history") == said
    terminal.say("/set max-tokens 2")
    assert reused(terminal.say("more")) == 0


def test_branches_share_their_past_in_pages_and_nowhere_else(successor, terminal, tmp_path):
    assert "paged" in " ".join(terminal.say("/fork")) or "pages" in terminal.screen.shown[1]
    terminal = Terminal(tmp_path, "--model", successor, "--cache", "paged", "--stats", "summary")
    terminal.say("hi")
    terminal.say("more of it")
    assert terminal.say("/fork other")[1].startswith("chat: this is branch other; /switch main")
    assert reused(terminal.say("one")) > 40
    assert "there is a branch main" in terminal.say("/fork main")[1]
    terminal.see("branch other")
    assert "■" in "".join(terminal.say("/cache")) and "▣" in "".join(terminal.screen.shown)
    assert terminal.say("/switch main")[1] == "chat: this is branch main, 2 turns"
    assert reused(terminal.say("two")) > 40
    assert [line.split()[:4] for line in terminal.say("/branches")[1:]] == [
        ["*", "main", "3", "turns,"],
        ["other", "3", "turns,", terminal.screen.shown[2].split()[3]],
    ]
    assert terminal.say("/switch nowhere")[1] == "chat: no branch nowhere; there are main, other"
    terminal.say("/save both")
    terminal = Terminal(tmp_path, "--model", successor, "--cache", "paged", "--load", "both")
    terminal.say("/switch other")
    assert terminal.say("/history")[-2:] == ["> one", ANSWER]
    assert reused(terminal.say("three")) > 60  # all but the last turn is main's too


# ---- what is refused, taken back and kept


def test_what_cannot_be_a_path_is_a_note(talk, successor, tmp_path, monkeypatch):
    here = talk(successor)
    names = ("~nosuchuser/x", "n" * 300, "a\0b", f"{tmp_path}/loop/x")
    (tmp_path / "loop").symlink_to("loop")
    for line in (f"/{command} {name}" for command in ("file", "export") for name in names):
        said = here.say(line)
        assert said.startswith("chat: ") and said.count("\n") == 1 and "[Errno" not in said, line
    monkeypatch.setenv("EDITOR", "vi 'x")
    monkeypatch.delenv("VISUAL", raising=False)
    assert here.say("/edit") == "chat: vi 'x: No closing quotation\n"
    sessions = tmp_path / "kv-chat" / "sessions"
    sessions.mkdir(parents=True)
    (sessions / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(sessions / "pipe.safetensors")
    for command in ("load", "delete"):
        assert "symbolic links" in here.say(f"/{command} loop")
        assert here.say(f"/{command} pipe") == "chat: no session pipe; /sessions lists them\n"
    assert here.say("/sessions") == "chat: no session is kept yet\n"


def test_cache_is_drawn_in_a_window_of_one_column(talk, successor, monkeypatch):
    here = talk(successor, "--cache", "paged")
    here.say("hi")
    monkeypatch.setattr(explain, "columns_of", lambda stream: 1)
    assert "\n■\n■\nand 30 free pages" in here.say("/cache")


GOOD = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "stop": "length"}]


def kept_as(messages, **other) -> str:
    return json.dumps({"system": None, "raw": False, "name": "a", "branches": {"a": {"messages": messages}}} | other)


@pytest.mark.parametrize(
    "about",
    [
        "[" * 100_000,
        "[]",
        "5",
        json.dumps({name: value for name, value in json.loads(kept_as(GOOD)).items() if name != "system"}),
        kept_as(GOOD, system=5),
        kept_as(GOOD, name="b"),
        kept_as(GOOD, name=[]),
        kept_as(GOOD, branches=[]),
        kept_as(5),
        kept_as("ab"),
        kept_as(GOOD[:1]),
        kept_as(GOOD[::-1]),
        kept_as([GOOD[0], {"role": "assistant"}]),
        kept_as([GOOD[0], {"role": "assistant", "content": 5}]),
        kept_as([GOOD[0], {**GOOD[1], "stop": 5}]),
        kept_as([GOOD[0], []]),
    ],
)
def test_session_that_holds_no_conversation_is_refused_and_nothing_changes(empty, about):
    with pytest.raises(ChatError, match="no conversation of this terminal"):
        empty.conversation.take(about)
    assert empty.say("/history") == "" and empty.conversation.name == "main"


@pytest.fixture(scope="module")
def _session(successor):
    return chat.open_session(chat.arguments(["--model", str(successor), "--cache", "paged"]))


@pytest.fixture
def empty(talk, successor, _session, monkeypatch):
    monkeypatch.setattr(chat, "open_session", lambda args: _session)
    return talk(successor)


def test_names_of_branches_are_shown_and_not_obeyed(empty):
    empty.conversation.take(kept_as(GOOD, name="\x1b[2J", branches={"\x1b[2J": {"messages": GOOD}}))
    assert r"* \x1b[2J" in empty.say("/branches")


def test_what_came_of_an_answer_is_kept_whatever_ends_it(talk, successor):
    here = talk(successor)
    here.break_off(KeyboardInterrupt(), OSError(5, "gone"))
    here.say("hi")
    assert here.say("/history") == "> hi\nHé\n"
    with pytest.raises(OSError):
        here.say("/continue")
    assert here.say("/history") == "> hi\nHélo,\n"
    here.say("/continue")
    assert here.say("/history") == f"> hi\n{ANSWER}\n"


def test_file_waits_until_it_was_said_and_can_be_taken_away(talk, successor, tmp_path):
    (tmp_path / "notes").write_text("of mine")
    (tmp_path / "long").write_text("x" * 600)
    here = talk(successor)
    here.say("hi")
    here.say(f"/file {tmp_path}/notes")
    here.conversation.output.after_pass = lambda session: session.interrupt()
    here.say("what?")
    assert len(here.conversation.messages) == 2  # Ctrl-C came before the answer began
    del here.conversation.output.after_pass
    here.say("what?")
    assert here.conversation.messages[-2]["content"] == "of mine\n\nwhat?"
    here.say(f"/file {tmp_path}/long")
    assert "/undo and /clear make room" in here.say("and?")
    assert "the file is taken away" in here.say("/undo")
    assert ANSWER in here.say("and?")
    assert len(here.conversation.messages) == 6


def test_last_is_what_was_said_last_and_what_was_taken_back_or_deleted_is_gone(talk, successor, tmp_path):
    last = tmp_path / "kv-chat" / "sessions" / "last.safetensors"

    def leave(here):
        here.repl._keep_last(leaving=True)
        return last.exists()

    here = talk(successor)
    here.say("hi")
    assert leave(talk(successor))  # a chat in which nothing was said takes nothing away
    here.say("/delete last")
    here.say("/system X")
    assert not leave(here)
    here.say("more")
    assert leave(here)
    for line in ("/undo 2", "/clear"):
        here = talk(successor)
        here.say("hi")
        here.say("/load last")
        here.say("/edit-last other")
        here.say(line)
        here.say("/undo")
        assert not leave(here)
        here.say("hi")


def test_trouble_with_keeping_is_said_once(talk, successor, tmp_path):
    here = talk(successor)
    (tmp_path / "kv-chat").write_text("no folder")
    assert "cannot be kept for --load last" in here.say("hi")
    assert "cannot be kept" not in here.say("and?")


def test_system_message_of_the_command_line_wins_over_the_sessions(talk, successor, monkeypatch):
    here = talk(successor, "--system", "old")
    here.say("hi")
    here.say("/save it")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    for options, system in (([], "old"), (["--system", "new"], "new")):
        here = talk(successor, *options)
        here.repl.run(load="it")
        assert here.conversation.system == system


def test_branches_that_go_free_their_pages(talk, successor):
    here = talk(successor, "--cache", "paged", "-c", 128)
    pool = here.conversation.session.cache.pool
    here.say("hi")
    here.say("/fork other")
    here.say("two")
    here.say("/save two")
    assert here.say("/drop other") == here.say("/drop nowhere").replace("nowhere", "other")
    for _ in range(4):
        assert "2 turns" in here.say("/load two")
        assert "/undo, /drop and /clear" in here.say("x" * 200)
    assert here.say("/drop main") == "chat: branch main is dropped\n"
    here.conversation.session.cache.truncate(0)
    assert pool.free == len(pool.references)


def test_room_that_is_left_and_cut_answers_are_those_of_the_conversation_as_it_stands(talk, endless):
    here = talk(endless, "-n", 4, "-c", 128)
    counts = [here.conversation.left]
    for line in ("one", "two"):
        here.say(line)
        counts.append(here.conversation.left)
    here.say("/save it")
    here.say("/undo")
    assert here.conversation.left == counts[1]
    assert here.say("/continue") == "abab\n"
    assert here.conversation.messages[-1]["content"] == "abababab"
    here.say("/clear")
    assert here.conversation.left == counts[0]
    assert f"2 turns, {128 - counts[2] - 1} tokens in the cache" in here.say("/load it").replace("\n", " ")
    assert here.conversation.left == counts[2]


# ---- reading


def test_readme_lists_the_commands_as_the_table_does():
    readme = (Path(repl.__file__).parent / "README.md").read_text()
    rows = [(f"{name} {each.arguments}".strip().replace("|", r"\|"), each.help) for name, each in repl.COMMANDS.items()]
    assert "\n".join(f"| `/{usage}` | {text} |" for usage, text in rows) in readme


def test_markdown_is_rendered_when_the_answer_is_finished(tmp_path):
    folder = successor_folder(tmp_path / "model", says("# T\x1b[2J*`x") | {})
    terminal = Terminal(tmp_path, "--model", folder, "--markdown", "--stats", "live")
    lines = terminal.say("hi")
    assert any("T" in line and "#" not in line for line in lines[1:])
    assert b"\x1b[2J" not in terminal.received.partition(b"> ")[2] or r"\x1b[2J" in "".join(lines)


def test_control_codes_are_shown_by_every_command_and_not_obeyed(tmp_path):
    folder = successor_folder(tmp_path / "model", says("\x1b[2J\x07 \x9b1m"))
    terminal = Terminal(tmp_path, "--model", folder, "--stats", "off")
    shown = r"\x1b[2J\x07 \x9b1m"
    assert terminal.say("hi")[1] == shown
    assert terminal.say("/history")[2] == shown
    assert r'"\x1b" 218  "["' in "".join(terminal.say("/tokens"))


def test_bytes_that_are_no_text_are_answered_kept_and_shown(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "--stats", "off")
    terminal.screen.reset()
    terminal.child.send(b"caf\xe9 \xff\r")
    terminal.see(ANSWER)
    terminal.ready()
    assert terminal.say("/history")[2] == ANSWER
    terminal.say("/save it")
    terminal.say("/load it")
    assert terminal.say("and?")[1] == ANSWER


def test_empty_lines_say_nothing_and_no_colour_is_no_colour(successor, tmp_path):
    command = f"NO_COLOR=1 exec {sys.executable} {CHAT} --model {successor} --stats summary"
    terminal = Terminal(tmp_path, command=command)
    assert terminal.say("") == [">"]
    assert terminal.say("   ") == [">"]
    assert terminal.say("hi")[1] == ANSWER
    terminal.say("/tokens")
    assert not re.search(rb"\x1b\[(?:\d+;)*[349]\d(?:;\d+)*m", terminal.received)


def test_wide_text_and_a_window_that_changes(tmp_path):
    text = "漢字🙂"
    folder = successor_folder(tmp_path / "model", says("x"))
    for columns in (200, 24):
        terminal = Terminal(tmp_path, "--model", folder, "--stats", "live", columns=columns, rows=24)
        message = text * 40
        terminal.type(message + "\r")
        terminal.see("| eos |") if columns == 200 else terminal.see("eos")
        terminal.ready()
        terminal.child.setwinsize(24, 60)
        terminal.screen.resize(24, 60)
        assert "x" in terminal.say("hi")
        assert message in "".join(terminal.say("/history")[1:])


@pytest.mark.parametrize("option, out", [("--stats off", ANSWER), ("--json", "{")])
def test_pipe_that_closes_early_ends_quietly(successor, option, out):
    command = f"{sys.executable} {CHAT} --model {successor} {option} -p hi </dev/null"
    line = f"{command} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(out)


def test_pipe_is_answered_and_the_terminal_goes_on(successor, tmp_path):
    piped = f"echo notes | {sys.executable} {CHAT} --model {successor} --stats off -p sum --interactive"
    terminal = Terminal(tmp_path, command=piped)
    assert terminal.say("/history")[1:] == ["> notes", "", "sum", ANSWER]


def test_long_prompt_shows_its_progress_and_ctrl_c_ends_it_within_a_pass(default_model, tmp_path):
    (tmp_path / "long.txt").write_text("One word after another. " * 500)
    terminal = Terminal(tmp_path, "--model", default_model, "--stats", "live")
    terminal.say(f"/file {tmp_path}/long.txt")
    terminal.type("Summarise:\r")
    progress = re.compile(r"\[prompt \d+/\d{4} tokens \| \d+ tok/s \| \d+ s left\]")
    terminal.until(lambda: progress.search("".join(terminal.screen.shown)))
    start = time.monotonic()
    terminal.type("\x03")
    terminal.see("| interrupt |")
    terminal.ready()
    assert time.monotonic() - start < 5  # a pass is under a second on a machine that is not busy
    assert not any(line.startswith("[prompt") and "left]" in line for line in terminal.screen.shown)
    assert terminal.say("/history") == ["> /history"]  # nothing was answered
