"""The KV cache: keeps K and V of every token, and attends over them.

Why K and V, and not Q: token t's output reads the keys and values of all tokens up to t, but only its own query. A
query is used once, in the pass that makes it; keys and values are read again by every later token. Keeping them turns
a step from a pass over the whole prefix into a pass over one token, at a price in memory:

    bytes per token = 2 (K and V) × num_hidden_layers × num_key_value_heads × head_dim × bytes per value

With ``num_key_value_heads`` smaller than ``num_attention_heads`` (GQA, MQA) that price falls in proportion, because
each K/V head is stored once and read by its whole group of query heads; it is never repeated in memory.

Keys are stored after their rotation by position. So a prefix that is cut off leaves the rest right, and nothing can be
taken out of the middle: the keys behind it would stand at the wrong places.

Every kind stands behind one door: ``extend`` makes room for the tokens of a pass, ``attend`` stores their k and v and
returns what attention reads. Shapes: ``T`` tokens of the pass, ``S`` tokens held, ``Hq``, ``Hkv`` heads, ``D``
head_dim.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CacheFull(Exception):
    """The tokens do not fit; nothing was changed. The text is one line with both numbers."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v, each K/V head serving its group of Hq / Hkv query heads (arXiv 1706.03762, 2305.13245).

    q [T, Hq, D]; k, v [Hkv, S, D] -> [T, Hq, D]. ``mask`` [T, S] bool is True where a query may look; without one, a
    single query looks at everything and T == S queries each at what came before them and at themselves.
    """
    (tokens, _, dim), (kv_heads, slots, _) = q.shape, k.shape
    if tokens == 1:
        # The heads of a group become the rows of one query, so that K and V are read once for the whole group.
        return scaled_dot_product_attention(q.view(1, kv_heads, -1, dim), k[None], v[None]).reshape(q.shape)
    q = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    # A view with stride 0: the heads of a group look at the same K and V, which are not copied for each.
    k, v = (x[:, None].expand(-1, q.shape[1], slots, dim) for x in (k, v))
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return y.permute(2, 0, 1, 3).flatten(1, 2)


class KVCache(ABC):
    """What every kind of cache promises to the model and to the session.

    ``length`` tokens are held of at most ``capacity``; ``positions`` [T] int64, on the device, are those of the pass
    under way.
    """

    kind: str

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype):
        self.config, self.capacity, self.device, self.dtype = config, capacity, torch.device(device), dtype
        self.length = 0
        self.positions = torch.empty(0, dtype=torch.int64, device=self.device)
        self.masks: dict[int | None, Tensor | None] = dict.fromkeys(config.windows)  # of the pass, for each window

    @classmethod
    def bytes_for(cls, config, tokens: int, dtype: torch.dtype) -> int:
        """Exact bytes of K and V of ``tokens`` tokens in all layers."""
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize * tokens

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_for(self.config, 1, self.dtype)

    @property
    def bytes_used(self) -> int:
        return self.bytes_for(self.config, self.length, self.dtype)

    @property
    def bytes_reserved(self) -> int:
        return self.bytes_for(self.config, self.capacity, self.dtype)

    def missing(self, tokens: list[int], limit: int) -> list[int]:
        """The part of a sequence that the next pass must bring: what is not held yet, at most ``limit`` tokens of
        it."""
        return tokens[self.length : self.length + limit]

    def extend(self, n: int) -> None:
        """Make room for the ``n`` tokens of a pass: their positions, and what each may look at. Runs before the model.

        Raises CacheFull, nothing changed, when they do not fit.
        """
        start, end = self.length, self.length + n
        if end > self.capacity:
            raise CacheFull(f"{end} tokens do not fit the {self.capacity} that the cache holds")
        self.positions = torch.arange(start, end, device=self.device)
        self.masks = {window: self._mask(start, end, window) for window in self.masks}
        self.length = end

    def _mask(self, start: int, end: int, window: int | None) -> Tensor | None:
        """[T, S] bool, which slots each query may look at, or None where the kernel needs no telling."""
        if end - start == 1:
            return None  # one query may see all that it is given
        if start == 0 and (window is None or window >= end):
            return None  # a pass from the first position on is causal, which the kernel does by itself
        slots, positions = torch.arange(end, device=self.device), self.positions[:, None]
        mask = slots <= positions
        return mask if window is None else mask & (slots > positions - window)

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] of the pass, and attend with q [T, Hq, D] over all that is held -> [T, Hq, D]."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on. Raises ValueError when it is negative or more than is held."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of {self.length} tokens to {length}")
        self.length = length


class NoCache(KVCache):
    """Keeps nothing, so that each step recomputes K and V of the whole prefix: what a KV cache saves, and the oracle
    of its tests."""

    kind = "none"

    @classmethod
    def bytes_for(cls, config, tokens: int, dtype: torch.dtype) -> int:
        return 0

    def missing(self, tokens: list[int], limit: int) -> list[int]:
        """All of it, in one pass: there is nothing held that a second pass could build on."""
        return tokens

    def extend(self, n: int) -> None:
        super().extend(n)
        self.length = 0  # nothing is kept, so the next pass must bring everything again

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.transpose(0, 1), v.transpose(0, 1), self.masks[self.config.windows[layer]])


class ContiguousCache(KVCache):
    """One preallocated block for all layers, [layers, K and V, Hkv, capacity, D]; a step writes one slot and reads
    ``length`` of them.

    Heads come before slots, so that what one head reads lies together. The memory is reserved and not yet touched: on
    most systems pages of it become real as tokens come. Nothing ever reads a slot that was not written, so results do
    not depend on capacity.
    """

    kind = "contiguous"

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype):
        super().__init__(config, capacity, device, dtype)
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, capacity, config.head_dim)
        self.keys_values = torch.empty(shape, dtype=dtype, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # `extend` has counted the pass already: its tokens are the last ones of `length`.
        keys, values = self.keys_values[layer, :, :, : self.length]
        keys[:, -len(k) :], values[:, -len(v) :] = k.transpose(0, 1), v.transpose(0, 1)
        window = self.config.windows[layer]
        if len(q) == 1 and window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        return attention(q.to(self.dtype), keys, values, self.masks[window])


KINDS: dict[str, type[KVCache]] = {kind.kind: kind for kind in (NoCache, ContiguousCache)}


def make(
    kind: str, config, capacity: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> KVCache:
    """A cache of a kind in ``KINDS``, for a model's config. Raises CacheFull when the device has no room for it."""
    device, kind = torch.device(device), KINDS[kind]
    needed, free = kind.bytes_for(config, capacity, dtype), free_memory(device)
    if needed > free:
        fits = free // kind.bytes_for(config, 1, dtype)
        raise CacheFull(
            f"a cache of {capacity} tokens needs {needed:,} bytes and {free:,} are free; --ctx-size {fits} would fit"
        )
    try:
        return kind(config, capacity, device, dtype)
    except RuntimeError as error:  # OutOfMemoryError is one
        reason = str(error).splitlines()[0]
        raise CacheFull(
            f"a cache of {capacity} tokens needs {needed:,} bytes, which cannot be had ({reason})"
        ) from None


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device: of the GPU's own memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**63
