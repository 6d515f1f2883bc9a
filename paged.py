"""The paged cache: many sequences over one pool of pages, and what they have in common held once (PagedAttention,
arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import groupby, takewhile

import torch
from torch import Tensor

import native
from seam import CacheFull, KVCache, triton_serves


class Pool:
    """The memory of many sequences, in pages of ``page_size`` tokens (PagedAttention, arXiv 2309.06180).

    A page is part of ``references`` sequences; with none it is free. Page p is the slots from p · page_size on of
    [layers, 2, Hkv, slots, D], so that neighbouring pages are read as one piece. A full page may have a name, made of
    its tokens and of all before them: another sequence that begins alike finds it, and shares it.
    """

    def __init__(self, config, pages: int, device: str | torch.device, dtype: torch.dtype, page_size: int = 16):
        self.config, self.page_size, self.references, self.free = config, page_size, [0] * pages, pages
        shape = config.num_hidden_layers, 2, config.num_key_value_heads, pages * page_size, config.head_dim
        self.keys_values = torch.empty(shape, dtype=dtype, device=device)
        self.names: list[bytes | None] = [None] * pages
        self.named: dict[bytes, int] = {}
        self.kernels = native.held(self.keys_values)

    def sequence(self, capacity: int) -> PagedCache:
        """An empty one over these pages, for at most ``capacity`` tokens."""
        return PagedCache(self.config, capacity, self.keys_values.device, self.keys_values.dtype, self)

    def take(self, after: int | None) -> int:
        """A free page: the one behind ``after``, so that a sequence is read in few pieces, or else the middle of the
        largest gap, so that both it and the one before the gap have room to grow. There must be one."""
        page = 0 if after is None else after + 1
        if page == len(self.references) or self.references[page]:
            page = self._gap()
        self.references[page], self.free = 1, self.free - 1
        self.rename(page, None)
        return page

    def _gap(self) -> int:
        start, best = 0, (0, 0)
        for used, run in groupby(self.references, bool):
            length = len(list(run))
            best = best if used else max(best, (length, start), key=lambda gap: gap[0])
            start += length
        length, start = best
        return start + (length // 2 if start else 0)

    def share(self, page: int) -> None:
        self.free -= not self.references[page]
        self.references[page] += 1

    def drop(self, page: int) -> None:
        """One sequence less needs the page; it keeps its name until somebody else takes it."""
        self.references[page] -= 1
        self.free += not self.references[page]

    def rename(self, page: int, name: bytes | None) -> None:
        if self.named.get(self.names[page]) == page:
            del self.named[self.names[page]]
        self.names[page] = name
        if name is not None:
            self.named.setdefault(name, page)

    def forget(self) -> None:
        """No page has a name any more: those of a pass that failed do not hold what they say."""
        self.names, self.named = [None] * len(self.names), {}

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep k and v [Hkv, T, D] in ``slots`` [T]."""
        keys, values = self.keys_values[layer]
        keys.index_copy_(1, slots, k)
        values.index_copy_(1, slots, v)

    def copy(self, page: int, to: int) -> None:
        a, b, n = page * self.page_size, to * self.page_size, self.page_size
        self.keys_values[:, :, :, b : b + n] = self.keys_values[:, :, :, a : a + n]


