"""Triton attention kernels with the same arithmetic in decode, prefill, scoring and training.

A query gets the same bits from every kernel, whatever other queries are in the batch:

- Keys are read in tiles of TILE, and tiles begin at multiples of TILE.
- PART keys make a part. Each part is summed separately, and parts are combined in order. So a decode step with few rows
  can run the parts in parallel (as in flash decoding), and a kernel with many rows can loop over them.
- A tile or part in which a query sees no key leaves its sums unchanged. So it does not matter whether other queries
  need that tile.
- Every multiplication before an addition is an explicit `fma` or part of a `tl.dot`. So the compiler has no choice
  whether to round once or twice.

The kernels launch outside PyTorch's dispatcher, so the undo log of a capture does not see them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.kernels.launch import supports_pdl

# -- packed sequences, and prefill -----------------------------------------------------------------

TILE = 64  # keys that a program reads in one iteration
PART = 512  # keys that are summed before they are combined with the parts before; a multiple of TILE
_ROWS = 64  # queries of one program of a packed kernel
_LEVELS = tl.constexpr(TILE.bit_length() - 1)  # how often a tile can be halved
MIN_SCORE = tl.constexpr(-1e30)  # the maximal score where no key is visible
_LN_2 = 0.6931471805599453


@triton.jit
def packed_row(key_position, shared_start, shared_length, own_start):
    """The row of a packed sequence's key at a position.

    Positions below `shared_length` belong to the shared prompt, whose rows begin at `shared_start`. The rows of the
    others begin at `own_start`.
    """
    return tl.where(
        key_position < shared_length, shared_start + key_position, own_start + key_position - shared_length
    ).to(tl.int64)


@triton.jit
def _load_blocks(key_position, end, table, BLOCK: tl.constexpr):
    """The blocks of the paged cache that hold these positions of a sequence, if they are before `end`."""
    return tl.load(table + key_position // BLOCK, mask=key_position < end, other=0)


@triton.jit
def _attend_tiles(
    queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length, own_start,
    begin, end, scale, max_score, column_sums, acc,
    MASKED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles from begin to end to the sums of queries. Without MASKED, all queries see all of these keys.

    With BLOCK > 0 keys are paged, and `table` is the block table of the sequence. With PREFETCH, the table is read one
    tile ahead, so that the keys of a tile load while the tile before is computed. That takes more registers and shared
    memory, so it pays only where few programs share an SM.
    """
    dims = tl.arange(0, WIDTH)
    in_dim = (dims < DIM)[None, :]
    factor = tl.full((queries.shape[0], TILE), 1.0, tl.float32) * scale
    if PREFETCH:
        next_blocks = _load_blocks(begin + tl.arange(0, TILE), end, table, BLOCK)
    for start in range(begin, end, TILE):
        key_position = start + tl.arange(0, TILE)
        inside = key_position < end
        if BLOCK > 0:
            if PREFETCH:
                blocks = next_blocks
                next_blocks = _load_blocks(key_position + TILE, end, table, BLOCK)
            else:
                blocks = _load_blocks(key_position, end, table, BLOCK)
            row = blocks.to(tl.int64) * BLOCK + key_position % BLOCK
        else:
            row = packed_row(key_position, shared_start, shared_length, own_start)
        load_mask = in_dim
        if MASKED:
            load_mask = inside[:, None] & in_dim
        tile_keys = tl.load(keys + row[:, None] * key_stride + dims, mask=load_mask, other=0.0)
        tile_values = tl.load(values + row[:, None] * value_stride + dims, mask=load_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(tile_keys), input_precision=PRECISION)
        visible = (key_position <= query_positions[:, None]) & inside
        if WINDOW > 0:
            visible = visible & (query_positions[:, None] - key_position < WINDOW)
        if MASKED:
            scores = tl.where(visible, scores, MIN_SCORE)
        new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, factor, tl.broadcast_to(-new_max[:, None], scores.shape)))
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
        rescale = tl.exp2(max_score - new_max)
        column_sums = tl.fma(column_sums, tl.broadcast_to(rescale[:, None], column_sums.shape), weights)
        acc = tl.dot(weights.to(tile_values.dtype), tile_values, acc * rescale[:, None], input_precision=PRECISION)
        max_score = new_max
    return max_score, column_sums, acc


