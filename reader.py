"""How a message is typed: keys, several lines, pastes, history, completion, and an editor of one's own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from select import select
from threading import Thread

from conversation import state_folder, told
from show import CONTROL, ENDINGS, ChatError, is_foreign, note, reason, terminal_mode

QUOTES = '"""'
KEYS = {
    "Alt+Enter": "a new line in the message",
    f"{QUOTES} … {QUOTES}": "a message of several lines",
    "//": "begins a message with a slash",
    "Ctrl-R, Up": "search and recall what was typed",
    "Tab": "complete a command, a name or a path",
    "Ctrl-C, Ctrl-D": "end the answer, leave",
}


def unquoted(text: str) -> str:
    """What a typed text says, without the quotes around several lines or the slash that guards another."""
    if text.startswith(QUOTES):
        return text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")
    return text[1:] if text.startswith("//") else text


def quoted(text: str) -> str:
    """What to type so that it says ``text``, whatever that begins with."""
    if text.startswith(QUOTES):
        return f"{QUOTES}\n{text}\n{QUOTES}"
    return f"/{text}" if text.startswith("/") else text


def unfinished(text: str) -> bool:
    """Whether quotes are open."""
    text = text.rstrip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def ask(prompt: str) -> str:
    """A line that is typed behind ``prompt``, which stands where the person sees it. Raises EOFError and
    KeyboardInterrupt."""
    seen = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(prompt, end="", file=seen, flush=True)
    try:
        return input()
    except KeyboardInterrupt:
        print(file=seen)
        raise


class LineReader:
    """Reads lines where the terminal can do no more."""

    talking = answering = nullcontext

    def read(self, text: str = "") -> str:
        """What is typed, a message or a command, in place of ``text``. Raises EOFError and KeyboardInterrupt."""
        if text:
            print(text.translate(CONTROL))
        lines = [ask("> ")]
        while unfinished("\n".join(lines)):
            lines.append(ask("... "))
        return "\n".join(lines)

    def dropped(self) -> str:
        """What stood in the line when Ctrl-C dropped it."""
        return ""