class PagedCache(KVCache):
    """One sequence over a pool: ``block_table`` says which page holds its tokens i · page_size and on.

    Pages are taken as tokens come, so at most one is partly empty. Several sequences may hold the same page; who
    writes into a shared one copies it first.
    """

    kind = "paged"

    def __init__(self, config, capacity: int, device: str | torch.device, dtype: torch.dtype, pool: Pool | None = None):
        super().__init__(config, capacity, device, dtype)
        self.pool = pool or Pool(config, -(-capacity // 16), device, dtype)
        self.block_table: list[int] = []
        self.slots: list[int] = []  # of the pass, in the pool
        self._slots: Tensor | None = None  # the same on the device, once they are needed
        self._names: list[bytes] = []  # of the full pages, as far as they are known
        self._kernels = self.pool.kernels

    @property
    def bytes_reserved(self) -> int:
        return self.pool.keys_values.nbytes

    @property
    def longest(self) -> int:
        """By what the other sequences leave of the pool."""
        pages = len(self.block_table) + self.pool.free - self._breaks
        return min(self.capacity, pages * self.pool.page_size)

    @property
    def _breaks(self) -> bool:
        """Whether the next token goes into a page that others hold too, so that it must be copied first."""
        return self.length % self.pool.page_size > 0 and self.pool.references[self.block_table[-1]] > 1

    def extend(self, n: int) -> None:
        """As ``KVCache.extend``; CacheFull also when pages lack. A shared page that is written into is copied first."""
        size, pool, table = self.pool.page_size, self.pool, self.block_table
        more, breaks = -(-(self.length + n) // size) - len(table), self._breaks
        if self.length + n <= self.capacity and more + breaks > pool.free:
            pages = f"{pool.free} of {len(pool.references)} pages are free"
            raise CacheFull(f"{n} tokens more need {more + breaks} pages of {size} tokens, and {pages}")
        super().extend(n)
        if breaks:
            own = pool.take(table[-1])
            pool.copy(table[-1], own)
            pool.drop(table[-1])
            table[-1] = own
        elif self._span[0] % size:
            pool.rename(table[-1], None)
        for _ in range(more):
            table.append(pool.take(table[-1] if table else None))
        self.slots = [table[at // size] * size + at % size for at in range(*self._span)]
        self._slots = None

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._slots is None:
            self._slots = torch.tensor(self.slots, dtype=torch.int64, device=self.device)
        self.pool.write(layer, self._slots, k, v)

    def _read(self, layer: int, first: int, last: int) -> Iterable[tuple[Tensor, Tensor]]:
        return [self.pool.keys_values[layer, :, :, a:b] for a, b in self._runs(layer, first, last)]

    def _runs(self, layer: int, first: int, last: int) -> list[tuple[int, int]]:
        """The slots of the tokens first to last, pages that are neighbours joined."""
        if (key := (first, last)) not in self._worked_out:
            size, runs = self.pool.page_size, []
            for i in range(first // size, -(-last // size)):
                a = self.block_table[i] * size
                start, end = a + max(0, first - i * size), a + min(size, last - i * size)
                if runs and runs[-1][1] == start:
                    runs[-1] = runs[-1][0], end
                else:
                    runs.append((start, end))
            self._worked_out[key] = runs or [(0, 0)]
        return self._worked_out[key]

    def truncate(self, length: int) -> None:
        super().truncate(length)
        needed = -(-length // self.pool.page_size)
        self.block_table, rest = self.block_table[:needed], self.block_table[needed:]
        del self._names[length // self.pool.page_size :]
        for page in rest:
            self.pool.drop(page)

    def restore(self, counts: dict[str, int], read: Callable[[str], Tensor]) -> None:
        own = sum(self.pool.references[page] == 1 for page in self.block_table)
        if -(-counts["length"] // self.pool.page_size) > self.pool.free + own:
            raise CacheFull(f"{counts['length']} tokens do not fit the {self.pool.free + own} pages that are free")
        super().restore(counts, read)

    # -- sharing

    def fork(self) -> PagedCache:
        """A second sequence with the same past, every page of it shared."""
        twin = self.pool.sequence(self.capacity)
        twin.length, twin.block_table, twin._names = self.length, list(self.block_table), list(self._names)
        for page in twin.block_table:
            self.pool.share(page)
        return twin

    def publish(self, tokens: list[int]) -> None:
        """Name the full pages by the ``tokens`` that they hold, so that others find them."""
        for i, name in enumerate(self._chain(tokens[: self.length], self._names), len(self._names)):
            self.pool.rename(self.block_table[i], name)
            self._names.append(name)

    def adopt(self, tokens: list[int]) -> None:
        """Begin with the pages that hold a beginning of ``tokens`` already; the last token is left to be computed."""
        for name in self._chain(tokens[:-1], []):
            if (page := self.pool.named.get(name)) is None:
                break
            self.pool.share(page)
            self.block_table.append(page)
            self._names.append(name)
            self.length += self.pool.page_size

    def _chain(self, tokens: list[int], names: list[bytes]) -> Iterator[bytes]:
        """The names of the full pages behind those that have ``names``: each digests its tokens and the name before
        it."""
        size, name = self.pool.page_size, names[-1] if names else b""
        for start in range(len(names) * size, len(tokens) - size + 1, size):
            name = sha256(name + repr(tokens[start : start + size]).encode()).digest()
            yield name


class PagedBatch:
    """Several sequences in one pass, laid end to end: token t of the pass belongs to one of them and sees only that
    one. Each has been extended by its own part, the first ones perhaps by one token each, which is faster.

    All is stored before anything is read, so that pages which one sequence fills in this pass may be what another one
    begins with.
    """

    def __init__(self, sequences: list[PagedCache]):
        self.sequences, self.pool, device = sequences, sequences[0].pool, sequences[0].device
        self.counts = [len(sequence.slots) for sequence in sequences]
        self.singles = sum(1 for _ in takewhile(lambda count: count == 1, self.counts))
        self.positions = torch.tensor([at for s in sequences for at in range(*s._span)], device=device)
        self.slots = torch.tensor([slot for sequence in sequences for slot in sequence.slots], device=device)

    @staticmethod
    def of(sequences: list[PagedCache]) -> PagedBatch:
        """Their pass, on the kernels of flash.py or native.py where they run."""
        if triton_serves(sequences[0].device):
            return FlashBatch(sequences)
        return (PagedBatch if sequences[0].pool.kernels is None else NativeBatch)(sequences)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As ``KVCache.attend``."""
        dtype, singles = self.pool.keys_values.dtype, self.singles
        q, k, v = q.to(dtype), k.to(dtype).transpose(0, 1), v.to(dtype).transpose(0, 1)
        self.pool.write(layer, self.slots, k, v)
        y, start = self._newest(layer, q[:singles]) if singles else [], singles
        for sequence, count in zip(self.sequences[singles:], self.counts[singles:], strict=True):
            part = slice(start, start := start + count)
            y.append(sequence._look(layer, q[part], k[:, part], v[:, part]))
        return torch.cat(y)

    def for_kernels(self, tokens: int) -> list[tuple[native.Held, native.Seen]] | None:
        """As ``KVCache.for_kernels``."""

    def _newest(self, layer: int, q: Tensor) -> list[Tensor]:
        """Attention of the first sequences, of one token each, q [B, Hq, D] -> tensors that join to the same."""
        pairs = zip(self.sequences, q.split(1), strict=False)
        return [sequence._look(layer, one, one, one) for sequence, one in pairs]


class NativeBatch(PagedBatch):
    """A pass in which all sequences, or at least their newest tokens, are one call of a kernel of native.py for each
    layer."""

    def __init__(self, sequences: list[PagedCache]):
        super().__init__(sequences)
        self._worked_out: dict[tuple[int, int | None], native.Seen] = {}  # by the number of sequences and the window

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._kernels_serve(len(q)):
            return super().attend(layer, q, k, v)
        return self.pool.kernels[layer].attend(q, self._seen(layer, len(self.counts)), (k, v))

    def for_kernels(self, tokens: int) -> list[tuple[native.Held, native.Seen]] | None:
        if not self._kernels_serve(tokens):
            return None
        return [(held, self._seen(layer, len(self.counts))) for layer, held in enumerate(self.pool.kernels)]

    def _kernels_serve(self, tokens: int) -> bool:
        return tokens == self.singles or tokens <= native.most_tokens(self.pool.keys_values.dtype)

    def _newest(self, layer: int, q: Tensor) -> list[Tensor]:
        return [self.pool.kernels[layer].attend(q, self._seen(layer, self.singles))]

    def _seen(self, layer: int, sequences: int) -> native.Seen:
        """What the tokens of the first sequences see."""
        if (key := (sequences, self.pool.config.windows[layer])) not in self._worked_out:
            stretches = [sequence._stretches(layer) for sequence in self.sequences[:sequences]]
            self._worked_out[key] = native.Seen([*zip(self.counts, stretches, strict=False)], key[1])
        return self._worked_out[key]


class FlashBatch(PagedBatch):
    """A pass in which the newest tokens of all sequences are one call of a kernel that follows the block tables."""

    def __init__(self, sequences: list[PagedCache]):
        super().__init__(sequences)
        newest, device = sequences[: self.singles], sequences[0].device
        width = max((len(sequence.block_table) for sequence in newest), default=0)
        tables = [table + [0] * (width - len(table)) for table in (sequence.block_table for sequence in newest)]
        self.tables = torch.tensor(tables, dtype=torch.int32, device=device)
        self.lengths = torch.tensor([sequence.length for sequence in newest], dtype=torch.int32, device=device)

    def _newest(self, layer: int, q: Tensor) -> list[Tensor]:
        from flash import paged_attention

        keys, values = self.pool.keys_values[layer]
        window = self.sequences[0].config.windows[layer]
        return [paged_attention(q, keys, values, self.tables, self.lengths, self.pool.page_size, window=window)]