@triton.jit
def attend_part(
    queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length, own_start,
    begin, unmasked_end, end, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of queries, [n, WIDTH], over the keys begin to end. `scale` includes log2(e), for exp2.

    All queries see the keys before `unmasked_end`, a multiple of TILE. With LONG, a separate loop without masks reads
    them: they are most of a long sequence. Returns each query's maximal score, the sum of its weights relative to that
    score, and the weighted sum of values.
    """
    max_score = tl.full((queries.shape[0],), MIN_SCORE, tl.float32)
    column_sums = tl.zeros((queries.shape[0], TILE), tl.float32)  # of a tile; added up at the end
    acc = tl.zeros((queries.shape[0], WIDTH), tl.float32)
    if LONG and WINDOW == 0:
        max_score, column_sums, acc = _attend_tiles(
            queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length,
            own_start, begin, tl.minimum(unmasked_end, end), scale, max_score, column_sums, acc, False,
            DIM, WIDTH, BLOCK, PREFETCH, WINDOW, TILE, PRECISION,
        )  # fmt: skip
        begin = tl.maximum(begin, unmasked_end)
    max_score, column_sums, acc = _attend_tiles(
        queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length, own_start,
        begin, end, scale, max_score, column_sums, acc, True, DIM, WIDTH, BLOCK, PREFETCH, WINDOW, TILE, PRECISION,
    )  # fmt: skip
    return max_score, _sum_columns(column_sums), acc


@triton.jit
def _sum_columns(x):
    """The sum of each row, by halves. The order of `tl.sum` would depend on how many threads hold a row."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    for level in tl.static_range(_LEVELS):
        halves = tl.reshape(x, (rows, 2, columns >> (level + 1)))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        x = left + right
    return tl.reshape(x, (rows,))


@triton.jit
def combine_parts(max_score, total, acc, part_max, part_total, part_acc):
    """Add one more part to the sums of the parts before, as in online softmax."""
    new_max = tl.maximum(max_score, part_max)
    rescale = tl.exp2(max_score - new_max)
    part_rescale = tl.exp2(part_max - new_max)
    total = tl.fma(part_total, part_rescale, total * rescale)
    acc = tl.fma(part_acc, tl.broadcast_to(part_rescale[:, None], part_acc.shape), acc * rescale[:, None])
    return new_max, total, acc


@triton.jit
def attend(
    queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length, own_start,
    begin, unmasked_end, end, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, MULTIPART: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over all keys from begin to end, part after part. `begin` is a multiple of TILE.

    MULTIPART says that there can be more than one part. Without it, a program needs fewer registers.
    """
    first_part = begin // PART
    max_score, total, acc = attend_part(
        queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length, own_start,
        begin, unmasked_end, tl.minimum(end, (first_part + 1) * PART), scale,
        DIM, WIDTH, BLOCK, PREFETCH, WINDOW, TILE, LONG, PRECISION,
    )  # fmt: skip
    if MULTIPART:
        for part in range(first_part + 1, tl.cdiv(end, PART)):
            part_max, part_total, part_acc = attend_part(
                queries, query_positions, keys, values, key_stride, value_stride, table, shared_start, shared_length,
                own_start, part * PART, unmasked_end, tl.minimum(end, (part + 1) * PART), scale,
                DIM, WIDTH, BLOCK, PREFETCH, WINDOW, TILE, LONG, PRECISION,
            )  # fmt: skip
            max_score, total, acc = combine_parts(max_score, total, acc, part_max, part_total, part_acc)
    return max_score, total, acc


@triton.jit
def visible_from(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The beginning of the first tile in which a query at `position` sees a key."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    return 0


@triton.jit
def find_sequence(program, begins, sequences, TILE: tl.constexpr):
    """The sequence of a program, where programs have TILE rows each and sequence i begins at row `begins[i]`.

    Sequence i has the programs from `begins[i] // TILE + i` on. These are at least as many as it needs, and a binary
    search finds them without a table.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        has_begun = tl.load(begins + middle) // TILE + middle <= program
        low = tl.where(has_begun, middle, low)
        high = tl.where(has_begun, high, middle)
    return low


@triton.jit(do_not_specialize=["sequences"])  # specialized to 1, the search does not compile
def _packed_kernel(
    q, keys, values, table, tokens, cu_rows, cu_keys, lengths, out, normalizers, scale, sequences, count_all,
    key_stride, value_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    MULTIPART: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of ROWS queries of one head of one sequence. With BLOCK > 0 keys are paged, otherwise packed."""
    program, head = tl.program_id(0), tl.program_id(1)
    low = find_sequence(program, cu_rows, sequences, ROWS)
    begin_rows = tl.load(cu_rows + low)
    count = tl.load(cu_rows + low + 1) - begin_rows
    tile = program - begin_rows // ROWS - low
    if tile * ROWS >= count:
        return
    shared_start = 0
    shared_length = 0
    if BLOCK > 0:
        length = tl.load(lengths + low)
    else:
        begin_keys = tl.load(cu_keys + low)
        length = tl.load(cu_keys + low + 1) - begin_keys
        shared_length = length - count
        if shared_length > 0:
            shared_start = tl.load(tokens + begin_keys).to(tl.int32)
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_row = row < count
    load_mask = in_row[:, None] & (dims < DIM)
    position = length - count + row
    at_q = ((begin_rows + row).to(tl.int64) * HEADS + head) * DIM
    queries = tl.load(q + at_q[:, None] + dims, mask=load_mask, other=0.0)
    kv_head = head // (HEADS // KV_HEADS)
    lowest = length - count + tile * ROWS
    max_score, total, acc = attend(
        queries, position, keys + kv_head * DIM, values + kv_head * DIM, key_stride, value_stride,
        table + low * table_stride, shared_start, shared_length, begin_rows,
        visible_from(lowest, WINDOW, TILE), (lowest + 1) // TILE * TILE, tl.minimum(lowest + ROWS, length), scale,
        DIM, WIDTH, BLOCK, False, WINDOW, TILE, PART, MULTIPART, MULTIPART, PRECISION,
    )  # fmt: skip
    total = tl.where(in_row, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_q[:, None] + dims, result, mask=load_mask)
    if NORMALIZE:
        natural = (max_score + tl.log2(total)) * 0.6931471805599453
        tl.store(normalizers + head.to(tl.int64) * count_all + begin_rows + row, natural, mask=in_row)


def prefill(q: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """See `attention.paged_prefill`."""
    block, kv_heads, dim = pages.shape[1], pages.shape[3], pages.shape[4]
    out = torch.zeros_like(q)  # so that padding stays finite
    keys, values = pages, pages.flatten()[kv_heads * dim :]
    strides = (2 * kv_heads * dim, 2 * kv_heads * dim, table.stride(0))
    max_length = table.shape[1] * block
    _launch_packed(
        q, keys, values, table, table, cu_seqlens, cu_seqlens, lengths, out, None, strides, window, block, max_length
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
    max_length: int,
) -> tuple[Tensor, Tensor]:
    """See `attention.packed_attention`. Also returns the logsumexp of each query, [heads, tokens].

    Heads of k and v must be contiguous; tokens may have any stride.
    """
    out = torch.empty_like(q)
    normalizers = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    strides = (k.stride(0), v.stride(0), 0)
    _launch_packed(
        q, k, v, cu_seqlens, tokens, cu_seqlens, cu_keys, cu_keys, out, normalizers, strides, window, 0, max_length
    )
    return out, normalizers


def _launch_packed(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, tokens: Tensor, cu_rows: Tensor, cu_keys: Tensor,
    lengths: Tensor, out: Tensor, normalizers: Tensor | None, strides: tuple[int, int, int], window: int | None,
    block: int, max_length: int,
) -> None:  # fmt: skip
    """`max_length` bounds the number of keys of a sequence."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[-2]
    sequences = len(cu_rows) - 1
    _packed_kernel[(count // _ROWS + sequences, heads)](
        q, keys, values, table, tokens, cu_rows, cu_keys, lengths, out, out if normalizers is None else normalizers,
        score_scale(dim), sequences, count, *strides,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)), BLOCK=block,
        WINDOW=window or 0, ROWS=_ROWS, TILE=TILE, PART=PART,
        MULTIPART=max_length > PART, NORMALIZE=normalizers is not None, PRECISION=dot_precision(q), num_warps=4,
    )  # fmt: skip


@cache
def sm_count(device: torch.device) -> int:
    """The number of streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def score_scale(dim: int) -> float:
    """1 / sqrt(dim), times log2(e): the kernels compute softmax with exp2."""
    return dim**-0.5 / _LN_2


def dot_precision(q: Tensor) -> Any:
    """`input_precision` of the kernels' `tl.dot`: never fewer bits than the operands have."""
    return "ieee" if q.dtype == torch.float32 else "tf32"  # "tf32" has no effect on half precision


# -- a decode step ---------------------------------------------------------------------------------
# One query in each row, over a paged cache. The kernel can also take the output of the qkv projection. It then rotates
# queries and keys, and stores the new key and value in the cache.


class UnrotatedQKV(NamedTuple):
    """The output of the qkv projection, before RoPE, and where its key and value go."""

    qkv: Tensor  # [rows, (heads + 2 kv_heads) head_dim]
    cos: Tensor  # [rows, head_dim / 2]
    sin: Tensor
    slots: Tensor  # [rows]: the cache slots of the new keys and values
    heads: int
    pdl: bool = False  # the kernel of the projection triggers PDL


@triton.jit
def _rotate(source, cos, sin, dims, load_mask, DIM: tl.constexpr):
    """Rotate pairs (i, i + DIM / 2) of the heads at `source`, rounding as `rotate_pairs` of `heads.py` does."""
    in_first_half = dims < DIM // 2
    pair = tl.where(in_first_half, dims, dims - DIM // 2)
    in_dim = dims < DIM
    value = tl.load(source + dims, mask=load_mask, other=0.0)
    partner = tl.load(source + tl.where(in_first_half, dims + DIM // 2, pair), mask=load_mask, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=in_dim, other=0.0)
    s = tl.load(sin + pair, mask=in_dim, other=0.0)
    cross = partner * s
    rotated = tl.fma(value.to(tl.float32), tl.broadcast_to(c, value.shape), tl.where(in_first_half, -cross, cross))
    return rotated.to(value.dtype)


@triton.jit
def _decode_kernel(
    q, cos, sin, slots, pages, table, lengths, out, sums, scale, table_stride,
    ROTATE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, MULTIPART: tl.constexpr, PRECISION: tl.constexpr,
    TRIGGERS_PDL: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads that share one key/value head. With PARTS > 1, over one part of a row's keys."""
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    kv_head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # neighbours read the same keys
    length = tl.load(lengths + row)
    begin = visible_from(length - 1, WINDOW, TILE)
    end = length
    if PARTS > 1:
        begin = tl.maximum(begin, part * PART)
        end = tl.minimum(end, (part + 1) * PART)
        if begin >= end:
            return
    group, dims = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    in_dim = dims < DIM
    load_mask = (group < HEADS // KV_HEADS)[:, None] & in_dim
    head = kv_head * (HEADS // KV_HEADS) + group
    keys = pages + kv_head * DIM
    values = keys + KV_HEADS * DIM
    if ROTATE:
        heads = q + row * (HEADS + 2 * KV_HEADS) * DIM
        cos += row * (DIM // 2)
        sin += row * (DIM // 2)
        queries = _rotate(heads + head[:, None] * DIM, cos, sin, dims[None, :], load_mask, DIM)
        if end == length:  # the program of the last positions adds the new one
            new_key = heads + (HEADS + kv_head) * DIM
            slot_offset = tl.load(slots + row).to(tl.int64) * (2 * KV_HEADS * DIM) + dims
            tl.store(keys + slot_offset, _rotate(new_key, cos, sin, dims, in_dim, DIM), mask=in_dim)
            tl.store(
                values + slot_offset, tl.load(new_key + KV_HEADS * DIM + dims, mask=in_dim, other=0.0), mask=in_dim
            )
        tl.debug_barrier()  # so that all threads see the stored key and value
    else:
        queries = tl.load(q + (row * HEADS + head)[:, None] * DIM + dims, mask=load_mask, other=0.0)
    query_positions = tl.zeros((GROUP,), tl.int32) + (length - 1)
    if PARTS > 1:
        max_score, total, acc = attend_part(
            queries, query_positions, keys, values, 2 * KV_HEADS * DIM, 2 * KV_HEADS * DIM, table + row * table_stride,
            0, 0, 0, begin, begin, end, scale, DIM, WIDTH, BLOCK, PREFETCH, WINDOW, TILE, False, PRECISION,
        )  # fmt: skip
        part_index = (row * HEADS + head).to(tl.int64) * PARTS + part
        tl.store(sums + part_index * 2, max_score, mask=group < HEADS // KV_HEADS)
        tl.store(sums + part_index * 2 + 1, total, mask=group < HEADS // KV_HEADS)
        tl.store(out + part_index[:, None] * DIM + dims, acc, mask=load_mask)
    else:
        max_score, total, acc = attend(
            queries, query_positions, keys, values, 2 * KV_HEADS * DIM, 2 * KV_HEADS * DIM, table + row * table_stride,
            0, 0, 0, begin, begin, end, scale,
            DIM, WIDTH, BLOCK, PREFETCH, WINDOW, TILE, PART, MULTIPART, False, PRECISION,
        )  # fmt: skip
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * HEADS + head)[:, None] * DIM + dims, result, mask=load_mask)


@triton.jit
def _combine_kernel(
    parts, sums, lengths, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one head of one row, in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + head // HEADS)
    dims = tl.arange(0, WIDTH)
    in_dim = dims < DIM
    max_score = tl.full((1,), MIN_SCORE, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, WIDTH), tl.float32)
    for part in range(visible_from(length - 1, WINDOW, TILE) // PART, tl.cdiv(length, PART)):
        part_index = head * PARTS + part + tl.arange(0, 1)
        part_acc = tl.load(parts + part_index[:, None] * DIM + dims, mask=in_dim[None, :], other=0.0)
        part_max, part_total = tl.load(sums + part_index * 2), tl.load(sums + part_index * 2 + 1)
        max_score, total, acc = combine_parts(max_score, total, acc, part_max, part_total, part_acc)
    target = out + head * DIM + dims[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_dim[None, :])


def decode(
    q: Tensor | UnrotatedQKV,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    window: int | None,
    split: bool | None = None,
) -> Tensor:
    """See `attention.paged_decode`. With few rows, each part of a row is a separate program; `split` overrides that."""
    _, block, _, kv_heads, dim = pages.shape
    device = pages.device
    triggers_pdl = supports_pdl(device)
    waits = triggers_pdl
    if isinstance(q, UnrotatedQKV):
        query_source, rows, heads = q.qkv, len(q.qkv), q.heads
        rotation = (q.cos, q.sin, q.slots)
        waits = waits and q.pdl
    else:
        query_source, (rows, heads, _) = q, q.shape
        rotation = (q, q, q)
    max_parts = triton.cdiv(table.shape[1] * block, PART)
    few_programs = rows * kv_heads < 2 * sm_count(device)
    if split is None:
        split = few_programs
    parts = max_parts if split else 1
    out = torch.empty((rows, heads, dim), dtype=query_source.dtype, device=device)
    target, sums = out, out
    if parts > 1:
        target = torch.empty((rows, heads, parts, dim), dtype=torch.float32, device=device)
        sums = torch.empty((rows, heads, parts, 2), dtype=torch.float32, device=device)
    width = max(16, triton.next_power_of_2(dim))
    _decode_kernel[(kv_heads, rows, parts)](
        query_source, *rotation, pages, table, lengths, target, sums, score_scale(dim), table.stride(0),
        ROTATE=isinstance(q, UnrotatedQKV), HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width,
        GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK=block, PREFETCH=few_programs,
        WINDOW=window or 0, TILE=TILE, PART=PART, PARTS=parts, MULTIPART=max_parts > 1,
        PRECISION=dot_precision(query_source), TRIGGERS_PDL=triggers_pdl, WAITS=waits,
        num_warps=4 if few_programs else 2, num_stages=3, launch_pdl=waits,
    )  # fmt: skip
    if parts > 1:
        _combine_kernel[(rows * heads,)](
            target, sums, lengths, out,
            HEADS=heads, DIM=dim, WIDTH=width, WINDOW=window or 0, TILE=TILE, PART=PART, PARTS=parts, PDL=triggers_pdl,
            num_warps=1, launch_pdl=triggers_pdl,
        )  # fmt: skip
    return out
