"""The session: what was said, what of it the cache holds, and the loop that goes on from there.

``Session.tokens`` is the only truth, and ``tokens[:cache.length]`` is exactly what the cache holds. Each answer then
takes one path: find the longest prefix that the cache already holds, cut the cache to it, prefill the rest in chunks,
decode. A next turn, a retry, an edited message, an interrupted answer and a session from disk are all that path.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from time import perf_counter

import torch
from safetensors import SafetensorError
from torch import Tensor

from cache import CacheFull, FlashCache, KVCache, NoCache
from graph import Graph, Reading
from model import Llama
from seam import RankError
from storage import opened
from tokenizer import Stream, Tokenizer


class NotFinite(Exception):
    """The model computed infinities; the text says what to do."""


class SessionError(Exception):
    """A session that cannot be saved, restored or forked; the text is one line."""


class SessionMismatch(SessionError):
    """A saved session of another model or cache, ``part`` says in what; or, ``part`` being empty, one that another rank
    cannot restore. ``about`` is what was saved with it."""

    def __init__(self, text: str, part: str, about: str):
        super().__init__(text)
        self.part, self.about = part, about


class _Interrupted(Exception):
    """Unwinds to the end of the answer after ``Session.interrupt``."""


# ---- sampling


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen and when an answer ends. Raises ValueError for a value out of range.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repeat_penalty 1 do nothing; seed None draws one; stop
    strings end the answer and are not part of it.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        self._within("temperature", 0, 1000)
        self._within("top_k", 0, 2**31)
        self._within("top_p", 0, 1)
        self._within("min_p", 0, 1)
        self._within("repeat_penalty", 0.01, 100)
        self._within("seed", 0, 2**63 - 1)
        self._within("max_tokens", 0, 2**31)
        if not all(self.stop):
            raise ValueError("a stop string must not be empty")

    @property
    def draws(self) -> Sampling:
        """What of it decides how one token is drawn."""
        return replace(self, seed=None, max_tokens=None, stop=())

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {value}, and must be from {low} to {high}")


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make each token in ``seen`` [V] bool less likely, once however often it stood there (CTRL, arXiv 1909.05858,
    §4.1).

    A positive logit is divided and a negative one multiplied: dividing that would raise it.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [V] float32 -> probabilities [V], those that top_k, top_p (arXiv 1904.09751) or min_p (2407.01082) drop
    being 0."""
    logits = (logits - logits.max()) / max(sampling.temperature, 1e-6)  # no quotient overflows
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = p.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # 0 for the likeliest token, which stays even with top_p 0
        p = p.scatter(0, order, ordered.masked_fill(before >= max(sampling.top_p, 1e-9), 0))
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p.max(), 0)
    return p / p.sum()


