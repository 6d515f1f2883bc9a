"""What is printed: the answer as it comes, what is said of cache and speed, and notes in one line.

stdout carries the answer alone, or JSON; everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class ChatError(Exception):
    """Something that the user must mend, in one line."""


def user_errors() -> tuple[type[Exception], ...]:
    """What a person can cause and mend, each with a text of one line."""
    from cache import CacheFull
    from generate import NotFinite, SessionError
    from lines import BatchError
    from model import ModelError
    from parallel import RankError
    from tokenizer import TokenizerError
    from weights.get import GetError

    return ChatError, BatchError, CacheFull, NotFinite, SessionError, ModelError, RankError, TokenizerError, GetError


# ---- output

# Control characters in a model's text could move the cursor, rename the window or worse; a terminal gets their names
# instead.
CONTROL = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def note(text: str) -> None:
    """One line to the person, never to stdout."""
    with suppress(OSError):  # there is no better place to say that stderr is full or gone
        print(filled(f"chat: {one_line(' '.join(text.split()))}", sys.stderr), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Text from a file, or a folder's name, as a terminal may show it."""
    return text.replace("\n", " ").translate(CONTROL)


def reason(error: Exception, about: str = "") -> str:
    """Why something was refused, of what: the file that the error names, or else ``about``."""
    named = getattr(error, "filename", None) or about
    return f"{named}: " * bool(named) + str(getattr(error, "strerror", None) or error)


def escapes_work(stream) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(stream) -> bool:
    return escapes_work(stream) and not os.environ.get("NO_COLOR")


def columns_of(stream) -> int:
    """How wide a terminal is; 80 where none says it."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def filled(line: str, stream) -> str:
    """The line, broken between words where a terminal would break it anywhere."""
    return textwrap.fill(line, columns_of(stream)) if stream.isatty() else line


def size(count: int) -> str:
    """Bytes for people and for scripts: rounded, then exact."""
    unit, name = unit_for(count)
    return f"{f'{count / unit:.4g} {name}':>10}  {count} bytes"


def unit_for(count: int) -> tuple[int, str]:
    """The largest unit that ``count`` bytes fill at least once."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return 2 ** (10 * power), ("B", "KiB", "MiB", "GiB", "TiB")[power]


def short(count: int) -> str:
    """Bytes for people."""
    unit, name = unit_for(count)
    return f"{count / unit:.1f} {name}"


def of(used: int, reserved: int) -> str:
    unit, name = unit_for(reserved)
    return f"{used / unit:.1f} of {reserved / unit:.1f} {name}"


class Stats:
    """Says nothing of cache and speed; the base of those that do. Each answer has its own."""

    def __init__(self):
        self.dim, self.plain = ("\x1b[2m", "\x1b[0m") if coloured(sys.stderr) else ("", "")

    @property
    def keeps_text(self) -> bool:
        """Whether the text is shown at the end of the answer, and not as it comes."""
        return False

    def say(self, line: str) -> None:
        with suppress(OSError):  # as ``note``
            print(f"{self.dim}{filled(line, sys.stderr).translate(CONTROL)}{self.plain}", file=sys.stderr, flush=True)

    def after_pass(self, session) -> None:
        """Called after each pass over a part of the prompt."""

    def before_text(self) -> None:
        """Called before a step's text is written."""

    def after_text(self, session, step, shown: str) -> None:
        """Called after ``shown`` was written, of a step's text all or nothing."""

    def done(self, session) -> None:
        """Called at the end of an answer."""


class Summary(Stats):
    """One line after each answer."""

    def done(self, session) -> None:
        turn, cache = session.last, session.cache
        held = f"{cache.held}/{cache.capacity} tokens, {of(cache.bytes_used, cache.bytes_reserved)}"
        speed = f"{turn.decode_tok_s:.1f} tok/s, {turn.decode_bytes_s / 1e9:.1f} GB/s"
        if turn.drafted_tokens:
            speed += f", {turn.accepted_tokens} of {turn.drafted_tokens} drafted"
        self.say(
            f"[prompt {turn.computed_tokens} new at {turn.prefill_tok_s:.0f} tok/s + {turn.reused_tokens} reused | "
            f"answer {turn.generated_tokens} at {speed} | cache {cache.kind} {held} | {turn.stop} | seed {turn.seed}]"
        )


