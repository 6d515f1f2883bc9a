"""A terminal for the tests: chat.py in a pseudo-terminal, what it shows and what a person types."""

import os
import re
import sys
import time
from pathlib import Path

import pexpect
import pyte
from pyte.screens import wcwidth

import chat

CHAT = Path(chat.__file__)
PATIENCE = 60  # seconds; of a machine that is busy, and nothing is waited for once it is there
ANSWER = "Hélo, wrd!"  # of the folder `successor`
STEPS = len(ANSWER.encode())
SUMMARY = re.compile(
    r"\[prompt (\d+) new at \d+ tok/s \+ (\d+) reused \| answer (\d+) at [\d.]+ tok/s, [\d.]+ GB/s \| "
    r"cache (\w+) (\d+)/(\d+) tokens, [\d.]+ of [\d.]+ \w+ \| (\w+) \| seed (\d+)\]"
)


def environment(**extra) -> dict[str, str]:
    """This one, but for what changes how chat.py prints."""
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "PYTHONUNBUFFERED")}
    return {**known, "TERM": "xterm-256color", **extra}


class Xterm(pyte.Screen):
    """pyte, with what xterm does at the right edge: a character that does not fit wraps, and a movement or an erasure
    there forgets the wrap that is due and counts from the last column; a tab does not."""

    def draw(self, data: str) -> None:
        for character in data:
            if wcwidth(character) == 2 and self.cursor.x == self.columns - 1:
                self.cursor.x = self.columns
            super().draw(character)

    def _forget_wrap(self) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)

    def erase_in_display(self, *args, **options) -> None:
        self._forget_wrap()
        super().erase_in_display(*args, **options)

    def erase_in_line(self, *args, **options) -> None:
        self._forget_wrap()
        super().erase_in_line(*args, **options)

    def tab(self) -> None:
        if self.cursor.x < self.columns:
            super().tab()

    def cursor_up(self, *args) -> None:
        self._forget_wrap()
        super().cursor_up(*args)

    def save_cursor(self) -> None:
        self._forget_wrap()
        super().save_cursor()

    def select_graphic_rendition(self, *attributes: int, **options) -> None:
        """pyte knows no dim text: it becomes grey."""
        super().select_graphic_rendition(*(90 if each == 2 else each for each in attributes), **options)

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.display]


class Terminal:
    """chat.py in a terminal, or a shell's command line: what a person sees and types."""

    def __init__(
        self,
        state: Path,
        *argv,
        columns: int = 160,
        rows: int = 50,
        term: str = "xterm-256color",
        command: str = "",
        start: float = PATIENCE,  # seconds that it may take
    ):
        self.screen = Xterm(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.screen.write_process_input = self.type  # the terminal answers where its cursor is
        self.received = b""
        self.child = pexpect.spawn(
            "bash" if command else sys.executable,
            ["-c", command] if command else [str(CHAT), *map(str, argv)],
            dimensions=(rows, columns),
            env=environment(TERM=term, XDG_STATE_HOME=str(state), PYTHONIOENCODING="utf-8"),
        )
        self.child.delaybeforesend = None
        self.ready(start)

    def type(self, keys: str) -> None:
        self.child.send(keys)

    def until(self, holds, timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < end, "\n".join(self.screen.shown)
            try:
                data = self.child.read_nonblocking(4096, 0.05)
                self.received += data
                self.stream.feed(data)
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                assert holds(), "\n".join(self.screen.shown)

    def see(self, text: str) -> None:
        self.until(lambda: text in "\n".join(self.screen.shown))

    def ready(self, timeout: float = PATIENCE) -> None:
        """Wait for an empty prompt."""
        self.until(lambda: self.screen.shown[self.screen.cursor.y] == ">" and self.screen.cursor.x == 2, timeout)

    def say(self, text: str) -> list[str]:
        """Clear the screen, type ``text`` and Enter, and return the lines that come, up to the next prompt."""
        self.screen.reset()
        self.type(f"{text}\r")
        self.until(lambda: self.screen.cursor.y and self.screen.shown[self.screen.cursor.y] == ">")
        return self.screen.shown[: self.screen.cursor.y]

    def end(self) -> int:
        """Wait until chat.py has left by itself; its exit code."""
        self.child.expect(pexpect.EOF, timeout=PATIENCE)
        self.received += self.child.before
        self.child.close()
        return self.child.exitstatus
