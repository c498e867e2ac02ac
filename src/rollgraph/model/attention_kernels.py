"""Triton kernels of attention, one arithmetic for decode, prefill, scoring and training.

The result of a query is the same, bit for bit, whichever kernel computes it, beside whatever other queries:

- Places are read in tiles of TILE, and tiles begin at multiples of TILE.
- PART places make a part. Each part is summed up on its own, and parts are joined in order. So a decode step with few
  rows can give every part to a program of its own, and a kernel with many rows can take one part after the other.
- A tile or part in which a query sees nothing leaves its sums unchanged. It makes no difference who else needs it.
- Every multiplication that is followed by an addition is written as `fma` or is part of a matrix product, so that it is
  not up to the compiler whether it rounds once or twice.

The kernels launch outside of PyTorch's dispatcher, so the undo log of a capture does not see them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # keys that a program reads in one iteration
PART = 512  # keys that are summed up before they are joined with those before them; a multiple of TILE
_ROWS = 64  # queries of one program of a packed kernel
_LEVELS = tl.constexpr(TILE.bit_length() - 1)  # how often a tile can be halved
NOTHING = tl.constexpr(-1e30)  # the highest score where no key is visible
_LN_2 = 0.6931471805599453


@triton.jit
def packed_row(place, first, shared, own):
    """Which row of the keys' memory a place of a packed sequence is.

    The first `shared` places are the rows from `first` on, and the others those from `own` on.
    """
    return tl.where(place < shared, first + place, own + place - shared).to(tl.int64)


@triton.jit
def _blocks_of(place, end, table, BLOCK: tl.constexpr):
    """The blocks of a paged cache that hold these places of a sequence, as far as they are before `end`."""
    return tl.load(table + place // BLOCK, mask=place < end, other=0)


@triton.jit
def _attend_tiles(
    queries, positions, keys, values, key_stride, value_stride, table, first, shared, own, begin, end, scale,
    best, totals, mixed, MASKED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles from begin to end to the sums of queries. Without MASKED, all queries see all of their places.

    With BLOCK > 0 keys are paged, and the table of the sequence knows where. AHEAD says that it is read one tile ahead:
    the keys of a tile can then be on their way while the tile before is computed. That takes more memory of a
    processor, so it pays only where few programs share one.
    """
    dims = tl.arange(0, WIDTH)
    in_dim = (dims < DIM)[None, :]
    factor = tl.full((queries.shape[0], TILE), 1.0, tl.float32) * scale
    if AHEAD:
        next_blocks = _blocks_of(begin + tl.arange(0, TILE), end, table, BLOCK)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        if BLOCK > 0:
            if AHEAD:
                blocks = next_blocks
                next_blocks = _blocks_of(place + TILE, end, table, BLOCK)
            else:
                blocks = _blocks_of(place, end, table, BLOCK)
            row = blocks.to(tl.int64) * BLOCK + place % BLOCK
        else:
            row = packed_row(place, first, shared, own)
        shown = in_dim
        if MASKED:
            shown = inside[:, None] & in_dim
        tile_keys = tl.load(keys + row[:, None] * key_stride + dims, mask=shown, other=0.0)
        tile_values = tl.load(values + row[:, None] * value_stride + dims, mask=shown, other=0.0)
        scores = tl.dot(queries, tl.trans(tile_keys), input_precision=PRECISION)
        seen = (place <= positions[:, None]) & inside
        if WINDOW > 0:
            seen = seen & (positions[:, None] - place < WINDOW)
        if MASKED:
            scores = tl.where(seen, scores, NOTHING)
        highest = tl.maximum(best, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, factor, tl.broadcast_to(-highest[:, None], scores.shape)))
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(best - highest)
        totals = tl.fma(totals, tl.broadcast_to(shrink[:, None], totals.shape), weights)
        mixed = tl.dot(weights.to(tile_values.dtype), tile_values, mixed * shrink[:, None], input_precision=PRECISION)
        best = highest
    return best, totals, mixed


