"""The seam between model and cache: what attention reads, and what every kind of cache promises.

``extend`` makes room for the tokens of a pass, ``attend`` stores their k and v and returns what attention reads. What
is held may lie in several pieces (pages, quantized blocks, a ring): attention over each piece is exact by itself, and
the pieces are weighed against each other by how much of the softmax's mass they hold. So a kind of cache is a layout:
how it stores, and in which pieces it reads.

Shapes: ``T`` tokens of the pass, ``S`` tokens held, ``Hq``, ``Hkv`` heads, ``D`` head_dim.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import native
from linear import cpu_multiplies
from storage import discard, opened, place, write_tensors


class CacheFull(Exception):
    """The tokens do not fit; nothing was changed. The text is one line with both numbers."""


class RankError(Exception):
    """What another rank could not do; the text is one line that names it."""


# ---- attention


@cache
def triton_serves(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on CUDA, of which not every GPU will do, and with a C compiler at hand. The
    smallest attention tells, before anything relies on it."""
    if device.type != "cuda":
        return False
    try:
        from flash import paged_attention

        ones, table = torch.ones(1, 1, 16, device=device), torch.ones(1, 1, dtype=torch.int32, device=device)
        return paged_attention(ones, ones, ones, table - 1, table[0], 1).eq(1).all().item()
    except Exception:  # whatever stops it, torch's own calls do the same
        return False


class Piece(NamedTuple):
    """Some of the keys and values that a pass reads, k and v [Hkv, S, D].

    Every query sees all of them; or, ``causal``, query i the first i + 1; or those where ``mask`` [T, S] is 0 and not
    -inf.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False


def attention(q: Tensor, pieces: Iterable[Piece]) -> Tensor:
    """softmax(q kᵀ / √D) v, each K/V head serving its group of Hq / Hkv query heads (arXiv 1706.03762, 2305.13245).

    q [T, Hq, D] -> [T, Hq, D]. Over several pieces: the softmax of all is the sum of the softmax of each, weighted
    with its share of the mass exp(q kᵀ / √D), whose logarithm comes with it (flash-decoding does the same between
    the processors of a GPU). The first piece has something to see for every query.
    """
    pieces = iter(pieces)
    first, second = next(pieces), next(pieces, None)
    if len(q) == 1 and second is None and first.mask is None:  # a step: the same as below, in as few calls as can be
        k, v = first.k.unsqueeze(0), first.v.unsqueeze(0)
        folded = q.to(k.dtype).view(1, k.shape[1], -1, k.shape[-1])
        return scaled_dot_product_attention(folded, k, v).view(q.shape).to(q.dtype)
    grouped = q.unflatten(1, (first.k.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, group, T, D]
    if second is None:
        *folded, mask = _fold(grouped, first)
        y = scaled_dot_product_attention(*folded, attn_mask=mask, is_causal=first.causal)
    else:
        y, mass = _partial(grouped, first)
        while second is not None:
            more, its_mass = _partial(grouped, second)
            y = torch.lerp(y, more, torch.sigmoid(its_mass - mass)[..., None])
            mass, second = torch.logaddexp(mass, its_mass), next(pieces, None)
    return y.reshape(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def _fold(q: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and mask as torch's kernels want them, K and V not repeated.

    Where no query is barred from anything, the heads of a group are just more queries, [1, Hkv, group · T, D]. Else
    each head of a group looks at the same K and V through a view with stride 0, [Hkv, group, S, D].
    """
    k, v, mask = piece.k, piece.v, piece.mask
    if k.device.type == "cpu" and k.dtype is torch.float16 and not cpu_multiplies(k.dtype):
        k, v = k.float(), v.float()  # twice as fast there as torch's own 16-bit loop
    q, mask = q.to(k.dtype), mask if mask is None else mask.to(k.dtype)
    if mask is None and not piece.causal:
        return q.reshape(1, q.shape[0], -1, q.shape[-1]), k[None], v[None], None
    return q, *(x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v)), mask


