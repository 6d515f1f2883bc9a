"""The quantized caches: K and V in 8 or 4 bits, and the scales that make them whole again (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import native
from seam import CacheFull, KVCache

PACKED, RECENT = range(2)  # the memories of a layer


class Recent(NamedTuple):
    """The tokens from ``first`` on that are whole, [layers, 2, Hkv, R, D], and what attends over them and those before;
    together, so that no interrupt finds them at odds."""

    tokens: Tensor
    first: int
    kernels: list[native.Held] | None


class QuantizedCache(KVCache):
    """K and V in few bits: keys by channel, since some channels of K are large in every token and would drown the
    others; values by token (KIVI, arXiv 2402.02750, §3).

    ``GROUP`` tokens share a scale and a zero for each channel of K, so a group is quantized when it is full, and the
    newest ``WHOLE`` tokens, to which attention looks most, stay whole besides. Attention makes blocks of the past
    whole again, one at a time. A pass reads what was quantized before it, and its own tokens whole.
    """

    bits: int
    GROUP, WHOLE, BLOCK = 32, 32, 1024

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype):
        super().__init__(config, capacity, device, dtype)
        groups, dim = capacity // self.GROUP, config.head_dim
        layers, heads = config.num_hidden_layers, config.num_key_value_heads

        packed, by_channel, by_token = (
            (groups * self.GROUP, dim * self.bits // 8),
            (groups, 1, dim),
            (groups * self.GROUP, 1),
        )
        self.packed = [torch.empty((layers, heads, *packed), dtype=torch.uint8, device=device) for _ in "KV"]
        self.scales = [  # the step between two values, and the lowest, of K and of V
            torch.empty((2, layers, heads, *shape), dtype=dtype, device=device) for shape in (by_channel, by_token)
        ]
        # A CPU makes float32 of bytes six times as fast as float16, and attends in it no slower.
        self._arithmetic = torch.float32 if self.device.type == "cpu" else dtype
        self._recent = self._whole_from(0, self._room(0))

    @classmethod
    def _bytes(cls, config, dtype: torch.dtype, quantized: int, whole: int) -> int:
        heads, dim, groups = config.num_key_value_heads, config.head_dim, -(-quantized // cls.GROUP)
        packed, scales = 2 * quantized * dim * cls.bits // 8, 2 * (groups * dim + quantized) * dtype.itemsize
        return config.num_hidden_layers * heads * (packed + scales + 2 * whole * dim * dtype.itemsize)

    @classmethod
    def bytes_for(cls, config, tokens: int, dtype: torch.dtype) -> int:
        quantized = max(0, tokens - cls.WHOLE) // cls.GROUP * cls.GROUP
        return cls._bytes(config, dtype, quantized, tokens - quantized)

    @classmethod
    def bytes_each(cls, config, dtype: torch.dtype) -> int:
        return -(-cls._bytes(config, dtype, cls.GROUP, 0) // cls.GROUP)

    def bytes_at(self, length: int) -> int:
        quantized = min(self._recent[1], length)
        return self._bytes(self.config, self.dtype, quantized, length - quantized)

    @property
    def bytes_reserved(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.packed, *self.scales, self._recent[0]))

    def extend(self, n: int) -> None:
        super().extend(n)
        start, end = self._span
        try:
            self._settle(start, end)
        except BaseException:
            self.length -= n
            raise

    @property
    def _kernels(self) -> list[native.Held] | None:
        return self._recent.kernels

    def _stretches(self, layer: int) -> list[tuple[int, int, int]]:
        first, end, quantized = self._oldest(layer), self._span[1], self._recent.first
        packed = [(PACKED, first, quantized)] if first < quantized else []
        return [*packed, (RECENT, max(0, first - quantized), end - quantized)]

    def _whole_from(self, first: int, recent: Tensor) -> Recent:
        """With what reads it: two memories for each layer."""
        if not native.computes(self.device, self.config.head_dim * self.bits // 8):
            return Recent(recent, first, None)
        kernels = []
        for layer, whole in enumerate(recent):
            packed = native.Memory.packed(*(x[layer] for x in self.packed), *(x[:, layer] for x in self.scales))
            kernels.append(native.Held(self.config.num_key_value_heads, packed, native.Memory.of(*whole)))
        return Recent(recent, first, kernels)

    def _room(self, tokens: int) -> Tensor:
        """For tokens that are whole: those of a pass, of a group that fills, and the newest."""
        room = self.WHOLE + self.GROUP + max(tokens, self.GROUP)
        shape = self.config.num_hidden_layers, 2, self.config.num_key_value_heads, room, self.config.head_dim
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _settle(self, length: int, end: int) -> None:
        """Quantize what is due of the ``length`` tokens held, or make the last group whole again when a cut went
        through it; and make room up to ``end``."""
        recent, first, _ = self._recent
        due = max(first, (length - self.WHOLE) // self.GROUP * self.GROUP)
        if length < first:
            due = length // self.GROUP * self.GROUP
        if due == first and end - first <= recent.shape[3]:
            return
        for group in range(first, due, self.GROUP):
            self._quantize(recent[:, :, :, group - first : group - first + self.GROUP], group)
        room = self._room(end - length)
        if due >= first:
            room[:, :, :, : length - due] = recent[:, :, :, due - first : length - first]
        else:
            for layer in range(len(room)):
                for kept, whole in zip(room[layer], self._whole(layer, due, due + self.GROUP), strict=True):
                    kept[:, : length - due] = whole[:, : length - due]
        self._recent = self._whole_from(due, room)

    def _quantize(self, recent: Tensor, first: int) -> None:
        """One full group of all layers, [layers, 2, Hkv, GROUP, D]."""
        places = first // self.GROUP, slice(first, first + self.GROUP)
        for x, packed, scales, place, dim in zip(
            recent.unbind(1), self.packed, self.scales, places, (2, 3), strict=True
        ):
            x, levels = x.float(), 2**self.bits - 1
            low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
            step = ((high - low) / levels).to(self.dtype).clamp(min=torch.finfo(self.dtype).tiny)
            low = low.to(self.dtype)
            scales[:, :, :, place] = torch.stack((step, low))
            x = ((x - low.float()) / step.float()).round().clamp(0, levels).to(torch.uint8)
            packed[:, :, places[1]] = self._pack(x)

    def _whole(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """K and V of quantized tokens, whole groups of them, [Hkv, S, D]."""
        groups = slice(first // self.GROUP, last // self.GROUP)
        k, v = (self._unpack(packed[layer, :, first:last]).to(self._arithmetic) for packed in self.packed)
        k_step, k_low = self.scales[0][:, layer, :, groups].to(self._arithmetic)
        v_step, v_low = self.scales[1][:, layer, :, first:last].to(self._arithmetic)
        k = k.unflatten(1, (-1, self.GROUP)).mul_(k_step).add_(k_low).flatten(1, 2)
        return k, v.mul_(v_step).add_(v_low)

    def _pack(self, x: Tensor) -> Tensor:
        """uint8 [..., D] below 2**bits -> uint8 [..., D · bits / 8]."""
        return x

    def _unpack(self, x: Tensor) -> Tensor:
        """The inverse of ``_pack``."""
        return x

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        recent, first, _ = self._recent
        start, end = (at - first for at in self._span)
        recent[layer, 0, :, start:end] = k
        recent[layer, 1, :, start:end] = v

    def _read(self, layer: int, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        recent, quantized, _ = self._recent
        for start in range(first // self.GROUP * self.GROUP, min(last, quantized), self.BLOCK):
            k, v = self._whole(layer, start, min(start + self.BLOCK, quantized))
            before = max(0, first - start)  # the rest of a group, of which a window shows the end
            yield k[:, before:], v[:, before:]
        if last > quantized:
            yield tuple(recent[layer, :, :, max(0, first - quantized) : last - quantized])

    def counts(self) -> dict[str, int]:
        self._settle(self.length, self.length)
        return {"length": self.length, "quantized": self._recent[1]}

    def state(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._kept(**self.counts()).items()

    def _kept(self, length: int, quantized: int) -> dict[str, Tensor]:
        """Views of what holds ``length`` tokens, of which so many are ``quantized``."""
        groups = quantized // self.GROUP
        return {
            "recent": self._recent[0][:, :, :, : length - quantized],
            "keys": self.packed[0][:, :, :quantized],
            "keys.scales": self.scales[0][:, :, :, :groups],
            "values": self.packed[1][:, :, :quantized],
            "values.scales": self.scales[1][:, :, :, :quantized],
        }

    def shapes(self, counts: dict[str, int]) -> dict[str, tuple[int, ...]]:
        length, quantized = counts["length"], counts["quantized"]
        if quantized > length or quantized % self.GROUP:
            raise ValueError(counts)
        shapes = {name: list(kept.shape) for name, kept in self._kept(length, quantized).items()}
        shapes["recent"][3] = length - quantized  # of which more may be kept than there is room for now
        return {name: tuple(shape) for name, shape in shapes.items()}

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        length, quantized = counts["length"], counts["quantized"]
        if length > self.capacity:
            raise CacheFull(f"{length} tokens do not fit the {self.capacity} that the cache holds")
        self.truncate(0)
        self._recent = self._whole_from(0, self._room(length - quantized))
        for name, kept in self._kept(length, quantized).items():
            kept.copy_(read(name))
        self._recent, self.length = self._recent._replace(first=quantized), length


class Int8Cache(QuantizedCache):
    """About half of 16 bits."""

    kind, bits = "int8", 8


class Int4Cache(QuantizedCache):
    """A little over a quarter of 16 bits; two values share a byte, of the first and of the second half of a head."""

    kind, bits = "int4", 4

    def _pack(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return low | high << 4

    def _unpack(self, x: Tensor) -> Tensor:
        return torch.cat((x & 15, x >> 4), -1)
