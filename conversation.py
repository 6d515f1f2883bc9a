"""The conversation: what was said, the one way to an answer, and the branches and files that keep it.

A retry, an undo, an edited message and a cut answer that goes on only change the messages. The session then finds by
itself how much of them its cache still holds.
"""

from __future__ import annotations

import gc
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from show import ChatError, interruptible, note, reason, show

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
    answer, which says why it ended; the session that has read them; and how many tokens they are, once that is
    known."""

    session: object
    messages: list[dict] = field(default_factory=list)
    tokens: int | None = None


class Conversation:
    """What a person and a model said. There is one branch, until ``fork`` makes more."""

    def __init__(self, session, sampling, output, system: str | None = None, raw: bool = False, on_full: str = "stop"):
        self.sampling, self.output = sampling, output
        self.system, self.raw, self.on_full = system, raw, on_full
        self.name, self.branches = "main", {"main": Branch(session)}
        self.reused, self.computed, self.prefill_s = 0, 0, 0.0  # prompt tokens of all answers so far
        self._saved, self._saved_at, self._saving = None, 0.0, 0.0  # as LAST: what, when, and the seconds it took
        self._unwanted: dict | None = None  # what was said when LAST was deleted

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
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        return tokenizer.chat([*first, *said], begun)

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
        if not self.messages or self.messages[-1]["stop"] not in CUT:
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
                finally:  # whatever broke it off, what came so far is not to go with it
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
        answer = {"role": "assistant", "content": begun + turn.text, "stop": turn.stop}
        self.branches[self.name] = Branch(self.session, [*messages, answer], len(self.session.tokens))
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
        return len(self._prompt(self.messages[:-1], self.messages[-1]["content"])[0]) if self.messages else 0

    def last_turn(self) -> tuple[list[int], list[int]]:
        """The ids of the last turn: those of its message, with the template's around them, and those of its answer."""
        *messages, answer = self.messages
        (tokens, _), end = self._prompt(messages, answer["content"]), len(self.ids(messages))
        before = self.ids(self.messages[:-3], self.messages[-3]["content"]) if len(self.messages) > 2 else []
        start = next((n for n, pair in enumerate(zip(before, tokens, strict=False)) if pair[0] != pair[1]), len(before))
        return tokens[start:end], tokens[end:]

    @property
    def left(self) -> int:
        """Tokens that the context still has room for, beside the conversation as it stands."""
        from tokenizer import TokenizerError

        if self.here.tokens is None:
            try:
                self.here.tokens = self.length()
            except TokenizerError:  # of a template that refuses it, as the next message will be told
                self.here.tokens = 0
        return self.session.cache.longest - self.here.tokens

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

    def drop(self, name: str) -> None:
        """Forget a branch, whose pages are free then. Raises ChatError for this one, and when there is no such."""
        others = [other for other in self.branches if other != self.name]
        if name not in others:
            raise ChatError(f"no other branch {name}; there are {', '.join(others) or 'none'}")
        self.branches.pop(name).session.cache.truncate(0)

    def take_session(self, session) -> None:
        """Go on with another model; all branches, with their text. Raises SessionError, nothing changed, when they
        cannot share the new cache."""
        self.branches = {
            name: Branch(session if name == self.name else session.fork(), branch.messages)
            for name, branch in self.branches.items()
        }
        gc.collect()  # the old model's parts hold each other, and its memory is wanted now

    # ---- files

    def save(self, name: str) -> Path:
        """Keep the conversation and its cache under a name. Raises ChatError or SessionError."""
        path = session_file(name)
        branches = {name: {"messages": branch.messages} for name, branch in self.branches.items()}
        about = {"system": self.system, "raw": self.raw, "name": self.name, "branches": branches}
        with told():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.session.save(path, json.dumps(about))
        return path

    def load(self, name: str) -> None:
        """Go on with a conversation that was kept, its cache restored. Raises ChatError; SessionError, and its kind
        SessionMismatch, whose ``about`` is for ``take``: nothing changed then."""
        path = kept_file(name)
        for branch in self.branches.values():
            if branch is not self.here:  # its pages are wanted; should it stay, they are computed again
                branch.session.cache.truncate(0)
        self.take(self.session.load(path))
        if name == LAST:
            self._saved = self._state()

    def take(self, about: str) -> None:
        """Go on with the text of a conversation that was kept, in all its branches where the cache can share their
        past. Raises ChatError when it is none of this terminal's."""
        from generate import SessionError

        system, raw, name, branches = conversation_in(about)
        if raw != self.raw:
            raise ChatError(f"the session was kept {'with' if raw else 'without'} --raw; start like that")
        self.branches = {name: Branch(self.session, branches.pop(name))}
        self.system, self.name = system, name
        try:
            for other, messages in branches.items():
                session = self.session.fork()
                session.hold(self.ids(messages[:-1], messages[-1]["content"]) if messages else [])
                self.branches[other] = Branch(session, messages)
        except SessionError as error:
            note(f"its other branches are left out ({', '.join(branches)}): {error}")

    def delete(self, name: str) -> None:
        """Delete a session that was kept; LAST is kept again only once something more is said. Raises ChatError."""
        with told(name):
            remove(kept_file(name))
        if name == LAST:
            self._unwanted = self._said()

    def keep_last(self, leaving: bool = False) -> None:
        """Keep it as the last one: after each turn, or, where writing takes longer than a blink, for no more than a
        twentieth of the time. Where all of it was taken back, it is kept no longer. Raises as ``save``."""
        state, start = self._state(), monotonic()
        due = leaving or self._saving < 0.3 or start - self._saved_at > 20 * self._saving
        if state == self._saved or self._said() == self._unwanted or not due:
            return
        if state is None:
            with told():
                remove(session_file(LAST))
        else:
            self.save(LAST)
        self._saved, self._saved_at = state, monotonic()
        self._saving = self._saved_at - start

    def _said(self) -> dict[str, list[dict]]:
        return {name: branch.messages for name, branch in self.branches.items() if branch.messages}

    def _state(self) -> tuple | None:
        """What there is to keep; None when nothing was said."""
        said = self._said()
        return (self.system, self.name, said) if said else None


