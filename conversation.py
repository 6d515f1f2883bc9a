"""The conversation: what was said, the one way to an answer, and the branches and files that keep it.

A retry, an undo, an edited message and a cut answer that goes on only change the messages. The session then finds by
itself how much of them its cache still holds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from show import ChatError, interruptible, note, show

ON_FULL = ("stop", "drop")
LAST = "last"  # the session that is kept without being asked for
CUT = ("length", "context", "interrupt")


@dataclass(frozen=True)
class Option:
    """A sampling option: its field of Sampling, what reads its value, and what it does."""

    field: str
    read: Callable[[str], object]
    metavar: str
    help: str


def strings(text: str) -> tuple[str]:
    return (text,)


OPTIONS = {
    "max-tokens": Option("max_tokens", int, "N", "most tokens of an answer (default: what the context leaves)"),
    "temp": Option("temperature", float, "X", "temperature; 0 is greedy (default: 0.7)"),
    "top-k": Option("top_k", int, "N", "only the N likeliest tokens (default: 0, all)"),
    "top-p": Option("top_p", float, "X", "only the likeliest tokens that make up X together (default: 1, all)"),
    "min-p": Option("min_p", float, "X", "only tokens at least X times as likely as the likeliest (default: 0, all)"),
    "repeat-penalty": Option(
        "repeat_penalty", float, "X", "make tokens that stood before less likely (default: 1, not)"
    ),
    "seed": Option("seed", int, "N", "the same seed gives the same answer (default: a new one each time)"),
    "stop": Option("stop", strings, "STR", "end the answer before STR"),
}


@dataclass
class Branch:
    """One course of a conversation: the ``messages`` after the system message, each of the person's followed by its
    answer; why the last answer ended; and the session that has read them."""

    session: object
    messages: list[dict] = field(default_factory=list)
    stop: str = ""


class Conversation:
    """What a person and a model said. There is one branch, until ``fork`` makes more."""

    def __init__(self, session, sampling, output, system: str | None = None, raw: bool = False, on_full: str = "stop"):
        self.sampling, self.output = sampling, output
        self.system, self.raw, self.on_full = system, raw, on_full
        self.name, self.branches = "main", {"main": Branch(session)}
        self.reused, self.computed, self.prefill_s = 0, 0, 0.0  # prompt tokens of all answers so far
        self._saved, self._saved_at, self._saving = None, 0.0, 0.0  # as LAST: what, when, and the seconds it took

    @property
    def here(self) -> Branch:
        return self.branches[self.name]

    @property
    def session(self):
        return self.here.session

    @property
    def messages(self) -> list[dict]:
        return self.here.messages

    # ---- answers

    def ids(self, messages: list[dict], begun: str = "") -> list[int]:
        """What the model reads before it goes on. Raises TokenizerError when the chat template refuses it."""
        tokenizer = self.session.tokenizer
        if self.raw:
            return tokenizer.encode("".join(message["content"] for message in messages) + begun)
        first = [{"role": "system", "content": self.system}] if self.system else []
        return tokenizer.chat([*first, *messages], begun)

    def say(self, text: str) -> None:
        """Raises what ``answer`` does, as ``retry``, ``edit`` and ``go_on`` do."""
        self.answer([*self.messages, {"role": "user", "content": text}])

    def retry(self) -> None:
        """Have the last message answered again."""
        self.edit(self.last_message())

    def edit(self, text: str) -> None:
        """Say ``text`` in place of the last message."""
        self.answer([*self.messages[:-2], {"role": "user", "content": text}])

    def undo(self, count: int) -> None:
        """Take back the last ``count`` messages and their answers. Raises ChatError when there are not so many."""
        have = len(self.messages) // 2
        if not 1 <= count <= have:
            raise ChatError(f"there {'is 1 turn' if have == 1 else f'are {have} turns'} to take back")
        self.branches[self.name] = Branch(self.session, self.messages[: -2 * count])

    def clear(self) -> None:
        self.branches[self.name] = Branch(self.session)

    def go_on(self) -> None:
        """Go on with the last answer, which was cut. Raises ChatError too when it was not."""
        if not self.messages or self.here.stop not in CUT:
            raise ChatError("the last answer was not cut; there is nothing to continue")
        *messages, last = self.messages
        self.answer(messages, last["content"])

    def last_message(self) -> str:
        """Raises ChatError when there is none."""
        if not self.messages:
            raise ChatError("nothing was said yet")
        return self.messages[-2]["content"]

    def answer(self, messages: list[dict], begun: str = "") -> None:
        """Have ``messages`` answered, ``begun`` being the answer so far; show it, and keep it. Where no answer comes,
        what was said before stays as it was.

        Raises one of ``user_errors``, and KeyboardInterrupt when Ctrl-C comes twice or before the answer begins.
        """
        messages, (ids, begun) = self._fitting(messages, begun)
        session, tokenizer = self.session, self.session.tokenizer
        try:
            steps = session.generate(ids, self._sampling())
        except ValueError as error:  # a tokenizer that is not the model's
            raise ChatError(str(error)) from None
        at_start = tokenizer.strips_first_space
        tokenizer.strips_first_space = at_start and not begun  # the middle of a text has no first space
        try:
            with interruptible(session):
                try:
                    show(session, steps, self.output)
                except OSError:  # the terminal is gone, and what came so far is not to go with it
                    self._keep(messages, begun)
                    raise
                self._keep(messages, begun)
        finally:
            tokenizer.strips_first_space = at_start

    def _sampling(self):
        from tokenizer import PLAIN_STOP

        if self.raw or self.session.tokenizer.has_template:
            return self.sampling
        return replace(self.sampling, stop=(*self.sampling.stop, PLAIN_STOP))

    def _keep(self, messages: list[dict], begun: str) -> None:
        turn, capacity = self.session.last, self.session.cache.capacity
        self.reused += turn.reused_tokens
        self.computed += turn.computed_tokens
        self.prefill_s += turn.prefill_s
        if turn.stop == "interrupt" and not turn.generated_tokens:
            return
        said = [*messages, {"role": "assistant", "content": begun + turn.text}]
        self.branches[self.name] = Branch(self.session, said, turn.stop)
        if turn.stop == "context":
            note(f"the context of {capacity} tokens is full, which ends the answer; a larger --ctx-size holds more")

    def _fitting(self, messages: list[dict], begun: str) -> tuple[list[dict], tuple[list[int], str]]:
        """The messages to answer, their ids with what is begun; without the oldest turns where ``on_full`` says so and
        the context has no room for an answer."""
        prompt, capacity = self._prompt(messages, begun), self.session.cache.longest
        room = min(capacity // 8, self.sampling.max_tokens or capacity)
        if self.on_full == "stop" or len(prompt[0]) + room <= capacity:
            return messages, prompt
        left, shorter = messages, prompt
        # What stays is computed again, so that a good part goes at once and not a turn each time.
        while len(left) > 2 and len(shorter[0]) > capacity * 3 // 4:
            left = left[2:]
            shorter = self._prompt(left, begun)
        if len(shorter[0]) > capacity or left is messages:
            return messages, prompt
        count = (len(messages) - len(left)) // 2
        dropped = "oldest turn is" if count == 1 else f"{count} oldest turns are"
        stays = ", and the system message stays" if self.system else ""
        note(f"the context of {capacity} tokens is full: the {dropped} dropped{stays}")
        return left, shorter

    def _prompt(self, messages: list[dict], begun: str) -> tuple[list[int], str]:
        """The ids to go on from, and the text of the answer in them.

        The ids that were generated are the answer, where the session still has them: its text may have others. A
        character that was cut is drawn again as a whole.
        """
        ids, tokenizer, tokens = self.ids(messages), self.session.tokenizer, self.session.tokens
        spoken = tokens[len(ids) :]
        if not begun:
            return ids, ""
        if tokens[: len(ids)] != ids or tokenizer.decode(spoken) != begun:
            return self.ids(messages, begun), begun
        while spoken and tokenizer.decode(spoken).endswith("\N{REPLACEMENT CHARACTER}"):
            spoken.pop()
        return ids + spoken, tokenizer.decode(spoken)

    def set(self, name: str, text: str) -> None:
        """Change an option of ``OPTIONS``; "default" takes it back. Raises ChatError for a value that cannot be."""
        option = OPTIONS[name]
        try:
            value = getattr(type(self.sampling)(), option.field) if text == "default" else option.read(text)
        except ValueError:
            raise ChatError(f"{name} takes a {'whole ' if option.read is int else ''}number, not {text}") from None
        try:
            self.sampling = replace(self.sampling, **{option.field: value})
        except ValueError as error:
            raise ChatError(str(error)) from None

    # ---- what it takes

    def by_turn(self) -> list[tuple[int, int]]:
        """Tokens of each message and of its answer, without what the template puts around them."""
        counts = [len(self.session.tokenizer.encode(message["content"])) for message in self.messages]
        return list(zip(counts[::2], counts[1::2], strict=True))

    def length(self) -> int:
        """Tokens of all that was said, with what the template puts around it."""
        return len(self.ids(self.messages[:-1], self.messages[-1]["content"])) if self.messages else 0

    def last_turn(self) -> tuple[list[int], list[int]]:
        """The ids of the last turn: those of its message, with the template's around them, and those of its answer."""
        tokens, end = self.session.tokens, len(self.ids(self.messages[:-1]))
        before = self.ids(self.messages[:-3], self.messages[-3]["content"]) if len(self.messages) > 2 else []
        start = next((n for n, pair in enumerate(zip(before, tokens, strict=False)) if pair[0] != pair[1]), len(before))
        return tokens[start:end], tokens[end:]

    @property
    def left(self) -> int:
        """Tokens that the context still has room for."""
        return self.session.cache.longest - len(self.session.tokens)

    @property
    def saved_s(self) -> float:
        """Seconds that computing the reused tokens again would have taken, at the speed of the others."""
        return self.reused * self.prefill_s / self.computed if self.computed else 0.0

    # ---- branches

    def fork(self, name: str) -> None:
        """Go on in a branch that shares its past with this one. Raises ChatError when the name is taken, and
        SessionError when this kind of cache cannot share."""
        if name in self.branches:
            raise ChatError(f"there is a branch {name} already; /switch {name} goes to it")
        self.branches[name] = replace(self.here, session=self.session.fork())
        self.name = name

    def switch(self, name: str) -> None:
        """Raises ChatError when there is no such branch."""
        if name not in self.branches:
            raise ChatError(f"no branch {name}; there are {', '.join(self.branches)}")
        self.name = name

    def take_session(self, session) -> None:
        """Go on with another model; all branches, with their text. Raises SessionError, nothing changed, when they
        cannot share the new cache."""
        self.branches = {
            name: replace(branch, session=session if name == self.name else session.fork())
            for name, branch in self.branches.items()
        }

    # ---- files

    def save(self, name: str) -> Path:
        """Keep the conversation and its cache under a name. Raises ChatError or SessionError."""
        path = session_file(name)
        branches = {name: {"messages": each.messages, "stop": each.stop} for name, each in self.branches.items()}
        about = {"system": self.system, "raw": self.raw, "name": self.name, "branches": branches}
        with told():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.session.save(path, json.dumps(about))
        return path

    def load(self, name: str) -> None:
        """Go on with a conversation that was kept, its cache restored. Raises ChatError; SessionError, and its kind
        SessionMismatch, whose ``about`` is for ``take``: nothing changed then."""
        path = session_file(name)
        if not path.exists():
            raise ChatError(f"no session {name}{nearest(name, saved_sessions())}; /sessions lists them")
        with told():
            self.take(self.session.load(path))

    def take(self, about: str) -> None:
        """Go on with the text of a conversation that was kept, in all its branches where the cache can share their
        past. Raises ChatError when it is none of this terminal's."""
        try:
            kept = json.loads(about)
            name, raw, branches = kept["name"], kept["raw"], kept["branches"]
            here = Branch(self.session, **branches.pop(name))
        except (ValueError, TypeError, KeyError):
            raise ChatError("the session holds no conversation of this terminal") from None
        if raw != self.raw:
            raise ChatError(f"the session was kept {'with' if raw else 'without'} --raw; start like that")
        from generate import SessionError

        self.system, self.name, self.branches = kept["system"], name, {name: here}
        try:
            self.branches |= {other: Branch(self.session.fork(), **said) for other, said in branches.items()}
        except SessionError as error:
            note(f"its other branches are left out ({', '.join(branches)}): {error}")

    def keep_last(self, leaving: bool = False) -> None:
        """Keep it as the last one: after each turn, or, where writing takes longer than a blink, for no more than a
        twentieth of the time. Raises as ``save``."""
        said, start = (self.system, self.name, self.messages), monotonic()
        due = leaving or self._saving < 0.3 or start - self._saved_at > 20 * self._saving
        if self.messages and said != self._saved and due:
            self.save(LAST)
            self._saved, self._saved_at = said, monotonic()
            self._saving = self._saved_at - start


# ---- where it is kept


def state_folder() -> Path:
    """Where what outlives a run is kept. Raises ChatError for a person without a home."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ChatError(str(error)) from None
    return Path(base) / "kv-chat"


def session_file(name: str) -> Path:
    """Raises ChatError for a name that is not a plain file's."""
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > 100:
        raise ChatError("a session's name is made of letters, digits, '-', '_' and '.', and begins with no '.'")
    return state_folder() / "sessions" / f"{name}.safetensors"


def saved_sessions() -> list[str]:
    with suppress(OSError, ChatError):
        folder = state_folder() / "sessions"
        return sorted(path.stem for path in folder.glob("[!.]*.safetensors"))
    return []


def nearest(name: str, names) -> str:
    """A hint at what was meant, if one of ``names`` is near."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""


@contextmanager
def told() -> Iterator[None]:
    """Turns what a file system refuses into ChatError, which names the file."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise ChatError(f"{named}{error.strerror or error}") from None