class KeyReader:
    """Reads with editing, history, completion and a toolbar.

    ``commands`` has for each command its help, and what lists its arguments, None where that is a path.
    """

    def __init__(
        self,
        commands: dict[str, tuple[str, Callable[[], Iterable[str]] | None]],
        toolbar: Callable[[], str],
        vi_mode: bool,
    ):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.cursor_shapes import ModalCursorShapeConfig
        from prompt_toolkit.filters import Condition

        self._session = PromptSession(
            "> ",
            history=message_history(),
            key_bindings=self._bindings(),
            completer=completer(commands),
            complete_while_typing=Condition(lambda: self.dropped().startswith("/")),
            bottom_toolbar=toolbar,
            vi_mode=vi_mode,
            cursor=ModalCursorShapeConfig() if vi_mode else None,
        )

    def read(self, text: str = "") -> str:
        """What is typed, a message or a command; the line begins as what says ``text``. Raises EOFError and
        KeyboardInterrupt."""
        with self._orderly_endings():
            return self._session.prompt(default=quoted(text))

    def talking(self):
        """Where Ctrl-C would end torchrun, and the chat with it, it is a key as others are. A context manager."""
        return terminal_mode(off=("ISIG",)) if is_foreign(sys.stdin.fileno()) else nullcontext()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Meanwhile, what is typed and pasted waits for the prompt, pastes marked as such.

        It is read as it comes: a terminal that nobody reads from hears no Ctrl-C behind a long paste, and one that
        waits for whole lines drops what is beyond 4 kB of one. Nor may Ctrl-C drop what was not read yet, the mark at
        a paste's end with it.
        """
        with terminal_mode(off=("ECHO", "ICANON"), on=("NOFLSH",)) as there:
            if not there:
                yield
                return
            stop, stopping = os.pipe()
            reading = Thread(target=self._read_ahead, args=(stop,), daemon=True)
            reading.start()
            print("\x1b[?2004h", end="", flush=True)
            try:
                yield
            finally:
                os.close(stopping)
                reading.join()
                os.close(stop)
                print("\x1b[?2004l", end="", flush=True)

    def _read_ahead(self, stop: int) -> None:
        from prompt_toolkit.input.typeahead import store_typeahead
        from prompt_toolkit.keys import Keys

        keys = self._session.input
        while not keys.closed and select([keys, stop], [], [])[0] == [keys]:
            typed = keys.read_keys()
            if any(press.key == Keys.ControlC for press in typed):  # where it is no signal; see ``talking``
                os.kill(os.getpid(), signal.SIGINT)
            store_typeahead(keys, [press for press in typed if press.key != Keys.ControlC])

    def dropped(self) -> str:
        """What stands in the line, or stood there when Ctrl-C dropped it."""
        return self._session.default_buffer.text

    @contextmanager
    def _orderly_endings(self) -> Iterator[None]:
        """A signal that ends the program ends the prompt first, which puts the terminal right: an exception from inside
        its event loop would end as a traceback. Then the first one does what else it does."""
        app, heard = self._session.app, []

        def end() -> None:
            if app.future and not app.future.done():
                app.exit(exception=EOFError)

        def leave(signum, frame):
            heard.append(signum)
            if app.loop is None:
                raise EOFError
            app.loop.call_soon_threadsafe(end)

        before = {signum: signal.signal(signum, leave) for signum in ENDINGS if callable(signal.getsignal(signum))}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            for signum in heard[:1]:
                signal.raise_signal(signum)

    def _bindings(self):
        from prompt_toolkit.document import Document
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        @bindings.add("enter", filter=Condition(lambda: unfinished(self.dropped())))
        def _(event):
            event.current_buffer.insert_text("\n")

        @bindings.add(Keys.BracketedPaste)
        def _(event):
            # What begins a line is quoted, so that it is a message, also when the line comes back from the history.
            buffer, text = event.current_buffer, event.data.replace("\r\n", "\n").replace("\r", "\n")
            behind = buffer.document.text_after_cursor
            if buffer.document.text_before_cursor:
                buffer.insert_text(text)
            else:
                line = quoted(text + behind)
                buffer.document = Document(line, line.rindex(text + behind) + len(text))

        return bindings


def message_history():
    """What was typed, from one run to the next, in a file of the person's own; where there can be none, a note."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk is no reason to stop talking
                super().store_string(string.encode("utf-8", "replace").decode())

    try:
        return History(private_file(state_folder() / "history"))
    except (OSError, ChatError) as error:
        note(f"messages are not kept from one run to the next: {reason(error)}")
        return InMemoryHistory()


def completer(commands: dict[str, tuple[str, Callable[[], Iterable[str]] | None]]):
    """Completes commands, their arguments and paths."""
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document, event):
            text = document.text_before_cursor
            name, space, argument = text[1:].partition(" ")
            if not text.startswith("/") or "\n" in text:
                return
            if not space:
                fitting = ((known, help) for known, (help, _) in commands.items() if known.startswith(name))
                yield from (Completion(known, -len(name), display_meta=help) for known, help in fitting)
            elif name in commands:
                words = commands[name][1]
                if words is None:
                    yield from paths.get_completions(Document(argument), event)
                else:
                    yield from (Completion(word, -len(argument)) for word in words() if word.startswith(argument))

    return Commands()


def from_editor(text: str) -> str:
    """What a person makes of ``text`` in their editor. Raises ChatError when that cannot be run or fails."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with told(editor), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "message.md"
        path.write_text(text, "utf-8", "replace")
        if subprocess.call([*shlex.split(editor), str(path)]):
            raise ChatError(f"{editor} failed, and nothing was said")
        return path.read_text("utf-8", "replace").rstrip("\n")


def private_file(path: Path) -> Path:
    """The path of a file, made if need be, that nobody else may read from its first instant. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return path
