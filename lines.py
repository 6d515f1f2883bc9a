"""Lines in, lines out: what a file of prompts asks for, and the file of answers, which is gone on with after a stop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO

from batch import Batch, Sequence, seeded
from cache import CacheFull
from generate import Sampling
from tokenizer import PLAIN_STOP, Tokenizer, TokenizerError


class BatchError(Exception):
    """A file that cannot be read or written on; the text is one line."""


# ---- in


class Requests:
    """Reads what a line asks for; ``sampling`` and ``system`` are for lines that do not say.

    A line that begins with { is a JSON object: ``prompt``, or ``messages``; ``system``; and fields of Sampling. Any
    other is the prompt itself.
    """

    names = {field.name: field.name for field in fields(Sampling)} | {"temp": "temperature"}
    whole = ("top_k", "seed", "max_tokens")

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, system: str | None = None, raw: bool = False):
        self.tokenizer, self.sampling, self.system, self.raw = tokenizer, sampling, system, raw

    def read(self, line: bytes, index: int) -> tuple[list[int], Sampling]:
        """The prompt's ids and the options of line ``index``. Raises ValueError, or TokenizerError when the chat
        template refuses it."""
        text = line.decode("utf-8-sig", "replace").rstrip("\r\n")
        return self.ask(self._object(text) if text.lstrip().startswith("{") else {"prompt": text}, index)

    def ask(self, asked: dict, index: int = 0) -> tuple[list[int], Sampling]:
        """As ``read``, for what such an object says."""
        return self._ids(asked), self._sampling(asked, seeded(self.sampling, index))

    def _object(self, text: str) -> dict:
        try:
            asked = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a JSON object: {error}") from None
        known = ("prompt", "messages", "system", *self.names)
        for name in asked:
            if name not in known:
                raise ValueError(f"unknown key {name!r}; there are {', '.join(known)}")
        if ("prompt" in asked) == ("messages" in asked):
            raise ValueError("either prompt or messages must be given")
        for name in ("prompt", "system"):
            if not isinstance(asked.get(name, ""), str):
                raise ValueError(f"{name} must be text")
        messages = asked.get("messages", [{}])
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ValueError("messages must be a list of objects, each with a role and a content")
        return asked

    def _sampling(self, asked: dict, default: Sampling) -> Sampling:
        given = {self.names[name]: value for name, value in asked.items() if name in self.names}
        for name, value in given.items():
            if name == "stop":
                given[name] = value = (value,) if isinstance(value, str) else value
                if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
                    raise ValueError("stop must be text, or a list of texts")
                given[name] = tuple(value)
            elif type(value) is not int and (name in self.whole or type(value) is not float):
                raise ValueError(f"{name} must be a {'whole ' if name in self.whole else ''}number")
        sampling = replace(default, **given)
        if self.raw or self.tokenizer.has_template:
            return sampling
        return replace(sampling, stop=(*sampling.stop, PLAIN_STOP))

    def _ids(self, asked: dict) -> list[int]:
        if self.raw and asked.keys() & {"messages", "system"}:
            raise ValueError("messages and system need the chat template that --raw leaves out")
        if "prompt" in asked and not asked["prompt"].strip():
            raise ValueError("the prompt is empty")
        if self.raw:
            return self.tokenizer.encode(asked["prompt"])
        messages = asked.get("messages") or [{"role": "user", "content": asked.get("prompt")}]
        begun = messages[0].get("role") == "system"
        if begun and "system" in asked:
            raise ValueError("system is given, and messages have one too")
        system = None if begun else asked.get("system", self.system)
        return self.tokenizer.chat([*([{"role": "system", "content": system}] if system else []), *messages])


class Lines:
    """The lines of a file, read in a thread of its own, which closes it: answers under way do not wait for the next
    line, and who waits for it can be interrupted."""

    def __init__(self, file: IO[bytes]):
        self.ended, self._queue = False, Queue(64)
        Thread(target=self._read, args=(file,), daemon=True).start()

    def _read(self, file: IO[bytes]) -> None:
        try:
            with file:
                for line in file:
                    self._queue.put(line)
            self._queue.put(None)
        except OSError as error:
            self._queue.put(error)

    def get(self, wait: float) -> bytes | None:
        """The next line; None when none has come within ``wait`` seconds, or when all have ``ended``. Raises
        OSError."""
        if self.ended:
            return None
        try:
            line = self._queue.get(timeout=wait)
        except Empty:
            return None
        if isinstance(line, OSError):
            raise line
        self.ended = line is None
        return line


# ---- out


class InOrder:
    """Writes results in the order of the lines they belong to, from ``next`` on; those that come too early are
    held."""

    def __init__(self, write: Callable[[dict], None], first: int = 0):
        self.write, self.next, self.held = write, first, {}
        self.errors = 0

    def put(self, index: int, result: dict) -> None:
        self.held[index] = {"index": index, **result}
        self.errors += "error" in result
        while self.next in self.held:
            self.write(self.held.pop(self.next))
            self.next += 1


def result_of(sequence: Sequence) -> dict:
    turn = sequence.turn
    if sequence.error:
        return {"error": sequence.error}
    names = ("text", "stop", "prompt_tokens", "generated_tokens")
    return {name: getattr(turn, name) for name in names}


@contextmanager
def results(path: Path | None) -> Iterator[tuple[Callable[[dict], None], int]]:
    """What writes a result as a line, and how many there are already. They go to stdout, or to a file, which is on the
    disk at the end; in one that holds results, a line that was cut off is taken away.

    Raises BatchError for a file that holds anything else, or cannot be opened, and OSError.
    """
    if path is None:
        yield (lambda result: print(json.dumps(result), flush=True)), 0
        return
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BatchError(f"{path}: not a file of its own, in which a batch could go on; leave --output out")
        file = open(path, "ab+")  # noqa: SIM115
        _lock(file, path)
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror or error}") from None
    with file:
        count = end = 0
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            if not _is_result(line, count):
                raise BatchError(f"{path}: its line {count + 1} is no result of a batch; give another file")
            count, end = count + 1, end + len(line)
        file.truncate(end)

        def write(result: dict) -> None:
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()

        try:
            yield write, count
        finally:
            os.fsync(file.fileno())


def _lock(file: IO[bytes], path: Path) -> None:
    """Raises BatchError when another process writes there."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BatchError(f"{path}: another batch writes there") from None


def _is_result(line: bytes, index: int) -> bool:
    try:
        result = json.loads(line)
        return result["index"] == index and ("text" in result) != ("error" in result)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


# ---- all together

AHEAD = 1024  # most lines that are read before an earlier one is answered


def answer_lines(
    batch: Batch, lines: Lines, requests: Requests, output: InOrder, after_step: Callable[[], None] = lambda: None
) -> None:
    """Answer each line, from that of ``output.next`` on, until all are or ``batch`` is interrupted. A line that cannot
    be used has an error for its result. Raises OSError when reading or writing fails."""
    index, first = 0, output.next
    while not batch.interrupted and (batch.busy or not lines.ended):
        while batch.hungry and not batch.interrupted and index < output.next + AHEAD:
            if (line := lines.get(0 if batch.busy else 0.1)) is None:
                break
            if index >= first:
                try:
                    batch.add(index, *requests.read(line, index))
                except (ValueError, CacheFull, TokenizerError) as error:
                    output.put(index, {"error": " ".join(str(error).split())})
            index += 1
        for sequence in batch.step():
            output.put(sequence.index, result_of(sequence))
        after_step()