def _partial(q: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Attention over one piece, float32 [Hkv, group, T, D], and the logarithm of its mass [Hkv, group, T]."""
    (*folded, mask), aten = _fold(q, piece), torch.ops.aten
    if q.device.type == "cpu":
        y, mass = aten._scaled_dot_product_flash_attention_for_cpu(*folded, 0.0, piece.causal, attn_mask=mask)
    elif q.device.type == "cuda" and mask is None and piece.k.dtype is not torch.float32:
        y, mass = aten._scaled_dot_product_flash_attention(*folded, 0.0, piece.causal)[:2]
    else:
        y, mass = _by_hand(*folded, mask, piece.causal)
    y, mass = y.float().reshape(q.shape), mass.float().reshape(q.shape[:-1])
    if mask is not None:  # a query that sees nothing of the piece; the CPU's kernel gives it the mass of one
        mass = mass.masked_fill(mask.isinf().all(-1), -torch.inf)
    return y, mass


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """What the kernels compute, for a device that has none: the scores of all queries at once."""
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    mass = scores.logsumexp(-1)
    # Where a query sees nothing, its scores and its mass are -inf, and their difference is to be that too.
    return (scores - mass.clamp(min=-1e30)[..., None]).exp() @ v.float(), mass


# ---- what every kind promises


class KVCache(ABC):
    """What every kind of cache promises to the model and to the session.

    ``length`` tokens are held of at most ``capacity``; ``positions`` [T] int64, on the device, are those of the pass
    under way.
    """

    kind: str
    forgotten = 0  # tokens that were dropped from the middle
    _kernels: list[native.Held] | None = None  # by layer, where they can read K and V

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype):
        self.config, self.capacity, self.device, self.dtype = config, capacity, torch.device(device), dtype
        self.length = 0
        self.positions = torch.empty(0, dtype=torch.int64, device=self.device)
        self._span = 0, 0  # where the tokens of the pass stand among those held
        self._worked_out: dict[tuple, object] = {}  # what all layers of a pass have in common

    # -- sizes

    @classmethod
    def bytes_for(cls, config, tokens: int, dtype: torch.dtype) -> int:
        """Exact bytes of K and V of ``tokens`` tokens in all layers."""
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize * tokens

    @classmethod
    def bytes_each(cls, config, dtype: torch.dtype) -> int:
        """Bytes that one token more takes in the long run."""
        return cls.bytes_for(config, 1, dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_each(self.config, self.dtype)

    def bytes_at(self, length: int) -> int:
        """Bytes that hold a sequence of ``length`` tokens."""
        return self.bytes_for(self.config, length, self.dtype)

    @property
    def bytes_used(self) -> int:
        return self.bytes_at(self.length)

    @property
    def bytes_reserved(self) -> int:
        return self.bytes_for(self.config, self.capacity, self.dtype)

    def held_at(self, length: int) -> int:
        """How many tokens of a sequence of ``length`` have their K and V here."""
        return length

    @property
    def held(self) -> int:
        return self.held_at(self.length)

    @property
    def longest(self) -> int:
        """The longest sequence that can be held."""
        return self.capacity

    @property
    def room(self) -> int:
        """Tokens that fit now, without anything being forgotten for them."""
        return self.longest - self.length

    # -- a pass

    def missing(self, tokens: list[int], limit: int) -> list[int]:
        """The part of a sequence that the next pass must bring: what is not held yet, at most ``limit`` tokens of
        it."""
        return tokens[self.length : self.length + limit]

    def extend(self, n: int) -> None:
        """Make room for the ``n`` tokens of a pass, and set their positions. Runs before the model.

        Raises CacheFull, nothing changed, when they do not fit.
        """
        start, end = self.held, self.held + n
        if end > self.capacity:
            raise CacheFull(f"{end} tokens do not fit the {self.capacity} that the cache holds")
        self.positions = torch.arange(start, end, device=self.device)
        self._span, self._worked_out = (start, end), {}
        self.length += n

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] of the pass, and attend with q [T, Hq, D] over all that is held -> [T, Hq, D]."""
        if self._kernels_serve(len(q)):
            return self._kernels[layer].attend(q, self._seen(layer), (k, v))
        q, k, v = q.to(self.dtype), k.to(self.dtype).transpose(0, 1), v.to(self.dtype).transpose(0, 1)
        if len(q) == 1:
            self._store(layer, k, v)
            return self._look(layer, q, k, v)
        y = self._look(layer, q, k, v)
        self._store(layer, k, v)
        return y

    def _look(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend over what is held; a single token is among it, those of a longer pass need not be yet."""
        end, first = self._span[1], self._oldest(layer)
        if len(q) == 1:
            return attention(q, (Piece(*kv) for kv in self._read(layer, first, end)))
        return attention(q, self._pieces(layer, first, k, v))

    def for_kernels(self, tokens: int) -> list[tuple[native.Held, native.Seen]] | None:
        """By layer, where the tokens lie that those of the pass see, if kernels do what ``attend`` does: then model and
        cache may meet in one call for all layers."""
        if not self._kernels_serve(tokens):
            return None
        return [(held, self._seen(layer)) for layer, held in enumerate(self._kernels)]

    def _kernels_serve(self, tokens: int) -> bool:
        return self._kernels is not None and tokens <= native.most_tokens(self.dtype)

    def _seen(self, layer: int) -> native.Seen:
        """What the tokens of the pass see."""
        if (key := ("seen", self.config.windows[layer])) not in self._worked_out:
            tokens = self._span[1] - self._span[0]
            self._worked_out[key] = native.Seen([(tokens, self._stretches(layer))], self.config.windows[layer])
        return self._worked_out[key]

    def _stretches(self, layer: int) -> list[tuple[int, int, int]]:
        """Where that lies, as native.Seen has it."""
        return [(0, *run) for run in self._runs(layer, self._oldest(layer), self._span[1])]

    def _runs(self, layer: int, first: int, last: int) -> list[tuple[int, int]]:
        """The slots of the tokens first to last, each the first of some that follow each other and one behind them."""
        return [(first, last)]

    def _oldest(self, layer: int) -> int:
        """The oldest token that any query of the pass sees."""
        window = self.config.windows[layer]
        return 0 if window is None else max(0, self._span[0] + 1 - window)

    def _pieces(self, layer: int, first: int, k: Tensor, v: Tensor) -> Iterator[Piece]:
        """The pass's own tokens, and what was held before them: all of that is in the past of every query."""
        start, window = self._span[0], self.config.windows[layer]
        yield self._piece(k, v, start, window)
        for keys, values in self._read(layer, first, start) if first < start else ():
            yield self._piece(keys, values, first, window)
            first += keys.shape[1]

    def _piece(self, k: Tensor, v: Tensor, first: int, window: int | None) -> Piece:
        """The tokens from ``first`` on, as the pass's queries see them."""
        (start, end), slots = self._span, k.shape[1]
        if window is None or first > end - 1 - window:  # no query has left it behind
            return Piece(k, v, causal=first == start)
        if (key := (first, slots, window)) not in self._worked_out:
            at, positions = torch.arange(first, first + slots, device=self.device), self.positions[:, None]
            hidden = (at > positions) | (at <= positions - window)
            zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self._worked_out[key] = zeros.masked_fill_(hidden, -torch.inf)
        return Piece(k, v, self._worked_out[key])

    @abstractmethod
    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep k and v [Hkv, T, D] of the last T tokens of the pass."""

    @abstractmethod
    def _read(self, layer: int, first: int, last: int) -> Iterable[tuple[Tensor, Tensor]]:
        """K and V of the held tokens ``first`` to ``last`` (not included), in order, in one piece or several."""

    # -- cutting, keeping

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on. Raises ValueError when it is negative, more than is held, or not
        ``reusable``."""
        if not 0 <= length <= self.length or self.reusable(length) < length:
            raise ValueError(f"cannot cut a cache of {self.length} tokens to {length}")
        self.length = length

    def reusable(self, length: int) -> int:
        """The longest prefix, of at most ``length`` tokens, that ``truncate`` can still cut to."""
        return min(length, self.length)

    @property
    def layout(self) -> str:
        """What two caches must have in common for ``restore``, besides the model and the dtype."""
        return self.kind

    def counts(self) -> dict[str, int]:
        """The numbers that ``restore`` needs beside the tensors."""
        return {"length": self.length}

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What is held, used part only: for each layer a name and K and V, [2, Hkv, S, D]."""
        for layer, name in enumerate(self._layers):
            keys, values = zip(*self._read(layer, 0, self.held), strict=True)
            yield name, torch.stack((torch.cat(keys, 1), torch.cat(values, 1)))

    def shapes(self, counts: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """The tensors of a ``state`` with such ``counts``. Raises ValueError or KeyError for counts that cannot be."""
        return dict.fromkeys(self._layers, (2, self.config.num_key_value_heads, counts["length"], self.config.head_dim))

    @property
    def _layers(self) -> list[str]:
        return [f"layers.{layer}" for layer in range(self.config.num_hidden_layers)]

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        """Hold what ``counts`` and ``state`` told of another cache of this kind; ``read`` gives a tensor by name, of
        which ``shapes`` has told the shape. Raises CacheFull, nothing changed, when it does not fit."""
        if counts["length"] > self.capacity:
            raise CacheFull(f"{counts['length']} tokens do not fit the {self.capacity} that the cache holds")
        self.truncate(0)
        self.extend(counts["length"])
        try:
            for layer, name in enumerate(self._layers):
                self._store(layer, *read(name).to(self.device))
        except BaseException:
            self.truncate(0)
            raise

    # -- on disk

    def save(self, path: Path, tokens: list[int], metadata: dict[str, str]) -> None:
        """Write what is held into a safetensors file beside ``path``, with the tokens that it stands for and with
        ``metadata``, of which "counts" is the JSON of ``counts`` and "id" is new. Raises OSError.

        By that id, ``place`` or ``discard`` it then: no rank replaces its part before all have written theirs.
        """
        state = ((f"cache.{name}", tensor) for name, tensor in self.state())
        write_tensors(path, metadata["id"], chain([("tokens", torch.tensor(tokens))], state), metadata)

    def place(self, path: Path, mark: str) -> None:
        """Put what was saved at ``path``. Raises OSError, the old file being whole."""
        place(path, mark)

    def discard(self, path: Path, mark: str) -> None:
        """Delete what was saved and not placed, if anything was."""
        discard(path, mark)

    def load(self, path: Path, metadata: dict[str, str]) -> None:
        """Hold again what was saved with this ``metadata``. Raises CacheFull, nothing changed, when it does not fit,
        and OSError or ValueError, which name the file, for another one or a damaged one."""
        counts = json.loads(metadata["counts"])
        try:
            with opened(path) as file:
                if file.metadata() != metadata:
                    raise ValueError(f"{path} was saved at another time")
                for name, shape in self.shapes(counts).items():
                    if tuple(file.get_slice(f"cache.{name}").get_shape()) != shape:
                        raise ValueError(f"{path}: {name} is not {shape}")
                self.restore(counts, lambda name: file.get_tensor(f"cache.{name}"))
        except SafetensorError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
