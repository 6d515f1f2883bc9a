"""Many prompts at once over one pool of pages (continuous batching, Orca, OSDI 2022).

A decode step reads all weights, for one sequence or for many, so that many together take little longer than one. Each
step is one pass: a token of every answer under way, and with what is left of the pass's size a part of the prompts
that wait. An answer that ends leaves its pages to the next prompt at once. What sequences have in common at their
beginning is computed once and held once.

When no page is free, the sequence that came last gives its pages up and waits in front, with the tokens it has and
its sampler: it goes on later as if nothing had been. So the oldest always ends, and memory is never more than the pool.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from cache import CacheFull
from generate import NotFinite, Sampler, Sampling, Speech, Turn, check_prompt, chunk_size, finite
from model import Llama
from paged import PagedBatch, PagedCache, Pool
from tokenizer import Tokenizer


class Sequence:
    """One answer: ``tokens`` are the prompt's and its own, of which ``cache`` holds the beginning. ``turn`` is what it
    is and costs, whole once ``ended``; or ``error`` says why there is none."""

    def __init__(self, index: int, prompt: list[int], sampling: Sampling, cache: PagedCache, model: Llama, tokenizer):
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        room = cache.capacity - len(prompt)
        self.index, self.tokens, self.cache = index, list(prompt), cache
        self.turn, self.error, self.ended = Turn(len(prompt), 0, seed), "", False
        self.limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        self.sampler = Sampler(sampling, model.config.vocab_size, model.device)
        self.sampler.begin(seed, prompt)
        self.twins: list[Sequence] = []  # other answers to the same prompt, which begin when it is computed
        self._speech, self._stop_ids = Speech(tokenizer, sampling.stop), tokenizer.stop_ids

    @property
    def missing(self) -> int:
        """Tokens that the next passes must bring."""
        return len(self.tokens) - self.cache.length

    @property
    def entering(self) -> list[int]:
        """Those of the pass for which it was extended."""
        end = self.cache.length
        return self.tokens[end - len(self.cache.slots) : end]

    def extend(self, n: int) -> None:
        """Make room for the next ``n`` tokens, and let others find the pages that they fill. Raises CacheFull."""
        self.cache.extend(n)
        self.cache.publish(self.tokens)

    def split(self) -> list[Sequence]:
        """This one and its twins, which hold its prompt together from now on."""
        twins, self.twins = self.twins, []
        for twin in twins:
            twin.cache = self.cache.fork()
            twin.turn.reused_tokens = twin.turn.prompt_tokens
        return [self, *twins]

    def take(self, token: int) -> None:
        """Go on by a drawn token, or end; the rules are those of ``Session``."""
        try:
            if finite(token) in self._stop_ids:
                return self.end("eos")
        except NotFinite as error:
            self.error = str(error)
            return self.end("error")
        self.tokens.append(token)
        self.turn.generated_tokens += 1
        self.turn.text += self._speech.add(token)
        if self._speech.ended:
            self.end("stop")
        elif self.turn.generated_tokens == self.limit:
            self.end_of_room()

    def end_of_room(self) -> None:
        self.end("length" if self.limit == self.sampler.sampling.max_tokens else "context")

    def end(self, stop: str) -> None:
        self.turn.text += self._speech.finish()
        self.turn.stop, self.ended = stop, True
        self.cache.truncate(0)


class Batch:
    """Answers to many prompts, each of at most ``context`` tokens with its answer, over the pages of one ``pool``.

    ``running``, oldest first, hold pages; ``waiting`` hold none. Each answer's tokens are those of a ``Session`` alone,
    as far as sums in another order give the same numbers.
    """

    def __init__(self, model: Llama, tokenizer: Tokenizer, pool: Pool, context: int):
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.context, self.room = context, len(pool.references) * pool.page_size
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.drawn, self.interrupted = 0, False  # tokens so far; whether to stop
        self._ended: list[Sequence] = []
        self._size = chunk_size(model)  # most tokens of a pass, unless more than that are running
        self._alone = model.rotary.kind == "dynamic"  # the length of a pass turns its keys, so that none is shared

    def add(self, index: int, prompt: list[int], sampling: Sampling, samples: int = 1) -> None:
        """Have a prompt answered; ``samples`` times, from ``index`` on, with seeds that follow each other.

        Raises ValueError for an empty prompt, or for ids outside the vocabulary, and CacheFull for one that never
        fits.
        """
        check_prompt(prompt, self.context, self.model.config.vocab_size)
        if len(prompt) > self.room:
            sizes = f"the prompt has {len(prompt)} tokens and the pool holds {self.room}"
            raise CacheFull(f"{sizes}; shorten it, or take a larger --pool")
        first, *twins = (self._sequence(index + i, prompt, seeded(sampling, i)) for i in range(samples))
        if first.limit == 0:
            for sequence in (first, *twins):
                sequence.end_of_room()
            self._ended += [first, *twins]
        elif self._alone:
            self.waiting += [first, *twins]
        else:
            first.twins = twins
            self.waiting.append(first)

    def _sequence(self, index: int, prompt: list[int], sampling: Sampling) -> Sequence:
        cache = self.pool.sequence(min(self.context, self.room))
        return Sequence(index, prompt, sampling, cache, self.model, self.tokenizer)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self._ended)

    @property
    def hungry(self) -> bool:
        """Whether another prompt might begin with the next step."""
        return not self.waiting and len(self.running) < self._size

    def interrupt(self) -> None:
        """Ask whoever drives the steps to stop; may be called from a signal handler."""
        self.interrupted = True

    def step(self) -> list[Sequence]:
        """One pass over the model; returns the answers that have ended.

        When it fails, all begin again with the tokens they have.
        """
        try:
            parts = self._decode()
            parts += self._prefill(self._size - len(parts))
            if parts:
                self._draw(parts, self._pass(parts))
        except BaseException:
            self._part_with_ended()
            self.pool.forget()
            while self.running:
                self._give_up()
            raise
        self._part_with_ended()
        ended, self._ended = self._ended, []
        return ended

    def _part_with_ended(self) -> None:
        self._ended += [sequence for sequence in self.running if sequence.ended]
        self.running = [sequence for sequence in self.running if not sequence.ended]

    # -- who takes part

    def _decode(self) -> list[Sequence]:
        """The sequences that go on by their newest token, extended by it. Where pages lack, the youngest gives its
        up; only then are prompts extended, so that nobody has begun with pages which are never computed."""
        parts, i = [], 0
        while i < len(self.running):
            sequence = self.running[i]
            try:
                if sequence.missing == 1:
                    sequence.extend(1)
                    parts.append(sequence)
                i += 1
            except CacheFull:
                self._give_up()
        return parts

    def _give_up(self) -> None:
        youngest = self.running.pop()
        youngest.cache.truncate(0)
        self.waiting.appendleft(youngest)

    def _prefill(self, budget: int) -> list[Sequence]:
        """The sequences that bring a part of their prompts, together at most ``budget`` tokens, extended by it. Each
        begins when those before it are whole, and finds what it has in common with them."""
        parts = []
        while budget > 0 and (sequence := self._incomplete() or self._admit()):
            part = min(budget, sequence.missing)
            try:
                sequence.extend(part)
            except CacheFull:
                break  # until an answer ends
            parts.append(sequence)
            budget -= part
        return parts

    def _incomplete(self) -> Sequence | None:
        return next((sequence for sequence in self.running if sequence.missing), None)

    def _admit(self) -> Sequence | None:
        """The first that waits, if there are pages for all of it and for one token more of everybody."""
        if not self.waiting or (self._alone and self.running):
            return None
        sequence, size = self.waiting[0], self.pool.page_size
        if not self._alone:
            sequence.cache.adopt(sequence.tokens)
        pages = -(-sequence.missing // size) + len(sequence.twins) + len(self.running)
        if self.running and pages >= self.pool.free:
            sequence.cache.truncate(0)
            return None
        if not sequence.turn.generated_tokens:
            sequence.turn.reused_tokens = sequence.cache.length
        self.running.append(self.waiting.popleft())
        return sequence

    # -- the pass

    def _pass(self, parts: list[Sequence]) -> Tensor:
        """-> the hidden state after each part's last token [len(parts), hidden_size]."""
        batch = PagedBatch.of([sequence.cache for sequence in parts])
        ends = torch.tensor(batch.counts).cumsum(0) - 1
        tokens = [token for sequence in parts for token in sequence.entering]
        return self.model(torch.tensor(tokens, device=self.model.device), batch)[ends.to(self.model.device)]

    def _draw(self, parts: list[Sequence], hidden: Tensor) -> None:
        """Draw a token for each sequence that is whole. The only wait for the device in a step is for all of them."""
        whole = [i for i, sequence in enumerate(parts) if not sequence.missing]
        if not whole:
            return
        logits = self.model.head(hidden if len(whole) == len(parts) else hidden[whole])
        drawn: list[tuple[Sequence, Tensor]] = []
        for i, row in zip(whole, logits, strict=True):
            first, *twins = parts[i].split()
            self.running += twins
            drawn += [(sequence, sequence.sampler.draw(row)) for sequence in (first, *twins)]
        self.drawn += len(drawn)
        for (sequence, _), token in zip(drawn, torch.stack([token for _, token in drawn]).tolist(), strict=True):
            sequence.take(token)


def seeded(sampling: Sampling, i: int) -> Sampling:
    """The options of the i-th answer: its seed is i more, whatever its neighbours are."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + i) % 2**63)