class EachStep(Summary):
    """A line for each step, with its text."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @property
    def keeps_text(self) -> bool:
        return sys.stdout.isatty() and sys.stderr.isatty()  # where it would stand between the lines

    def after_text(self, session, step, shown: str) -> None:
        self.count += 1
        cache = session.cache
        held = (
            f"{step.cache_tokens:>5}/{cache.capacity} tokens {step.cache_bytes:>11,} of {cache.bytes_reserved:,} bytes"
        )
        rate = f"{session.last.decode_tok_s:6.1f} tok/s" if session.last.decode_tokens else "   (prefill)"
        speed = f"{step.seconds * 1e3:7.1f} ms {rate}{verified(step)}"
        text = json.dumps(step.text, ensure_ascii=False)
        self.say(f"{self.count:>4} {held} {speed}  {step.token:>6} {text}")


class Live(Summary):
    """A line below the text, written anew at each step; before it, how far a long prompt is."""

    def __init__(self):
        super().__init__()
        self.began = perf_counter()
        self.column = 0  # of the cursor, behind the text; None when a resize has moved it, until the next line
        self.columns = 0
        self.erase = ""  # what takes the line away, while there is one

    def after_pass(self, session) -> None:
        turn = session.last
        done, new = turn.computed_tokens, turn.prompt_tokens - turn.reused_tokens
        if 0 < done < new:
            speed = done / (perf_counter() - self.began)
            line = f"[prompt {done}/{new} tokens | {speed:.0f} tok/s | {(new - done) / speed:.0f} s left]"
            self._write(f"\r{self._dimmed(line)}\x1b[K")
            self.erase = "\r\x1b[K"

    def before_text(self) -> None:
        # The line goes first, since the text may run over it.
        self._write(self.erase)
        self.erase = ""

    def after_text(self, session, step, shown: str) -> None:
        cache = session.cache
        held = f"{step.cache_tokens}/{cache.capacity} tokens, {of(step.cache_bytes, cache.bytes_reserved)}"
        line = self._dimmed(f"[cache {held} | {session.last.decode_tok_s:.1f} tok/s{verified(step)}]")
        if not sys.stdout.isatty():
            self._write(f"\r{line}")
            self.erase = "\r\x1b[K"
        elif self._move(shown.translate(CONTROL), columns_of(sys.stderr)):
            # Make room below (index down, up again), then remember the place, write the line and return.
            self._write(f"\x1bD\x1b[A\x1b7\x1b[B\r{line}\x1b8")
            self.erase = "\x1b[J"

    def _move(self, text: str, columns: int) -> bool:
        """Follow the cursor over the text. False in the last column: to move or to erase there would lose the wrap
        that is due, or the character."""
        from prompt_toolkit.utils import get_cwidth

        if self.columns not in (0, columns):
            self.column = None
        self.columns = columns
        if self.column is None and "\n" in text:
            self.column, text = 0, text.rpartition("\n")[2]
        if self.column is None:
            return False
        for character in text:
            width = get_cwidth(character)
            if character == "\n":
                self.column = 0
            elif character == "\t":
                self.column = max(self.column, min(columns - 1, self.column // 8 * 8 + 8))
            else:
                self.column = width if self.column + width > columns else self.column + width
        return self.column < columns

    def _dimmed(self, line: str) -> str:
        return f"{self.dim}{line[: columns_of(sys.stderr) - 1]}{self.plain}"

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def verified(step) -> str:
    if step.max_abs_diff is None:
        return ""
    return f" | off by {step.max_abs_diff:.2g}" + ("" if step.argmax_equal else ", ANOTHER TOKEN")


MODES: dict[str, type[Stats]] = {"off": Stats, "summary": Summary, "live": Live, "step": EachStep}


def stats_for(mode: str | None) -> type[Stats]:
    """The stats that a mode names; by default live on a terminal, and summary where a line cannot be rewritten."""
    if mode is None or mode == "live":
        mode = "live" if escapes_work(sys.stderr) else "summary"
    return MODES[mode]


class TextOutput:
    """The answer on stdout as it comes, and the stats on stderr."""

    def __init__(self, mode: type[Stats]):
        self.mode, self.stats = mode, mode()

    @property
    def keeps_text(self) -> bool:
        return self.stats.keeps_text

    def start(self, session) -> None:
        self.stats, self.differences, self.shown = self.mode(), [], ""

    def after_pass(self, session) -> None:
        self.stats.after_pass(session)

    def step(self, session, step) -> None:
        text = "" if self.keeps_text else step.text
        self.stats.before_text()
        self.write(text)
        self.stats.after_text(session, step, text)
        self.differences += [] if step.max_abs_diff is None else [(step.max_abs_diff, step.argmax_equal)]

    def stop(self) -> None:
        """End the line under way, also when the answer broke off."""
        self.stats.before_text()
        if self.shown and self.shown[-1] != "\n":
            self.write("\n")

    def done(self, session) -> None:
        self.stats.before_text()
        if self.keeps_text:
            self.write_whole(session.last.text)
        self.stop()
        self.stats.done(session)
        if self.differences:
            differences, equal = zip(*self.differences, strict=True)
            same = f"{sum(equal)} of {len(equal)} steps choose the same token"
            note(f"verified against a recompute of the prefix: logits differ by at most {max(differences):.2g}, {same}")

    def write_whole(self, text: str) -> None:
        self.write(text)

    def write(self, text: str) -> None:
        self.shown = text or self.shown
        sys.stdout.write(text.translate(CONTROL) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class MarkdownOutput(TextOutput):
    """The answer when it is finished, its Markdown rendered for a terminal."""

    keeps_text = True

    def write_whole(self, text: str) -> None:
        from rich.console import Console
        from rich.markdown import Markdown

        # A link keeps its address in sight: the text alone could claim to lead anywhere.
        Console(file=sys.stdout).print(Markdown(text.translate(CONTROL), hyperlinks=False))


class JsonOutput:
    """JSON Lines on stdout: start, a step for each token, done."""

    def start(self, session) -> None:
        self.count = 0
        cache = {
            name: getattr(session.cache, name) for name in ("kind", "capacity", "bytes_per_token", "bytes_reserved")
        }
        turn = pick(session.last, "prompt_tokens", "reused_tokens", "seed")
        self.write({"event": "start", "model": session.model.name, **turn, "cache": cache})

    def after_pass(self, session) -> None:
        """No event tells of it."""

    def step(self, session, step) -> None:
        self.count += 1
        known = {"event": "step", "n": self.count, **pick(step, "token", "text", "cache_tokens", "cache_bytes")}
        checks = {} if step.max_abs_diff is None else pick(step, "max_abs_diff", "argmax_equal")
        self.write({**known, "ms": round(step.seconds * 1e3, 3), **checks})

    def stop(self) -> None:
        """Every line is whole."""

    def done(self, session) -> None:
        counts = ("stop", "text", "prompt_tokens", "reused_tokens", "generated_tokens")
        speeds = ("prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s")
        rounded = {name: round(value, 6) for name, value in pick(session.last, *speeds).items()}
        self.write({"event": "done", **pick(session.last, *counts), **rounded})

    def write(self, event: dict) -> None:
        print(json.dumps(event), flush=True)


def pick(thing, *names: str) -> dict:
    return {name: getattr(thing, name) for name in names}


# ---- an answer under way


@contextmanager
def interruptible(session) -> Iterator[None]:
    """Ctrl-C ends the answer with the pass under way; a second one does not wait for that: KeyboardInterrupt. Those
    after it are too late to hurry anything, and would only break the keeping of what was said.

    SIGTERM and SIGHUP end it too, and do what else they do once the answer is kept.
    """
    heard = []

    def on_signal(signum, frame):
        heard.append(signum)
        if len(heard) == 2:
            raise KeyboardInterrupt
        session.interrupt()

    endings = [signum for signum in ENDINGS if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores one
    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, *endings)}
    try:
        with terminal_mode(off=("ECHO",)):  # keys typed meanwhile do not show inside the text
            yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in [signum for signum in heard if signum != signal.SIGINT][:1]:
            signal.raise_signal(signum)


@contextmanager
def terminal_mode(off: tuple[str, ...], on: tuple[str, ...] = ()) -> Iterator[bool]:
    """stdin's terminal with local modes of termios switched, also after Ctrl-Z and fg; whether there is one."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, AttributeError, OSError, ValueError, termios.error):  # no terminal, or Windows
        yield False
        return
    less, more = (sum(getattr(termios, name) for name in names) for names in (off, on))
    switched = [*before[:3], before[3] & ~less | more, *before[4:]]

    def switch(mode: list) -> None:
        with suppress(OSError, termios.error):  # a terminal that is gone
            if is_foreign(terminal) or os.tcgetpgrp(terminal) == os.getpgrp():  # after bg, it is the shell's
                termios.tcsetattr(terminal, termios.TCSANOW, mode)

    switch(switched)
    continued = signal.signal(signal.SIGCONT, lambda *_: switch(switched))
    try:
        yield True
    finally:
        signal.signal(signal.SIGCONT, continued)
        switch(before)


def is_foreign(terminal: int) -> bool:
    """Whether a terminal is that of another session of processes, as it is under torchrun: its Ctrl-C would reach them,
    and not this one."""
    try:
        os.tcgetpgrp(terminal)
        return False
    except OSError:
        return os.isatty(terminal)


def show(session, steps, output) -> None:
    """Show the steps of an answer as they come."""
    output.start(session)
    session.on_pass = lambda: output.after_pass(session)
    try:
        for step in steps:
            output.step(session, step)
    finally:
        output.stop()
    output.done(session)