class Sampler:
    """Draws tokens on the device, answer after answer; reading the drawn one is the only wait for it in a step.

    All that a draw changes stays where it is, and a draw asks nothing of the host: a CUDA graph may hold it.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device):
        self.sampling = sampling
        self.generator = torch.Generator(device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)

    def begin(self, seed: int, prompt: list[int]) -> None:
        """An answer to ``prompt`` begins; with the same seed it is the same."""
        self.generator.manual_seed(seed)
        self.seen.zero_().index_fill_(0, torch.tensor(prompt, device=self.seen.device), True)

    def __call__(self, logits: Tensor) -> int:
        """logits [V] float32 -> a token id. Raises NotFinite."""
        return finite(self.draw(logits).item())

    def draw(self, logits: Tensor) -> Tensor:
        """logits [V] float32 -> a token id on the device, which is not waited for; -1 where they are not finite."""
        finite = logits.sum().isfinite()  # in one reading; what is not finite stays so in a sum
        if self.sampling.repeat_penalty != 1:
            logits = penalize(logits, self.seen, self.sampling.repeat_penalty)
        if self.sampling.temperature == 0:
            drawn = logits.max(0).indices  # argmax takes twice as long on a CPU
        else:
            # The largest of p / e, e exponential, is a draw from p; torch.multinomial would wait for the device.
            p = probabilities(logits, self.sampling)
            drawn = (p / torch.empty_like(p).exponential_(generator=self.generator)).argmax()
        self.seen.index_fill_(0, drawn, True)
        return torch.where(finite, drawn, -1)


def finite(token: int) -> int:
    """A token as ``Sampler.draw`` gave it. Raises NotFinite for -1."""
    if token < 0:
        raise NotFinite("the model's numbers overflowed; try --dtype bfloat16 or --dtype float32")
    return token


# ---- text


class Speech:
    """Turns tokens into text that is certain: whole characters, and nothing that may yet become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self._stream, self._stop, self._kept = Stream(tokenizer), stop, ""
        self.ended = False

    def add(self, token: int) -> str:
        return self._release(self._stream.add(token))

    def finish(self) -> str:
        """The rest, when no token comes any more; nothing after a stop string."""
        if self.ended:
            return ""
        return self._release(self._stream.flush()) + ("" if self.ended else self._kept)

    @property
    def waiting(self) -> bool:
        """Whether a later token decides on text of the tokens so far."""
        return bool(self._kept) or self._stream.pending

    def _release(self, text: str) -> str:
        text = self._kept + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.ended, self._kept = True, ""
            return text[: min(found)]
        sure = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._kept = text[sure:]
        return text[:sure]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` begin ``stop``."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)


# ---- session


@dataclass
class Step:
    """One token of an answer. ``text`` may be empty: a part of a character, or of what may be a stop string, waits for
    the next.

    cache_tokens and cache_bytes count this token too, which the next pass stores; seconds is the time it took, for the
    first one without the prefill. The last two are filled by a VerifyingSession.
    """

    token: int
    text: str
    cache_tokens: int
    cache_bytes: int
    seconds: float
    max_abs_diff: float | None = None
    argmax_equal: bool | None = None


@dataclass
class Turn:
    """What an answer was and cost. ``stop`` is eos, length, context, stop or interrupt; computed_tokens are those of
    the prompt that were not reused, or fewer after an interrupt."""

    prompt_tokens: int
    reused_tokens: int
    seed: int
    stop: str = "interrupt"
    text: str = ""
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    computed_tokens: int = 0
    decode_tokens: int = field(default=0, repr=False)
    drafted_tokens: int = field(default=0, repr=False)
    accepted_tokens: int = field(default=0, repr=False)
    decode_bytes: int = field(default=0, repr=False)

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens computed (the reused ones cost nothing) per second."""
        return self.computed_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the prompt; the first one comes from the prompt's own pass and is not among
        them."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else 0.0

    @property
    def decode_bytes_s(self) -> float:
        """Achieved bandwidth: bytes of weights and cache that the passes after the prompt read, per second."""
        return self.decode_bytes / self.decode_s if self.decode_tokens else 0.0


class Drafts:
    """Guesses at the next tokens, which one pass can judge; this one has none. speculate.py has others."""

    def begin(self, tokens: list[int]) -> None:
        """An answer begins after ``tokens``."""

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """What may follow ``tokens``, at most ``most`` tokens."""
        return []

    def judge(self, proposed: int, accepted: int) -> None:
        """How many of the tokens proposed came true, from the first on."""


class Session:
    """One conversation over one cache. ``last`` is the Turn of the answer under way, or of the latest; ``on_pass`` is
    called after each pass over the prompt, when ``last.computed_tokens`` has grown; ``drafts`` may guess ahead.

    While the tokens of one pass are handed out, the cache is ahead of ``tokens`` by those that are to come.
    """

    def __init__(self, model: Llama, cache: KVCache, tokenizer: Tokenizer):
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.tokens: list[int] = []
        self.last: Turn | None = None
        self.on_pass: Callable[[], None] = lambda: None
        self.drafts = Drafts()
        self._chunk, self._weights = chunk_size(model), model.bytes_per_step
        self._graphs = Graph if isinstance(cache, FlashCache) else None  # what a step is captured as
        self._graph: Graph | None = None
        self._flying: Tensor | None = None  # logits of a step that is under way, whose token the graph holds
        self.interrupted = False

    def generate(self, prompt_ids: list[int], sampling: Sampling = Sampling()) -> Iterator[Step]:
        """Answer ``prompt_ids``, the whole conversation; what the cache holds of it already is not computed again.

        Raises ValueError for an empty prompt, or for ids outside the vocabulary, and CacheFull for one longer than the
        context, before anything changes; NotFinite from the iterator.
        """
        check_prompt(prompt_ids, self.cache.longest, self.model.config.vocab_size)
        self.hold(prompt_ids)
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self.last = Turn(len(prompt_ids), self.cache.length, seed)
        self.interrupted = False
        return self._answer(self.last, sampling)

    def hold(self, ids: list[int]) -> None:
        """Be as if ``ids`` had been said, and no more; the cache keeps what it holds of their beginning."""
        pairs = zip(self.tokens[: self.cache.length], ids, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # At least one token is left to compute, since logits come from computing and not from the cache.
        self.cache.truncate(self.cache.reusable(max(0, min(shared, len(ids) - 1))))
        self.tokens = list(ids)

    def interrupt(self) -> None:
        """End the answer under way with the pass under way. May be called from a signal handler or another thread."""
        self.interrupted = True

    def _answer(self, turn: Turn, sampling: Sampling) -> Iterator[Step]:
        speech = Speech(self.tokenizer, sampling.stop)
        held: Step | None = None  # a step whose text a later token decides
        try:
            for step in self._tokens(turn, sampling):
                if held:
                    yield held
                step.text = speech.add(step.token)
                turn.text += step.text
                turn.generated_tokens += 1
                held = step if speech.waiting or speech.ended else None
                if speech.ended:
                    turn.stop = "stop"
                    break
                if not held:
                    yield step
            if held:
                rest = speech.finish()
                held.text += rest
                turn.text += rest
                yield held
        except NotFinite:
            self.cache.truncate(self.cache.reusable(turn.reused_tokens))
            raise
        finally:
            if self.last is turn:
                self._catch_up()

    def _catch_up(self) -> None:
        """Cut the cache to ``tokens``, when a draft that came true is not wanted to its end."""
        if self.cache.length > len(self.tokens):
            self.cache.truncate(self.cache.reusable(len(self.tokens)))

    def _tokens(self, turn: Turn, sampling: Sampling) -> Iterator[Step]:
        """The decode loop: logits of all tokens so far, draw one, append it; until something ends it."""
        if self.last is not turn:  # another answer began before this one did
            return
        room = self.cache.longest - len(self.tokens)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        ahead = self._graphs and type(self.drafts) is Drafts
        step, sampler = (self._ahead, self._captured(sampling)) if ahead else (self._judged, self._sampler(sampling))
        sampler.begin(turn.seed, self.tokens)
        self.drafts.begin(self.tokens)
        self._flying, done = None, 0
        while done < limit and self.last is turn:
            start = perf_counter()
            try:
                tokens, logits = step(sampler, min(limit - done, max(1, self.cache.room)))
            except _Interrupted:
                return
            except CacheFull:  # of pages that other sequences hold too
                if not done:
                    raise
                turn.stop = "context"
                return
            seconds = perf_counter() - start - (0 if done else turn.prefill_s)
            turn.decode_s += seconds
            if done:
                turn.decode_tokens += len(tokens)
                turn.decode_bytes += self._weights + self.cache.bytes_used
            for token, row in zip(tokens, logits, strict=False):
                if self.last is not turn:  # another answer has begun, and the cache is its own
                    return
                if token in self.tokenizer.stop_ids:
                    turn.stop = "eos"
                    return
                self.tokens.append(token)
                done += 1
                yield self._step(token, row[None], seconds / len(tokens))
        if done == limit:
            turn.stop = "length" if limit == sampling.max_tokens else "context"

    def _sampler(self, sampling: Sampling) -> Sampler:
        return Sampler(sampling, self.model.config.vocab_size, self.model.device)

    def _captured(self, sampling: Sampling) -> Sampler:
        """The sampler inside the graph, which is made anew where tokens are drawn in another way."""
        if self._graph is None or self._graph.sampler.sampling != sampling.draws:
            self._graph = self._graphs(self.model, self.cache, self._sampler(sampling.draws))
        return self._graph.sampler

    def _judged(self, sampler: Sampler, most: int) -> tuple[list[int], Tensor]:
        """The next tokens, one or as many as a draft foresaw but at most ``most``, and the logits that drew them."""
        draft = self.drafts.propose(self.tokens, most - 1) if self.last.generated_tokens and most > 1 else []
        logits = self._logits(draft)
        return self._drawn(sampler, logits, draft), logits

    def _ahead(self, sampler: Sampler, most: int) -> tuple[list[int], Tensor]:
        """The next token and its logits, for a device that computes while the host reads: the step after it has begun
        by then. Where the answer ends, that step is taken back (``_catch_up``)."""
        if self._flying is None:
            self._flying = self._logits([])
            self._graph.token.copy_(sampler.draw(self._flying[0]))
        elif self.interrupted:
            raise _Interrupted
        logits, reading = self._flying, Reading(self._graph.token)
        if most > 1:
            self.cache.extend(1)
            self._flying = self._graph()
        return [finite(reading.value())], logits

    def _drawn(self, sampler: Sampler, logits: Tensor, draft: list[int]) -> list[int]:
        """The tokens that the rows of logits draw, as far as the draft says the same: behind another token, what was
        computed is void, and the cache forgets it."""
        tokens = []
        for row, drafted in zip(logits, [*draft, None], strict=True):
            tokens.append(sampler(row))
            if tokens[-1] != drafted or drafted in self.tokenizer.stop_ids:
                break
        if draft:
            self.drafts.judge(len(draft), len(tokens) - 1)
            self.last.drafted_tokens += len(draft)
            self.last.accepted_tokens += len(tokens) - 1
            self.cache.truncate(self.cache.reusable(len(self.tokens) + len(tokens) - 1))
        return tokens

    def _logits(self, draft: list[int]) -> Tensor:
        """logits [1 + len(draft), V] after all tokens and after each of the draft; computes what the cache does not
        hold. Raises _Interrupted between two passes."""
        turn, start = self.last, perf_counter()
        tokens = self.tokens + draft if draft else self.tokens
        for hidden in passes(self.model, self.cache, tokens, self._chunk):
            if not turn.generated_tokens:
                turn.computed_tokens = max(0, self.cache.length - turn.reused_tokens)
                turn.prefill_s = perf_counter() - start
                self.on_pass()
            if self.interrupted:
                raise _Interrupted
            last = hidden[-1 - len(draft) :]
        logits = self.model.head(last)
        if not turn.generated_tokens:
            synchronize(self.model.device)  # once a turn, so that prefill and decode are timed apart
            turn.computed_tokens, turn.prefill_s = turn.prompt_tokens - turn.reused_tokens, perf_counter() - start
        return logits

    def _step(self, token: int, logits: Tensor, seconds: float) -> Step:
        tokens = len(self.tokens)
        return Step(token, "", self.cache.held_at(tokens), self.cache.bytes_at(tokens), seconds)

    def compile(self) -> tuple[float, float, float]:
        """Have torch compile the steps, before anything is said, and keep that if it gains: the seconds that it took,
        and tokens per second before and after, measured."""
        before, start = self._speed(), perf_counter()
        undo = self.model.compile_steps()
        self._graph = None
        self._speed()
        seconds, after = perf_counter() - start, self._speed()
        if after < before:
            undo()
            self._graph = None
        return seconds, before, after

    def _speed(self) -> float:
        """Tokens per second of a short answer, of which no trace is left."""
        for _ in self.generate([0], Sampling(temperature=1000, seed=0, max_tokens=24)):
            pass
        speed, self.last = self.last.decode_tok_s, None
        self.hold([])
        return speed

    # -- branches, and sessions on disk

    def fork(self) -> Session:
        """A second session with the same past, which both hold once. Raises SessionError for a cache without pages."""
        if not hasattr(self.cache, "fork"):
            raise SessionError(f"branches share the pages of their past, and --cache {self.cache.kind} has none")
        self._catch_up()
        twin = type(self)(self.model, self.cache.fork(), self.tokenizer)
        twin.tokens, twin.drafts = list(self.tokens), self.drafts
        return twin

    def fingerprint(self) -> dict[str, str]:
        """What a saved cache must agree in with the one that is to hold it, part by part."""
        return {
            "number of ranks": str(self.model.world),
            "weights": self.model.fingerprint,
            "config": sha256(str(replace(self.model.config, dtype=None)).encode()).hexdigest(),
            "dtype": str(self.cache.dtype).removeprefix("torch."),
            "cache kind": self.cache.layout,
            "tokenizer": self._tokenizer_digest,
        }

    @cached_property
    def _tokenizer_digest(self) -> str:
        pieces = map(self.tokenizer.piece, range(self.model.config.vocab_size))
        return sha256(b"\n".join(pieces)).hexdigest()

    def save(self, path: str | Path, about: str = "") -> None:
        """Keep the tokens, what the cache holds of them, and ``about``, a text of the caller's, in a safetensors file.

        The file is readable by its owner alone, and is either the old one or the new one at every instant. Raises
        SessionError.
        """
        self._catch_up()
        metadata = {
            "format": FORMAT,
            "fingerprint": json.dumps(self.fingerprint()),
            "counts": json.dumps(self.cache.counts()),
            "about": about,
            "id": secrets.token_hex(8),  # tells the parts that belong together from those of an older one
        }
        path, saved = Path(path), "nothing was saved"
        try:
            self.cache.save(path, self.tokens, metadata)
            try:
                self.cache.place(path, metadata["id"])
            except RankError:  # this rank's part is in place
                saved = "its text was saved, and its cache was not"
                raise
        except (OSError, RankError) as error:
            why = error if isinstance(error, RankError) else f"{path}: {error.strerror}"
            raise SessionError(f"{why}; {saved}") from None
        finally:
            self.cache.discard(path, metadata["id"])

    def load(self, path: str | Path) -> str:
        """Go on from a saved session: nothing that its cache holds is computed again. Returns ``about``.

        Raises SessionError, SessionMismatch when it belongs to another model or cache, and CacheFull when it does not
        fit; the session is then as it was.
        """
        damaged = SessionError(f"{path}: not a saved session, or a damaged one")
        try:
            with opened(path) as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise damaged
                saved = {"number of ranks": "1", **json.loads(metadata["fingerprint"])}
                counts, about = json.loads(metadata["counts"]), metadata["about"]
                for part, value in self.fingerprint().items():
                    if saved.get(part) != value:
                        raise SessionMismatch(f"{path}: its {part} is another", part, about)
                tokens = file.get_tensor("tokens").tolist()
                if not 0 <= min(counts.values()) <= counts["length"] <= len(tokens):
                    raise damaged
            self.cache.load(Path(path), metadata)
        except OSError as error:
            raise SessionError(f"{path}: {error.strerror or error}") from None
        except RankError as error:
            raise SessionMismatch(str(error), "", about) from None
        except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, AttributeError):
            raise damaged from None
        self.tokens = tokens
        return about


FORMAT = "kv-chat session 1"


class VerifyingSession(Session):
    """A Session that recomputes the whole prefix beside each step, without a cache, and says how far the logits
    differ."""

    def _step(self, token: int, logits: Tensor, seconds: float) -> Step:
        step = super()._step(token, logits, seconds)
        nothing = NoCache(self.model.config, len(self.tokens), self.model.device, self.cache.dtype)
        (hidden,) = passes(self.model, nothing, self.tokens[:-1], self._chunk)
        recomputed = self.model.head(hidden[-1:])
        step.max_abs_diff = (logits - recomputed).abs().max().item()
        step.argmax_equal = bool(logits.argmax() == recomputed.argmax())
        return step


def passes(model: Llama, cache: KVCache, tokens: list[int], chunk: int) -> Iterator[Tensor]:
    """Bring the cache up to ``tokens``, at most ``chunk`` of them a pass; yields each pass's hidden [T, hidden_size].

    A pass that fails leaves the cache as it was before it.
    """
    done = False
    while not done:
        held = cache.length
        part = cache.missing(tokens, chunk)
        done = held + len(part) == len(tokens)
        try:
            cache.extend(len(part))
            hidden = model(torch.tensor(part, device=model.device), cache)
        except BaseException:
            cache.truncate(cache.reusable(held))
            raise
        yield hidden


def check_prompt(ids: list[int], longest: int, vocab_size: int) -> None:
    """Raises ValueError for an empty prompt, or for ids outside the vocabulary, and CacheFull for more than ``longest``
    of them."""
    if not ids:
        raise ValueError("the prompt is empty")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"the prompt has token ids outside the model's vocabulary of {vocab_size}")
    if len(ids) > longest:
        sizes = f"the prompt has {len(ids)} tokens and the context holds {longest}"
        raise CacheFull(f"{sizes}; shorten it, or take a larger --ctx-size")


def chunk_size(model: Llama) -> int:
    """Tokens of one prefill pass: enough to be fast, and few enough that Ctrl-C, which waits for the pass, waits under
    a second.

    It depends on the model alone and not on a clock, so that the same prompt is always computed in the same way.
    """
    if model.rotary.kind == "dynamic":
        return 2**31  # all of the prompt: its keys turn by how long the pass makes the context
    operations = 2**37 if model.device.type == "cpu" else 2**44  # about half a second's
    tokens = operations // (2 * model.products_per_token)
    return min(2048, max(16, 1 << max(0, tokens.bit_length() - 1)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