def conversation_in(about: str) -> tuple[str | None, bool, str, dict[str, list[dict]]]:
    """The system message, whether it is raw, the name of the branch and all branches, of a conversation that was kept.
    Raises ChatError for what ``Conversation.save`` cannot have written."""
    try:
        kept = json.loads(about)
        system, raw, name = kept["system"], kept["raw"], kept["name"]
        branches = {each: turns_in(said["messages"]) for each, said in kept["branches"].items()}
        if name in branches and isinstance(system, str | None):
            return system, bool(raw), name, branches
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ChatError("the session holds no conversation of this terminal")


def turns_in(messages: list) -> list[dict]:
    """The messages of a branch that was kept. Raises ValueError, TypeError, KeyError or AttributeError when they are
    no turns."""
    turns = []
    for question, answer in zip(messages[::2], messages[1::2], strict=True):
        texts = question["content"], answer["content"], answer.get("stop", "")
        if (question["role"], answer["role"]) != ("user", "assistant") or {*map(type, texts)} != {str}:
            raise ValueError("no turn")
        said, answered, stop = texts
        turns += [{"role": "user", "content": said}, {"role": "assistant", "content": answered, "stop": stop}]
    return turns


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


def kept_file(name: str) -> Path:
    """The file of a session that was kept. Raises ChatError when there is none."""
    path = session_file(name)
    with told(), suppress(FileNotFoundError):
        if stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for who writes into it
            return path
    raise ChatError(f"no session {name}{nearest(name, saved_sessions())}; /sessions lists them")


def remove(path: Path) -> None:
    """Delete a session's file, and those of other ranks beside it. Raises OSError."""
    others = [part for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdigit()]
    for part in (path, *others):
        part.unlink(missing_ok=True)


def saved_sessions() -> list[str]:
    with suppress(OSError, ChatError):
        folder = state_folder() / "sessions"
        return sorted(path.stem for path in folder.glob("[!.]*.safetensors") if path.is_file())
    return []


def nearest(name: str, names) -> str:
    """A hint at what was meant, if one of ``names`` is near."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""


@contextmanager
def told(about: str = "") -> Iterator[None]:
    """Turns what a file system refuses, and what cannot be a path, into ChatError, which names the file or
    ``about``."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise ChatError(reason(error, about)) from None
