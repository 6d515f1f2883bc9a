"""The KV cache: keeps K and V of every token, and attends over them.

Why K and V, and not Q: token t's output reads the keys and values of all tokens up to t, but only its own query. A
query is used once, in the pass that makes it; keys and values are read again by every later token. Keeping them turns
a step from a pass over the whole prefix into a pass over one token, at a price in memory:

    bytes per token = 2 (K and V) × num_hidden_layers × num_key_value_heads × head_dim × bytes per value

With ``num_key_value_heads`` smaller than ``num_attention_heads`` (GQA, MQA) that price falls in proportion, because
each K/V head is stored once and read by its whole group of query heads; it is never repeated in memory.

Keys are stored after their rotation by position. So a prefix that is cut off leaves the rest right, and nothing can be
taken out of the middle without turning the keys behind it (``SinkCache`` does that).

What every kind promises is in seam.py; here are the kinds for one conversation, and ``make`` for all of them. Shapes:
``T`` tokens of the pass, ``S`` tokens held, ``Hq``, ``Hkv`` heads, ``D`` head_dim.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

import native
from paged import PagedCache
from quantized import Int4Cache, Int8Cache
from seam import CacheFull, KVCache, attention, triton_serves

# ---- one conversation


class NoCache(KVCache):
    """Keeps nothing, so that each step recomputes K and V of the whole prefix: what a KV cache saves, and the oracle
    of its tests."""

    kind = "none"

    @classmethod
    def bytes_for(cls, config, tokens: int, dtype: torch.dtype) -> int:
        return 0

    def held_at(self, length: int) -> int:
        return 0

    def missing(self, tokens: list[int], limit: int) -> list[int]:
        """All of it, in one pass: there is nothing held that a second pass could build on."""
        return tokens

    def extend(self, n: int) -> None:
        super().extend(n)
        self.length = 0  # nothing is kept, so the next pass must bring everything again

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.to(self.dtype).transpose(0, 1), v.to(self.dtype).transpose(0, 1)
        return attention(q.to(self.dtype), self._pieces(layer, 0, k, v))

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        pass

    def _read(self, layer: int, first: int, last: int) -> Iterable[tuple[Tensor, Tensor]]:
        return ()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def shapes(self, counts: dict[str, int]) -> dict[str, tuple[int, ...]]:
        return {}

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        pass


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
        self.keys_values = self._memory(
            (config.num_hidden_layers, 2, config.num_key_value_heads, capacity, config.head_dim)
        )
        self._layer = [layer.unbind() for layer in self.keys_values]  # K and V [Hkv, capacity, D] of each
        self._kernels = native.held(self._layer)

    def _memory(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        tokens = k.shape[1]
        for held, new in zip(self._layer[layer], (k, v), strict=True):
            held.narrow(1, self._span[1] - tokens, tokens).copy_(new)

    def _read(self, layer: int, first: int, last: int) -> Iterable[tuple[Tensor, Tensor]]:
        keys, values = self._layer[layer]
        return ((keys.narrow(1, first, last - first), values.narrow(1, first, last - first)),)


class FlashCache(ContiguousCache):
    """The same on CUDA, where a step reads nothing that the host decides: its position and the length stand in tensors
    that ``extend`` writes and that stay where they are, and the kernel of flash.py takes them from there. So a CUDA
    graph that has captured a step (graph.py) is right for each later one."""

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype):
        super().__init__(config, capacity, device, dtype)
        self._newest = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._lengths = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._tables = torch.zeros((1, 1), dtype=torch.int32, device=self.device)  # all of it is one page

    def extend(self, n: int) -> None:
        super().extend(n)
        if n == 1:
            self.positions = self._newest.fill_(self.length - 1)
            self._lengths.fill_(self.length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) > 1:
            return super().attend(layer, q, k, v)
        from flash import paged_attention

        where, window = (self._tables, self._lengths, self.capacity), self.config.windows[layer]
        return paged_attention(q, *self._layer[layer], *where, window=window, new=(k, v))


class WindowCache(KVCache):
    """Of layers with a sliding window (Mistral, arXiv 2310.06825, §2), keeps the window and no more: a ring, in which
    token p stands in slot p mod ring. Layers without a window keep all.

    The ring has ``SLACK`` slots more than the window, so that so many tokens can be taken back; a deeper cut finds
    overwritten what it needs, and the conversation is computed anew.
    """

    kind = "window"
    SLACK = 256

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype):
        super().__init__(config, capacity, device, dtype)
        self._newest = 0  # tokens ever written since the last cut to nothing
        shape = 2, config.num_key_value_heads
        self.rings = [
            torch.empty((*shape, self._slots(config, layer, capacity), config.head_dim), dtype=dtype, device=device)
            for layer in range(config.num_hidden_layers)
        ]
        self._kernels = native.held(self.rings)

    @classmethod
    def _slots(cls, config, layer: int, tokens: int) -> int:
        window = config.windows[layer]
        return tokens if window is None else min(tokens, window + cls.SLACK)

    @classmethod
    def bytes_for(cls, config, tokens: int, dtype: torch.dtype) -> int:
        slots = sum(cls._slots(config, layer, tokens) for layer in range(config.num_hidden_layers))
        return 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize * slots

    def extend(self, n: int) -> None:
        super().extend(n)
        self._newest = max(self._newest, self.length)

    def _kernels_serve(self, tokens: int) -> bool:
        return tokens <= self.SLACK and super()._kernels_serve(tokens)  # all of them are stored before any is attended

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        ring, end = self.rings[layer], self._span[1]
        slots = ring.shape[2]
        k, v = k[:, -slots:], v[:, -slots:]
        for old, new, slot in self._arcs(slots, end - k.shape[1], end):
            ring[0, :, slot].copy_(k[:, old:new])
            ring[1, :, slot].copy_(v[:, old:new])

    def _read(self, layer: int, first: int, last: int) -> Iterable[tuple[Tensor, Tensor]]:
        return [tuple(self.rings[layer][:, :, a:b]) for a, b in self._runs(layer, first, last)]

    def _runs(self, layer: int, first: int, last: int) -> list[tuple[int, int]]:
        return [(slot.start, slot.stop) for _, _, slot in self._arcs(self.rings[layer].shape[2], first, last)]

    @staticmethod
    def _arcs(slots: int, first: int, last: int) -> list[tuple[int, int, slice]]:
        """Tokens first to last as at most two stretches of a ring: begin and end counted from first, and the slots."""
        turn = min(last, (first // slots + 1) * slots)  # the first token behind the ring's end
        ends = [(first, turn), (turn, last)] if turn < last else [(first, last)]
        return [(a - first, b - first, slice(a % slots, a % slots + b - a)) for a, b in ends]

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._newest = self._newest if length else 0

    def reusable(self, length: int) -> int:
        length = super().reusable(length)
        for window, ring in zip(self.config.windows, self.rings, strict=True):
            if window is not None and max(0, length + 1 - window) < self._newest - ring.shape[2]:
                return 0  # what the next token would see was overwritten
        return length

    def counts(self) -> dict[str, int]:
        return {"length": self.length, "newest": self._newest}

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, ring in zip(self._layers, self.rings, strict=True):
            arcs = self._arcs(ring.shape[2], max(0, self._newest - ring.shape[2]), self.length)
            yield name, torch.cat([ring[:, :, slot] for _, _, slot in arcs], 2)

    def shapes(self, counts: dict[str, int]) -> dict[str, tuple[int, ...]]:
        lost = {
            name: max(0, counts["newest"] - ring.shape[2]) for name, ring in zip(self._layers, self.rings, strict=True)
        }
        if not max(lost.values()) <= counts["length"] <= counts["newest"]:
            raise ValueError(counts)
        whole = super().shapes(counts)
        return {name: (2, heads, length - lost[name], dim) for name, (_, heads, length, dim) in whole.items()}

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        super().restore(counts, read)
        self._newest = counts["newest"]


class SinkCache(ContiguousCache):
    """For chats without end: keeps the first tokens, which attention leans on as sinks, and the recent ones; when it
    is full, it forgets an eighth from the middle (StreamingLLM, arXiv 2309.17453).

    As in the paper (§3.2), positions are those within the cache, so that they never exceed what the model was made
    for. Keys lie here turned by their position, so those behind the gap are turned back by its length. What the
    forgotten tokens gave to later ones stays in those.
    """

    kind = "sinks"

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype, sinks: int = 4):
        super().__init__(config, capacity, device, dtype)
        if not 0 <= sinks <= capacity // 2:
            raise CacheFull(
                f"sinks are {sinks}, and must be from 0 to half of the {capacity} tokens that the cache holds"
            )
        self.sinks = sinks

    @property
    def longest(self) -> int:
        return 2**31

    def held_at(self, length: int) -> int:
        return min(length - self.forgotten, self.capacity)

    def bytes_at(self, length: int) -> int:
        return super().bytes_at(self.held_at(length))

    @property
    def room(self) -> int:
        return min(self.capacity - self.held, self._eighth)

    def missing(self, tokens: list[int], limit: int) -> list[int]:
        """At most an eighth at a time, so that every token finds nearly the whole recent past."""
        return super().missing(tokens, min(limit, self._eighth))

    @property
    def _eighth(self) -> int:
        return max(1, (self.capacity - self.sinks) // 8)

    def extend(self, n: int) -> None:
        over = self.held + n - self.capacity
        if 0 < over <= self.held - self.sinks:
            self._forget(min(max(over, self._eighth), self.held - self.sinks))
        super().extend(n)

    def _forget(self, count: int) -> None:
        length, first, last = self.length, self.sinks + count, self.held
        forgotten, self.forgotten, self.length = self.forgotten + count, 0, self.sinks  # whole if it breaks off here
        for layer, keys_values in enumerate(self.keys_values):
            recent = keys_values[:, :, first:last].clone()
            if self.config.rotary[layer]:
                recent[0] = self.config.turn(recent[0], -count)
            keys_values[:, :, self.sinks : last - count] = recent
        self.forgotten, self.length = forgotten, length

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if length <= self.sinks:
            self.forgotten = 0

    def reusable(self, length: int) -> int:
        length = super().reusable(length)
        return length if not self.forgotten or length > self.sinks + self.forgotten else min(length, self.sinks)

    @property
    def layout(self) -> str:
        return f"sinks {self.sinks}"

    def counts(self) -> dict[str, int]:
        return {"length": self.length, "forgotten": self.forgotten}

    def shapes(self, counts: dict[str, int]) -> dict[str, tuple[int, ...]]:
        if counts["forgotten"] > max(0, counts["length"] - self.sinks):
            raise ValueError(counts)
        return super().shapes({"length": counts["length"] - counts["forgotten"]})

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        super().restore({"length": counts["length"] - counts["forgotten"]}, read)
        self.forgotten, self.length = counts["forgotten"], counts["length"]


# ---- larger than the device


class OffloadCache(ContiguousCache):
    """All of K and V in the host's memory, or in a file in ``folder``: a context larger than the device, or than the
    memory. On a CPU, layers are attended where they lie, and those of a file leave memory again when they were."""

    kind = "offload"

    def __init__(
        self, config, capacity: int, device: str | torch.device, dtype: torch.dtype, folder: Path | None = None
    ):
        self.folder, self._map = folder, None
        super().__init__(config, capacity, device, dtype)

    def _memory(self, shape: tuple[int, ...]) -> Tensor:
        if self.folder is None:
            return torch.empty(shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        size = math.prod(shape) * self.dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:  # it has no name, so that nothing is left of it
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here, and not as a crash later
                else:
                    os.ftruncate(file.fileno(), size)
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise CacheFull(f"{self.folder}: {error.strerror}; the cache takes {size:,} bytes there") from None
        return torch.frombuffer(self._map, dtype=self.dtype).view(shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._map is not None:
            self._advise(mmap.MADV_WILLNEED, (layer + 1) % self.config.num_hidden_layers)
        y = super().attend(layer, q, k, v)
        if self._map is not None:
            self._advise(mmap.MADV_DONTNEED, layer)
        return y

    def for_kernels(self, tokens: int) -> list[tuple[native.Held, native.Seen]] | None:
        return super().for_kernels(tokens) if self._map is None else None  # of a file, layer by layer

    def _advise(self, advice: int, layer: int) -> None:
        """Tell the system what becomes of a layer's part of the file; whole pages of it."""
        size = self.keys_values[0].nbytes
        start, end = (
            -(-layer * size // mmap.PAGESIZE) * mmap.PAGESIZE,
            (layer + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if end > start:
            self._map.madvise(advice, start, end - start)


class StagedCache(OffloadCache):
    """OffloadCache for a device with memory of its own: two windows of one layer each are there, and while one layer is
    attended, the next one is copied into the other window."""

    def __init__(
        self, config, capacity: int, device: str | torch.device, dtype: torch.dtype, folder: Path | None = None
    ):
        super().__init__(config, capacity, device, dtype, folder)
        self._kernels = None  # what is attended lies in a window
        self._windows = [torch.empty(self.keys_values.shape[1:], dtype=dtype, device=device) for _ in range(2)]
        self._coming: int | None = None  # the layer that is in the second window, or on its way
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers = self.config.num_hidden_layers
        if self._coming != layer:
            self._fetch(layer)
        self._windows.reverse()
        self._coming = None  # until the next one is under way
        if self._stream:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if layers > 1:
            self._fetch((layer + 1) % layers)
        return super().attend(layer, q, k, v)

    def _fetch(self, layer: int) -> None:
        """Begin to copy a layer into the second window, head by head, since only what lies in one piece is copied
        while the device computes."""
        if self._stream:  # what was attended in that window is done first
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        held = self._span[0] if layer else self._span[1]  # the first layer is fetched for the next pass
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for window, host in zip(self._windows[1].flatten(0, 1), self.keys_values[layer].flatten(0, 1), strict=True):
                window[:held].copy_(host[:held], non_blocking=True)
        self._coming = layer

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        at = slice(self._span[1] - k.shape[1], self._span[1])
        for i, x in enumerate((k, v)):
            self._windows[0][i, :, at] = x
            for host, head in zip(self.keys_values[layer, i], x.contiguous(), strict=True):
                host[at].copy_(head, non_blocking=True)

    def _read(self, layer: int, first: int, last: int) -> Iterable[tuple[Tensor, Tensor]]:
        return (self._windows[0][:, :, first:last],)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, keys_values in zip(self._layers, self.keys_values, strict=True):
            yield name, keys_values[:, :, : self.length]

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        super().restore(counts, read)
        self._coming = None


# ---- making one

KINDS: dict[str, type[KVCache]] = {
    kind.kind: kind
    for kind in (NoCache, ContiguousCache, PagedCache, Int8Cache, Int4Cache, OffloadCache, WindowCache, SinkCache)
}


def make(
    kind: str,
    config,
    capacity: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **options,
) -> KVCache:
    """A cache of a kind in ``KINDS``, for a model's config. Raises CacheFull when there is no room for it.

    ``options``: for offload, ``folder``, in which its file is to be; for sinks, how many ``sinks``.
    """
    device, cls = torch.device(device), KINDS[kind]
    if cls is OffloadCache:
        place, cls = torch.device("cpu"), cls if device.type == "cpu" else StagedCache
    else:
        place = device
    if cls is ContiguousCache and triton_serves(device):
        cls = FlashCache
    needed, free = cls.bytes_for(config, capacity, dtype), free_memory(place)
    if needed > free and options.get("folder") is None:
        fits = capacity * free // needed
        raise CacheFull(
            f"a cache of {capacity} tokens needs {needed:,} bytes and {free:,} are free; --ctx-size {fits} would fit"
        )
    try:
        return cls(config, capacity, device, dtype, **options)
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
