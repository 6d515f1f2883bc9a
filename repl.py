"""The conversation at a terminal: the prompt, the toolbar and every command.

One table, ``COMMANDS``, says what each command is called, takes, does and offers to complete; /help, completion and the
README's list come from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from conversation import LAST, ON_FULL, OPTIONS, Conversation, nearest, saved_sessions, session_file, told
from explain import cache_report, tokens_report
from reader import KEYS, KeyReader, LineReader, ask, from_editor, unquoted
from show import CONTROL, MODES, ChatError, escapes_work, filled, note, of, short, stats_for, user_errors


@dataclass(frozen=True)
class Command:
    """``words`` are the arguments to complete, None those that are a path."""

    arguments: str
    help: str
    run: Callable[[Repl, str], None]
    words: Callable[[Repl], Iterable[str]] | None = lambda repl: ()


class Repl:
    """Reads messages and commands until Ctrl-D. ``open_model`` loads another model and returns a Session over it."""

    def __init__(self, conversation: Conversation, open_model: Callable[[str], object], vi_mode: bool = False):
        self.conversation, self.open_model = conversation, open_model
        self.over = self.warned = False
        self.trouble = ""  # why the conversation could not be kept
        self.attached: list[str] = []  # texts of files for the next message
        self.reader = (
            KeyReader(self._completions(), self.toolbar, vi_mode) if escapes_work(sys.stdout) else LineReader()
        )

    def _completions(self) -> dict:
        return {name: (each.help, each.words and partial(each.words, self)) for name, each in COMMANDS.items()}

    def run(self, load: str | None = None, text: str | None = None) -> None:
        """Go on with the session ``load``, answer ``text``, and then read and answer until /quit or Ctrl-D. However
        that ends, the conversation is kept as the last one. Raises one of ``user_errors`` when ``load`` cannot be."""
        self._greet()
        if load:
            system = self.conversation.system
            self.load(load)
            self.conversation.system = system or self.conversation.system
        try:
            with self.reader.talking():
                if text is not None:
                    self._try(lambda: self._say(text))
                while not self.over:
                    self._try(lambda: self._take(self.reader.read()))
        finally:
            self._keep_last(leaving=True)

    def _try(self, action: Callable[[], None]) -> None:
        """Do it, and say what goes wrong in one line."""
        try:
            action()
        except KeyboardInterrupt:
            if not self.reader.dropped():
                note("Ctrl-D or /quit leaves")
        except EOFError:
            self.over = True
        except user_errors() as error:
            note(str(error))

    def _greet(self) -> None:
        cache, model = self.conversation.session.cache, self.conversation.session.model
        here = " on this rank" if model.world > 1 else ""
        note(
            f"{model.name}, {str(model.dtype).removeprefix('torch.')} on {model.where}; context {cache.capacity} "
            f"tokens, {cache.bytes_per_token:,} bytes of cache a token{here}; /help lists the commands"
        )

    def _take(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//") and "\n" not in text:
            name, _, argument = text[1:].strip().partition(" ")
            if name not in COMMANDS:
                raise ChatError(f"{unknown(name)}; /help lists them")
            COMMANDS[name].run(self, argument.strip())
        else:
            self._say(unquoted(text))

    def _say(self, text: str) -> None:
        said = self.conversation.messages
        if text.strip():
            try:
                self._answer(self.conversation.say, "\n\n".join([*self.attached, text]))
            finally:
                if self.conversation.messages is not said:
                    self.attached = []

    def _answer(self, how: Callable, *arguments) -> None:
        from cache import CacheFull

        with self.reader.answering():
            try:
                how(*arguments)
            except CacheFull as error:
                stops = self.conversation.on_full == "stop"
                raise ChatError(f"{error}; {self._choices()}" if stops else str(error)) from None
            self._warn()
            self._keep_last()

    def _choices(self) -> str:
        """What makes room in a full context."""
        drop = ", /drop" * (len(self.conversation.branches) > 1)
        return f"/undo{drop} and /clear make room, /set on-full drop forgets the oldest turns"

    def _warn(self) -> None:
        """Say it once, when the context is nearly full."""
        conversation, warned = self.conversation, self.warned
        left, capacity = conversation.left, conversation.session.cache.capacity
        self.warned = left <= capacity // 10
        if self.warned and not warned:
            then = "the oldest turns will be dropped" if conversation.on_full == "drop" else self._choices()
            note(f"the context is {'nearly ' if left else ''}full, {left} of {capacity} tokens are left; {then}")

    def _keep_last(self, leaving: bool = False) -> None:
        try:
            self.conversation.keep_last(leaving)
        except user_errors() as error:
            if str(error) != self.trouble:  # and not after each turn
                note(f"this chat cannot be kept for --load {LAST}: {error}")
            self.trouble = str(error)

    def toolbar(self) -> str:
        """What the line at the bottom says, the most wanted first."""
        session = self.conversation.session
        cache, model, turn = session.cache, session.model, session.last
        left = self.conversation.left
        used, then = cache.longest - left, f"{left} left"
        size = min(cache.bytes_used, cache.bytes_at(used))  # what /undo takes back is cut with the next message
        if cache.longest > cache.capacity:
            used, then, size = cache.held, f"{cache.forgotten} in the middle forgotten", cache.bytes_used
        facts = [
            "NEARLY FULL" if left <= cache.capacity // 10 else "",
            f"{used}/{cache.capacity} tokens, {then}",
            of(size, cache.bytes_reserved),
            f"{turn.decode_tok_s:.1f} tok/s" if turn else "",
            f"branch {self.conversation.name}" if len(self.conversation.branches) > 1 else "",
            f"{model.name}, {str(model.dtype).removeprefix('torch.')} on {model.where}",
        ]
        return " " + " │ ".join(filter(None, facts)).translate(CONTROL)

    # ---- commands: writing

    def edit(self, argument: str) -> None:
        self._say(from_editor(argument))

    def edit_last(self, argument: str) -> None:
        try:
            text = unquoted(argument or self.reader.read(self.conversation.last_message()))
        except EOFError:  # of a line that was emptied: it leaves the editing, and not the chat
            return
        if text.strip():
            self._answer(self.conversation.edit, text)

    def file(self, argument: str) -> None:
        with told(argument):
            path = Path(argument).expanduser()
            if not path.is_file():
                raise ChatError(f"{path}: no such file" if argument else "/file takes a path")
            text = path.read_bytes().decode("utf-8", "replace").rstrip("\n")
        self.attached.append(text)
        count = len(self.conversation.session.tokenizer.encode(text))
        note(f"{path.name}, {count} tokens, goes before your next message; /undo takes it away")

    # ---- commands: the conversation

    def clear(self, argument: str) -> None:
        self.conversation.clear()
        self.attached = []
        note("the conversation is empty; a system message stays")

    def system(self, argument: str) -> None:
        conversation = self.conversation
        if not argument:
            print((conversation.system or "(no system message)").translate(CONTROL))
        elif conversation.raw:
            raise ChatError("a system message needs the chat template that --raw leaves out")
        else:
            conversation.system = None if argument == "none" else argument
            conversation.here.tokens = None
            note("the system message is changed; the next turn computes the whole conversation again")

    def retry(self, argument: str) -> None:
        sampling = self.conversation.sampling
        self.conversation.last_message()
        if sampling.temperature == 0 or sampling.seed is not None:
            note("at temperature 0 or with a seed, the answer is the same again; /set changes that")
        self._answer(self.conversation.retry)

    def undo(self, argument: str) -> None:
        if self.attached and not argument:
            self.attached.pop()
            note("the file is taken away, and the conversation is as it was")
            return
        self.conversation.undo(whole(argument or "1"))
        note(f"{turns(self.conversation.messages)} left")

    def go_on(self, argument: str) -> None:
        self._answer(self.conversation.go_on)

    def history(self, argument: str) -> None:
        for message in self.conversation.messages:
            mark = "> " if message["role"] == "user" else ""
            print(f"{mark}{message['content']}".translate(CONTROL))

    # ---- commands: looking

    def help(self, argument: str) -> None:
        name = argument.removeprefix("/")
        if name and name not in COMMANDS:
            raise ChatError(unknown(name))
        for each in [name] if name else COMMANDS:
            say(f"/{each + ' ' + COMMANDS[each].arguments:<30} {COMMANDS[each].help}")
        if name == "set":
            self.show("")
        for key, does in KEYS.items() if not name else ():
            say(f"{key:<31} {does}")

    def set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        name, value, conversation = name.replace("_", "-"), value.strip(), self.conversation
        if name == "on-full" and value in ON_FULL:
            conversation.on_full = value
        elif name in OPTIONS and value:
            conversation.set(name, value)
        else:
            raise ChatError(f"/set takes {', '.join(OPTIONS)} and a value or 'default', or on-full {'|'.join(ON_FULL)}")

    def show(self, argument: str) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self.conversation.sampling, option.field)
            say(f"{name:<15} {'-' if value in (None, ()) else value!s:<10} {option.help}")
        say(f"{'on-full':<15} {self.conversation.on_full:<10} when the context is full: stop, or drop the oldest")

    def set_stats(self, argument: str) -> None:
        if argument not in MODES:
            raise ChatError(f"/stats takes one of {', '.join(MODES)}")
        self.conversation.output.mode = stats_for(argument)

    def tokens(self, argument: str) -> None:
        self.conversation.last_message()
        for label, ids in zip(("message", "answer"), self.conversation.last_turn(), strict=True):
            print(f"{label}, {len(ids)} tokens:")
            print(tokens_report(self.conversation.session.tokenizer, ids))

    def cache(self, argument: str) -> None:
        conversation = self.conversation
        by_turn, whole = conversation.by_turn(), conversation.length()
        for line in cache_report(conversation.session, by_turn, whole, conversation.reused, conversation.saved_s):
            say(line)

    # ---- commands: files

    def export(self, argument: str) -> None:
        if not argument:
            raise ChatError("/export takes the path of a file")
        system = self.conversation.system
        parts = [f"*System: {system}*"] if system else []
        for message in self.conversation.messages:
            parts.append(f"## {'You' if message['role'] == 'user' else 'Model'}\n\n{message['content']}")
        with told(argument):
            path = Path(argument).expanduser()
            with open(path, "x", encoding="utf-8", errors="replace") as file:
                file.write("\n\n".join(parts) + "\n")
        note(f"written to {path}")

    def save(self, argument: str) -> None:
        if argument == LAST:
            raise ChatError(f"{LAST!r} is kept by itself; give another name")
        path = self.conversation.save(argument)
        note(f"kept, {short(path.stat().st_size)}; /load {argument} or --load {argument} goes on from there")

    def load(self, argument: str) -> None:
        from generate import SessionMismatch

        held = "computed again with the next message"
        try:
            self.conversation.load(argument)
            held = f"{self.conversation.session.cache.held} tokens in the cache"
        except SessionMismatch as error:
            why = f"is of another model or cache ({error.part})" if error.part else f"is not whole ({error})"
            if not agreed(f"chat: {argument} {why}; compute it from its text?"):
                raise ChatError(f"{argument} is left as it is, and so is this conversation") from None
            self.conversation.take(error.about)
        note(f"{argument}: {turns(self.conversation.messages)}, {held}; /history shows them")

    def sessions(self, argument: str) -> None:
        names = saved_sessions()
        for name in names:
            with suppress(OSError, ChatError):
                facts = session_file(name).stat()
                say(f"{datetime.fromtimestamp(facts.st_mtime):%Y-%m-%d %H:%M} {short(facts.st_size):>10}  {name}")
        if not names:
            note("no session is kept yet")

    def delete(self, argument: str) -> None:
        self.conversation.delete(argument)
        note(f"{argument} is deleted")

    def model(self, argument: str) -> None:
        if not argument:
            raise ChatError("/model takes a folder, or a name on the Hugging Face hub")
        # The old model stays until the new one is whole, so for a while both are in memory.
        self.conversation.take_session(self.open_model(argument))
        self._greet()

    # ---- commands: branches

    def fork(self, argument: str) -> None:
        conversation, before = self.conversation, self.conversation.name
        free = (f"fork-{n}" for n in range(1, len(conversation.branches) + 2))
        conversation.fork(argument or next(name for name in free if name not in conversation.branches))
        note(f"this is branch {conversation.name}; /switch {before} goes back")

    def switch(self, argument: str) -> None:
        self.conversation.switch(argument)
        note(f"this is branch {argument}, {turns(self.conversation.messages)}")

    def list_branches(self, argument: str) -> None:
        for name, branch in self.conversation.branches.items():
            mark, tokens = "*" if name == self.conversation.name else " ", branch.session.cache.length
            say(f"{mark} {name:<20} {turns(branch.messages)}, {tokens} tokens")

    def drop(self, argument: str) -> None:
        self.conversation.drop(argument)
        note(f"branch {argument} is dropped")

    def quit(self, argument: str) -> None:
        self.over = True


def _saved(repl: Repl) -> Iterable[str]:
    return saved_sessions()


def _settings(repl: Repl) -> Iterable[str]:
    return [*(f"{name} " for name in OPTIONS), *(f"on-full {choice}" for choice in ON_FULL)]


COMMANDS = {
    "help": Command("[command]", "what there is to type", Repl.help, lambda repl: COMMANDS),
    "edit": Command("[text]", "write a message in $EDITOR", Repl.edit),
    "file": Command("PATH", "put a file's text before the next message", Repl.file, None),
    "retry": Command("", "another answer to the last message", Repl.retry),
    "edit-last": Command("[text]", "change the last message, and have it answered", Repl.edit_last),
    "continue": Command("", "go on with an answer that was cut", Repl.go_on),
    "undo": Command("[n]", "take back the last turn, or n of them", Repl.undo),
    "clear": Command("", "forget the conversation, but for the system message", Repl.clear),
    "system": Command(
        "[text]", "show the system message, or set it; none removes it", Repl.system, lambda repl: ["none"]
    ),
    "history": Command("", "the conversation so far", Repl.history),
    "set": Command("NAME VALUE", "change how answers are drawn", Repl.set, _settings),
    "show": Command("", "how answers are drawn", Repl.show),
    "stats": Command("|".join(MODES), "what is shown of cache and speed", Repl.set_stats, lambda repl: MODES),
    "cache": Command("", "what the cache holds, costs and saved", Repl.cache),
    "tokens": Command("", "the last turn's tokens: pieces and ids", Repl.tokens),
    "save": Command("NAME", "keep the conversation and its cache", Repl.save, _saved),
    "load": Command("NAME", "go on with one that was kept; last is kept by itself", Repl.load, _saved),
    "sessions": Command("", "what is kept", Repl.sessions),
    "delete": Command("NAME", "delete one that was kept", Repl.delete, _saved),
    "export": Command("FILE.md", "write the conversation as Markdown", Repl.export, None),
    "fork": Command("[name]", "go on in a branch that shares its past (--cache paged)", Repl.fork),
    "switch": Command("NAME", "go to another branch", Repl.switch, lambda repl: repl.conversation.branches),
    "branches": Command("", "the branches of this conversation", Repl.list_branches),
    "drop": Command("NAME", "forget another branch", Repl.drop, lambda repl: repl.conversation.branches),
    "model": Command("PATH", "go on with another model", Repl.model, None),
    "quit": Command("", "leave, as Ctrl-D does", Repl.quit),
}


def unknown(name: str) -> str:
    return f"no command /{name}{nearest(f'/{name}', [f'/{known}' for known in COMMANDS])}"


def turns(messages: list[dict]) -> str:
    count = len(messages) // 2
    return f"{count} turn{'s' * (count != 1)}"


def say(line: str) -> None:
    """A line to the person, with whatever it quotes."""
    print(filled(line.translate(CONTROL), sys.stdout))


def whole(text: str) -> int:
    """Raises ChatError for what is no whole number."""
    try:
        return int(text)
    except ValueError:
        raise ChatError(f"{text} is no whole number") from None


def agreed(question: str) -> bool:
    try:
        return ask(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