@triton.jit
def attend_part(
    queries, positions, keys, values, key_stride, value_stride, table, first, shared, own, begin, full, end, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of queries, [n, WIDTH], over the places begin to end. `scale` includes the factor from e to 2.

    All queries see the places before `full`, a multiple of TILE. With LONG, those take a loop of their own, without
    masks: of a long sequence they are most. Gives each query's highest score, the sum of its weights relative to that
    score, and the weighted sum of values.
    """
    best = tl.full((queries.shape[0],), NOTHING, tl.float32)
    totals = tl.zeros((queries.shape[0], TILE), tl.float32)  # of each column of a tile; added up at the end
    mixed = tl.zeros((queries.shape[0], WIDTH), tl.float32)
    if LONG and WINDOW == 0:
        best, totals, mixed = _attend_tiles(
            queries, positions, keys, values, key_stride, value_stride, table, first, shared, own,
            begin, tl.minimum(full, end), scale, best, totals, mixed, False,
            DIM, WIDTH, BLOCK, AHEAD, WINDOW, TILE, PRECISION,
        )  # fmt: skip
        begin = tl.maximum(begin, full)
    best, totals, mixed = _attend_tiles(
        queries, positions, keys, values, key_stride, value_stride, table, first, shared, own,
        begin, end, scale, best, totals, mixed, True, DIM, WIDTH, BLOCK, AHEAD, WINDOW, TILE, PRECISION,
    )  # fmt: skip
    return best, _sum_columns(totals), mixed


@triton.jit
def _sum_columns(x):
    """The sum of each row, halves added to halves. The order of `tl.sum` depends on how many threads hold a row."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    for level in tl.static_range(_LEVELS):
        halves = tl.reshape(x, (rows, 2, columns >> (level + 1)))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        x = left + right
    return tl.reshape(x, (rows,))


@triton.jit
def join(best, total, mixed, part_best, part_total, part_mixed):
    """Add one more part to the sums of the parts before it."""
    highest = tl.maximum(best, part_best)
    shrink = tl.exp2(best - highest)
    part_shrink = tl.exp2(part_best - highest)
    total = tl.fma(part_total, part_shrink, total * shrink)
    mixed = tl.fma(part_mixed, tl.broadcast_to(part_shrink[:, None], part_mixed.shape), mixed * shrink[:, None])
    return highest, total, mixed


@triton.jit
def attend(
    queries, positions, keys, values, key_stride, value_stride, table, first, shared, own, begin, full, end, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, SEVERAL: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over all places from begin to end, part after part. `begin` is a multiple of TILE.

    SEVERAL says that there can be more than one part: without the sums of other parts, a program needs less memory.
    """
    first_part = begin // PART
    best, total, mixed = attend_part(
        queries, positions, keys, values, key_stride, value_stride, table, first, shared, own, begin, full,
        tl.minimum(end, (first_part + 1) * PART), scale, DIM, WIDTH, BLOCK, AHEAD, WINDOW, TILE, LONG, PRECISION,
    )  # fmt: skip
    if SEVERAL:
        for part in range(first_part + 1, tl.cdiv(end, PART)):
            part_best, part_total, part_mixed = attend_part(
                queries, positions, keys, values, key_stride, value_stride, table, first, shared, own, part * PART,
                full, tl.minimum(end, (part + 1) * PART), scale,
                DIM, WIDTH, BLOCK, AHEAD, WINDOW, TILE, LONG, PRECISION,
            )  # fmt: skip
            best, total, mixed = join(best, total, mixed, part_best, part_total, part_mixed)
    return best, total, mixed


@triton.jit
def visible_from(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The beginning of the first tile of which a query at `position` sees something."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    return 0


@triton.jit
def sequence_of(program, begins, sequences, TILE: tl.constexpr):
    """The sequence of a program, if programs have TILE rows each and sequence i begins at row `begins[i]`.

    Sequence i has the programs from `begins[i] // TILE + i` on: at least as many as it needs, and the search needs no
    table.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        found = tl.load(begins + middle) // TILE + middle <= program
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle)
    return low


@triton.jit(do_not_specialize=["sequences"])  # specialized to 1, the search does not compile
def _packed_kernel(
    q, keys, values, table, tokens, cu_rows, cu_keys, lengths, out, normalizers, scale, sequences, count_all,
    key_stride, value_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    SEVERAL: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of ROWS queries of one head of one sequence. With BLOCK > 0 keys are paged, otherwise packed."""
    program, head = tl.program_id(0), tl.program_id(1)
    low = sequence_of(program, cu_rows, sequences, ROWS)
    begin_rows = tl.load(cu_rows + low)
    count = tl.load(cu_rows + low + 1) - begin_rows
    tile = program - begin_rows // ROWS - low
    if tile * ROWS >= count:
        return
    first = 0
    shared = 0
    if BLOCK > 0:
        length = tl.load(lengths + low)
    else:
        begin_keys = tl.load(cu_keys + low)
        length = tl.load(cu_keys + low + 1) - begin_keys
        shared = length - count
        if shared > 0:
            first = tl.load(tokens + begin_keys).to(tl.int32)
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_row = row < count
    shown = in_row[:, None] & (dims < DIM)
    position = length - count + row
    at_q = ((begin_rows + row).to(tl.int64) * HEADS + head) * DIM
    queries = tl.load(q + at_q[:, None] + dims, mask=shown, other=0.0)
    kv_head = head // (HEADS // KV_HEADS)
    lowest = length - count + tile * ROWS
    best, total, mixed = attend(
        queries, position, keys + kv_head * DIM, values + kv_head * DIM, key_stride, value_stride,
        table + low * table_stride, first, shared, begin_rows,
        visible_from(lowest, WINDOW, TILE), (lowest + 1) // TILE * TILE, tl.minimum(lowest + ROWS, length), scale,
        DIM, WIDTH, BLOCK, False, WINDOW, TILE, PART, SEVERAL, SEVERAL, PRECISION,
    )  # fmt: skip
    total = tl.where(in_row, total, 1.0)
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_q[:, None] + dims, result, mask=shown)
    if NORMALIZE:
        natural = (best + tl.log2(total)) * 0.6931471805599453
        tl.store(normalizers + head.to(tl.int64) * count_all + begin_rows + row, natural, mask=in_row)


def prefill(q: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """See `attention.paged_prefill`."""
    block, kv_heads, dim = pages.shape[1], pages.shape[3], pages.shape[4]
    out = torch.zeros_like(q)  # so that padding stays finite
    keys, values = pages, pages.flatten()[kv_heads * dim :]
    strides = (2 * kv_heads * dim, 2 * kv_heads * dim, table.stride(0))
    longest = table.shape[1] * block
    _launch_packed(
        q, keys, values, table, table, cu_seqlens, cu_seqlens, lengths, out, None, strides, window, block, longest
    )
    return out


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    tokens: Tensor,
    cu_keys: Tensor,
    window: int | None,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """See `attention.packed_attention`. Also gives the logarithm of each query's sum of weights, [heads, tokens].

    Heads of k and v must be contiguous; tokens may have any stride.
    """
    out = torch.empty_like(q)
    normalizers = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    strides = (k.stride(0), v.stride(0), 0)
    _launch_packed(
        q, k, v, cu_seqlens, tokens, cu_seqlens, cu_keys, cu_keys, out, normalizers, strides, window, 0, longest
    )
    return out, normalizers


def _launch_packed(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, tokens: Tensor, cu_rows: Tensor, cu_keys: Tensor,
    lengths: Tensor, out: Tensor, normalizers: Tensor | None, strides: tuple[int, int, int], window: int | None,
    block: int, longest: int,
) -> None:  # fmt: skip
    """`longest` is the most places that a sequence can have."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[-2]
    sequences = len(cu_rows) - 1
    _packed_kernel[(count // _ROWS + sequences, heads)](
        q, keys, values, table, tokens, cu_rows, cu_keys, lengths, out, out if normalizers is None else normalizers,
        score_scale(dim), sequences, count, *strides,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)), BLOCK=block,
        WINDOW=window or 0, ROWS=_ROWS, TILE=TILE, PART=PART,
        SEVERAL=longest > PART, NORMALIZE=normalizers is not None, PRECISION=dot_precision(q), num_warps=4,
    )  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    """How many programs a device runs at a time, if each fills a processor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def score_scale(dim: int) -> float:
    """The factor of scores whose powers of 2 are the softmax."""
    return dim**-0.5 / _LN_2


def dot_precision(q: Tensor) -> Any:
    """How the kernels of this package multiply: never with fewer digits than the operands have."""
    return "ieee" if q.dtype == torch.float32 else "tf32"  # "tf32" has no effect on half precision
