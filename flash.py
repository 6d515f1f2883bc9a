"""Attention of one query per sequence over a paged cache that is read where it lies: two Triton kernels for CUDA.

A step of decoding has one query, so attention is a single pass over K and V, and its speed is that of the memory. Two
ideas keep the memory busy:

- Flash-decoding (Dao, Haziza, Massa, Sizov, 2023: https://crfm.stanford.edu/2023/10/12/flashdecoding.html): with one
  sequence and few K/V heads there are fewer programs than processors, so the length is split as well. Each split
  gives the softmax over its own tokens, and the logarithm of its sum, by which the second kernel weighs the splits.
- PagedAttention (Kwon et al., arXiv 2309.06180): the addresses of K and V come from a table of pages, so a sequence
  may lie anywhere, and several may share a page.

Lengths are read on the device and bound the loops, so the work grows with them and not with what the cache could hold.
The launch depends on shapes alone, so a CUDA graph that has captured it stays right while lengths and tables change.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend_split(
    q, new_k, new_v, keys, values, tables, lengths, parts, weights, scale, window, table_stride, head_stride,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One K/V head, one sequence, one split of its tokens: the heads of the group are the rows of one tile."""
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, kv_heads = tl.num_programs(0), tl.num_programs(1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (rows < GROUP)[:, None] & (columns < DIM)
    row = (sequence * kv_heads + head) * GROUP + rows
    query = tl.load(q + row[:, None] * DIM + columns, mask=real, other=0.0).to(keys.dtype.element_ty)

    # Which tokens are this split's follows from its own sequence alone, so its result does too, to the bit.
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)
    share = (length - first + splits * BLOCK - 1) // (splits * BLOCK) * BLOCK  # in whole blocks
    start = first + split * share
    end = tl.minimum(start + share, length)

    # int64, since a large cache has more values than int32 can count.
    offsets = head.to(tl.int64) * head_stride + columns
    # Finite, so that a split without tokens weighs nothing and -inf - -inf never comes up.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    output = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    if new_k is not None:
        # The newest token is not in the cache yet. Its split begins with it, and puts it there; no program reads that
        # slot meanwhile.
        mine, newest = (start < length) & (end == length), length - 1
        own, here = columns < tl.where(mine, DIM, 0), (sequence * kv_heads + head) * DIM + columns
        its_k = tl.load(new_k + here, mask=own, other=0.0).to(keys.dtype.element_ty)
        its_v = tl.load(new_v + here, mask=own, other=0.0).to(keys.dtype.element_ty)
        its_page = tl.load(tables + sequence * table_stride + tl.maximum(newest, 0) // PAGE).to(tl.int64)
        there = (its_page * PAGE + newest % PAGE) * DIM + offsets
        tl.store(keys + there, its_k, mask=own)
        tl.store(values + there, its_v, mask=own)
        score = tl.sum(query.to(tl.float32) * its_k.to(tl.float32), 1) * scale
        top, total = tl.where(mine, score, top), tl.where(mine, 1.0, total)
        output += its_v.to(tl.float32)
        end = tl.minimum(end, newest)
    for block in range(start, end, BLOCK):
        tokens = block + tl.arange(0, BLOCK)
        held = tokens < end
        # A page may be smaller than a block, so each token looks its own up; equal addresses are one load.
        page = tl.load(tables + sequence * table_stride + tokens // PAGE, mask=held, other=0).to(tl.int64)
        at = ((page * PAGE + tokens % PAGE) * DIM)[:, None] + offsets
        mask = held[:, None] & (columns < DIM)
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
        # "ieee": else float32 would go through tensor cores, which keep 10 bits of its mantissa.
        scores = tl.where(held, tl.dot(query, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink, p = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        output = tl.dot(p.to(v.dtype), v, output * shrink[:, None], input_precision="ieee")
        top = higher
    total = tl.where(total == 0.0, 1.0, total)  # of no tokens: zeros come out, and not 0 / 0
    at = row * splits + split
    tl.store(parts + at[:, None] * DIM + columns, output / total[:, None], mask=real)
    tl.store(weights + at, top + tl.log2(total), mask=rows < GROUP)


@triton.jit
def _merge(parts, weights, out, SPLITS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """One query head: the splits' results, weighed by their share of the whole softmax."""
    row, splits, columns = tl.program_id(0), tl.arange(0, PADDED), tl.arange(0, WIDTH)
    real, at = splits < SPLITS, row * SPLITS + splits
    # No mask for splits without tokens: to load their zeros takes less time than to wait for the weights.
    part = tl.load(parts + at[:, None] * DIM + columns, mask=real[:, None] & (columns < DIM), other=0.0)
    weight = tl.load(weights + at, mask=real, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    merged = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row * DIM + columns, merged, mask=columns < DIM)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor, page_size: int,
    splits: int | None = None, window: int | None = None, new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ / √D) v for the newest token of each sequence; float32 inside, q's dtype out.

    q [B, Hq, D] and keys, values [Hkv, slots, D]: float32, float16 or bfloat16. keys and values are views of one
    layer, in which page p is slots [p · page_size, (p + 1) · page_size). block_tables [B, max_pages] int32: the pages
    of each sequence in order; lengths [B] int32: the tokens held, the query's own included. -> [B, Hq, D].

    ``new`` k and v [B, Hkv, D], of any float dtype, are those of the newest tokens, and are stored where those belong:
    in slots that no other sequence of the call sees. Without them they are there already.

    Only the newest ``window`` tokens are looked at, the query's own among them. Nothing else in the cache or the
    tables is read, so it may hold anything; a length of 0, which fills up a batch, gives zeros. A contiguous cache is
    one page per sequence: page_size = capacity, and the one table [[0]].

    ``splits`` follows from B, unless given: give it to have the same bits in batches of any size, or to have more of
    them where one sequence of a large batch is far longer than the others.
    """
    (sequences, heads, dim), (kv_heads, _, _) = q.shape, keys.shape
    if keys.stride() != values.stride() or keys.stride()[1:] != (dim, 1):
        raise ValueError("keys and values must be laid out alike, and each head's slots lie one after the other")
    group, size = heads // kv_heads, keys.element_size()
    width = max(16, triton.next_power_of_2(dim))  # a dot product of fewer does not compile
    # A tile of K or V: at most 64 tokens, so that a short sequence is still shared out, and 16 KB, so that four of
    # them and more fit a processor. The bytes on their way have to cover the memory's latency, which takes some 30 KB
    # for each processor of an H200 (4.8 TB/s · 0.8 µs / 132); two programs with a tile of K and one of V each do that.
    block = max(16, min(64, 16384 // (width * size)))
    if splits is None:
        # Two programs for each processor: one computes while the other waits. More would only leave more to merge.
        # No split is shorter than a block, even of a full cache, and the registers of a merge hold all splits.
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        blocks = triton.cdiv(block_tables.shape[1] * page_size, block)
        splits = max(1, min(2 * processors // (sequences * kv_heads), blocks, 16384 // width))
    new_k, new_v = (x.contiguous() for x in new) if new else (None, None)
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    # One split is the whole answer, and its kernel writes it.
    parts = out if splits == 1 else q.new_empty((sequences, heads, splits, dim), dtype=torch.float32)
    weights = q.new_empty((sequences, heads, splits), dtype=torch.float32)
    _attend_split[(splits, kv_heads, sequences)](
        q, new_k, new_v, keys, values, block_tables, lengths, parts, weights,
        scale=log2(e) / dim**0.5,  # the hardware has exp2, and not exp
        window=2**31 - 1 if window is None else window,
        table_stride=block_tables.stride(0), head_stride=keys.stride(0),
        # A constant, so that to divide by the usual 16 is a shift; in return, each capacity of a contiguous cache is
        # compiled anew. 16 rows are the least that tensor cores multiply; float32 does without them.
        PAGE=page_size, GROUP=group, ROWS=max(16 if size == 2 else 1, triton.next_power_of_2(group)),
        # 5 stages keep two tiles each of K and V, one on its way while the other is used, and load the table's entries
        # another two blocks ahead, since the addresses of the tiles come from them.
        DIM=dim, WIDTH=width, BLOCK=block, num_warps=4, num_stages=5, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        sizes = splits, triton.next_power_of_2(splits), dim, width
        _merge[(sequences * heads,)](parts, weights, out, *sizes, num_warps=4, enable_fp_fusion=True)
    return out
