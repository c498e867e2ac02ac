"""Triton kernels of the backward of packed attention, where sequences can share the keys and values of a prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.model.kernels.attention import dot_precision, find_sequence, packed_row, sm_count, visible_from

# -- gradients of keys that sequences share --------------------------------------------------------
# In the backward, every sequence writes separate gradients for the keys of its shared prompt. We add them up in fp32 in
# the order of the sequences, so the sum is deterministic.


@triton.jit(do_not_specialize=["sequences"])  # specialized to 1, the loop does not compile
def _sum_copies_kernel(
    d_keys, d_values, out_keys, out_values, tokens, cu_rows, cu_keys, sequences, width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of all copies of one token's key, and of its value."""
    token, at = tl.program_id(0), tl.arange(0, WIDTH)
    inside = at < width
    low, high = 0, sequences
    while high - low > 1:  # binary search for the token's sequence: the last that begins at or before it
        middle = (low + high) // 2
        has_begun = tl.load(cu_rows + middle) <= token
        low = tl.where(has_begun, middle, low)
        high = tl.where(has_begun, high, middle)
    begin, key = tl.load(cu_rows + low), tl.load(cu_keys + low)
    shared = tl.load(cu_keys + low + 1) - key - (tl.load(cu_rows + low + 1) - begin)
    row = (key + shared + token - begin).to(tl.int64)
    d_key = tl.load(d_keys + row * width + at, mask=inside, other=0.0).to(tl.float32)
    d_value = tl.load(d_values + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sharing = low + 1
    more = sharing < sequences
    while more:  # the sequences that share this prompt follow it
        key = tl.load(cu_keys + sharing)
        shared = tl.load(cu_keys + sharing + 1) - key
        shared -= tl.load(cu_rows + sharing + 1) - tl.load(cu_rows + sharing)
        more = shared > 0
        if more:
            more = tl.load(tokens + key) == begin
        if more:
            row = (key + token - begin).to(tl.int64)
            d_key += tl.load(d_keys + row * width + at, mask=inside, other=0.0).to(tl.float32)
            d_value += tl.load(d_values + row * width + at, mask=inside, other=0.0).to(tl.float32)
        sharing += 1
        more = more & (sharing < sequences)
    target = token.to(tl.int64) * width + at
    tl.store(out_keys + target, d_key.to(out_keys.dtype.element_ty), mask=inside)
    tl.store(out_values + target, d_value.to(out_values.dtype.element_ty), mask=inside)


def sum_over_copies(
    d_keys: Tensor, d_values: Tensor, tokens: Tensor, cu_rows: Tensor, cu_keys: Tensor, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of the keys and values of `rows` tokens: the sums over their copies.

    Row i of `d_keys` and of `d_values` belongs to a copy of token `tokens[i]`.
    """
    d_keys = d_keys.contiguous()
    d_values = d_values.contiguous()
    sequences = len(cu_rows) - 1
    width = d_keys[0].numel()
    out_keys = torch.empty((rows, *d_keys.shape[1:]), dtype=dtype, device=d_keys.device)
    out_values = torch.empty_like(out_keys)
    _sum_copies_kernel[(rows,)](
        d_keys, d_values, out_keys, out_values, tokens, cu_rows, cu_keys, sequences, width,
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out_keys, out_values


# -- the backward ----------------------------------------------------------------------------------
# Both kernels recompute the weights from the logsumexp of each query. Each sum belongs to one program, so its order is
# fixed and there are no atomics. Sequences read the keys of a shared prompt in place, and write separate gradients for
# them, which the kernel above adds up.

MAX_HEAD_DIM = 256
_LOG2_E = tl.constexpr(1.4426950408889634)


class BackwardTiling(NamedTuple):
    """Tile sizes of a backward kernel, and how it is compiled."""

    block: int  # queries or keys whose gradients a program computes
    step: int  # of the other kind, read at a time
    warps: int
    stages: int


# Of the kernels for queries and for keys, by head_dim.
_QUERY_TILINGS = {128: BackwardTiling(64, 64, 4, 2), MAX_HEAD_DIM: BackwardTiling(64, 32, 8, 2)}
_KEY_TILINGS = {128: BackwardTiling(64, 32, 4, 3), MAX_HEAD_DIM: BackwardTiling(64, 32, 8, 2)}


@triton.jit(do_not_specialize=["sequences"])  # specialized to 1, the search does not compile
def _query_kernel(
    d_out, out, q, k, v, normalizers, deltas, tokens, cu_rows, cu_keys, d_q, scale, sequences, count_all,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS queries of one head of one sequence, and their deltas, sum(out * d_out)."""
    program, head = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(program, cu_rows, sequences, ROWS)
    begin_rows = tl.load(cu_rows + sequence)
    count = tl.load(cu_rows + sequence + 1) - begin_rows
    tile = program - begin_rows // ROWS - sequence
    if tile * ROWS >= count:
        return
    begin_keys = tl.load(cu_keys + sequence)
    length = tl.load(cu_keys + sequence + 1) - begin_keys
    shared_length = length - count
    shared_start = 0
    if shared_length > 0:
        shared_start = tl.load(tokens + begin_keys).to(tl.int32)
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_row, in_dim = row < count, dims < DIM
    load_mask = in_row[:, None] & in_dim
    query_position = shared_length + row
    q_offset = ((begin_rows + row).to(tl.int64) * HEADS + head)[:, None] * DIM + dims
    queries = tl.load(q + q_offset, mask=load_mask, other=0.0)
    gradients = tl.load(d_out + q_offset, mask=load_mask, other=0.0)
    results = tl.load(out + q_offset, mask=load_mask, other=0.0)
    delta = tl.sum(gradients.to(tl.float32) * results.to(tl.float32), 1)
    row_index = head.to(tl.int64) * count_all + begin_rows + row
    tl.store(deltas + row_index, delta, mask=in_row)
    normalizer = tl.load(normalizers + row_index, mask=in_row, other=0.0) * _LOG2_E
    kv_head = head // (HEADS // KV_HEADS)
    keys, values = k + kv_head * DIM, v + kv_head * DIM
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tl.minimum(shared_length + (tile + 1) * ROWS, length)
    for start in range(visible_from(shared_length + tile * ROWS, WINDOW, TILE), end, TILE):
        key_position = start + tl.arange(0, TILE)
        inside = key_position < end
        at = packed_row(key_position, shared_start, shared_length, begin_rows)[:, None] * (KV_HEADS * DIM) + dims
        tile_keys = tl.load(keys + at, mask=inside[:, None] & in_dim, other=0.0)
        tile_values = tl.load(values + at, mask=inside[:, None] & in_dim, other=0.0)
        scores = tl.dot(queries, tl.trans(tile_keys), input_precision=PRECISION)
        visible = (key_position <= query_position[:, None]) & inside
        if WINDOW > 0:
            visible = visible & (query_position[:, None] - key_position < WINDOW)
        weights = tl.where(visible, tl.exp2(scores * (scale * _LOG2_E) - normalizer[:, None]), 0.0)
        d_weights = tl.dot(gradients, tl.trans(tile_values), input_precision=PRECISION)
        d_scores = (weights * (d_weights - delta[:, None])).to(tile_keys.dtype)
        total = tl.dot(d_scores, tile_keys, total, input_precision=PRECISION)
    tl.store(d_q + q_offset, (total * scale).to(d_q.dtype.element_ty), mask=load_mask)


@triton.jit(do_not_specialize=["sequences", "keys_all"])
def _key_kernel(
    d_out, q, k, v, normalizers, deltas, tokens, cu_rows, cu_keys, d_k, d_v, scale, sequences, count_all, keys_all,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, HEADS_PER_PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of TILE keys and values of one head, from the queries of one sequence.

    The program sums over HEADS_PER_PART of the query heads. Other programs take the others, and write to other memory.
    """
    program, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = find_sequence(program, cu_keys, sequences, TILE)
    begin_keys = tl.load(cu_keys + sequence)
    length = tl.load(cu_keys + sequence + 1) - begin_keys
    first_position = (program - begin_keys // TILE - sequence) * TILE
    if first_position >= length:
        return
    begin_rows = tl.load(cu_rows + sequence)
    count = tl.load(cu_rows + sequence + 1) - begin_rows
    shared_length = length - count
    shared_start = 0
    if shared_length > 0:
        shared_start = tl.load(tokens + begin_keys).to(tl.int32)
    key_position, dims = first_position + tl.arange(0, TILE), tl.arange(0, WIDTH)
    inside, in_dim = key_position < length, dims < DIM
    load_mask = inside[:, None] & in_dim
    at = packed_row(key_position, shared_start, shared_length, begin_rows)[:, None] * (KV_HEADS * DIM) + dims
    keys = tl.load(k + kv_head * DIM + at, mask=load_mask, other=0.0)
    values = tl.load(v + kv_head * DIM + at, mask=load_mask, other=0.0)
    d_keys = tl.zeros((TILE, WIDTH), tl.float32)
    d_values = tl.zeros((TILE, WIDTH), tl.float32)
    begin = tl.maximum(first_position - shared_length, 0) // ROWS * ROWS  # queries before it see none of these keys
    end = count
    if WINDOW > 0:
        end = tl.maximum(tl.minimum(count, first_position + TILE - 1 + WINDOW - shared_length), begin)
    tiles = tl.cdiv(end - begin, ROWS)
    for index in range(tiles * HEADS_PER_PART):
        head = kv_head * (HEADS // KV_HEADS) + part * HEADS_PER_PART + index // tiles
        row = begin + index % tiles * ROWS + tl.arange(0, ROWS)
        in_row = row < end
        q_offset = ((begin_rows + row).to(tl.int64) * HEADS + head)[:, None] * DIM + dims
        queries = tl.load(q + q_offset, mask=in_row[:, None] & in_dim, other=0.0)
        gradients = tl.load(d_out + q_offset, mask=in_row[:, None] & in_dim, other=0.0)
        row_index = head.to(tl.int64) * count_all + begin_rows + row
        normalizer = tl.load(normalizers + row_index, mask=in_row, other=0.0) * _LOG2_E
        delta = tl.load(deltas + row_index, mask=in_row, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        query_position = shared_length + row
        visible = (key_position[:, None] <= query_position) & in_row & inside[:, None]
        if WINDOW > 0:
            visible = visible & (query_position - key_position[:, None] < WINDOW)
        weights = tl.where(visible, tl.exp2(scores * (scale * _LOG2_E) - normalizer), 0.0)
        d_values = tl.dot(weights.to(gradients.dtype), gradients, d_values, input_precision=PRECISION)
        d_weights = tl.dot(values, tl.trans(gradients), input_precision=PRECISION)
        d_scores = (weights * (d_weights - delta)).to(queries.dtype)
        d_keys = tl.dot(d_scores, queries, d_keys, input_precision=PRECISION)
    at_key = part.to(tl.int64) * keys_all + begin_keys + key_position
    target = (at_key * KV_HEADS + kv_head)[:, None] * DIM + dims
    tl.store(d_k + target, (d_keys * scale).to(d_k.dtype.element_ty), mask=load_mask)
    tl.store(d_v + target, d_values.to(d_v.dtype.element_ty), mask=load_mask)


def packed_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, out: Tensor,
    normalizers: Tensor, window: int | None, has_shared_prompts: bool, parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from the results of `attention.packed_attention`. All tensors are contiguous.

    `has_shared_prompts` says whether sequences can share a prompt; otherwise `tokens` is not used. If there are few
    programs, the query heads of a key/value head are divided into `parts` with separate programs.
    """
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    sequences = len(cu_rows) - 1
    width = max(16, triton.next_power_of_2(dim))
    d_q = torch.empty_like(q)
    deltas = torch.empty_like(normalizers)
    common = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": width, "WINDOW": window or 0,
        "PRECISION": dot_precision(q),
    }  # fmt: skip
    scale = dim**-0.5
    tiling = _QUERY_TILINGS[max(128, width)]
    _query_kernel[(count // tiling.block + sequences, heads)](
        d_out, out, q, k, v, normalizers, deltas, tokens, cu_rows, cu_keys, d_q, scale, sequences, count,
        ROWS=tiling.block, TILE=tiling.step, **common, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    tiling = _KEY_TILINGS[max(128, width)]
    keys = len(tokens) if has_shared_prompts else len(k)
    programs = keys // tiling.block + sequences
    if parts is None:
        parts = _choose_parts(heads // kv_heads, programs * kv_heads, q.device)
    sum_dtype = torch.float32 if has_shared_prompts or parts > 1 else k.dtype
    d_kv = torch.empty((2, parts, keys, kv_heads, dim), dtype=sum_dtype, device=k.device)
    _key_kernel[(programs, kv_heads, parts)](
        d_out, q, k, v, normalizers, deltas, tokens, cu_rows, cu_keys, *d_kv, scale, sequences, count, keys,
        TILE=tiling.block, ROWS=tiling.step, HEADS_PER_PART=heads // kv_heads // parts, **common,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    d_kv = d_kv.sum(1) if parts > 1 else d_kv[:, 0]
    if has_shared_prompts:
        d_k, d_v = sum_over_copies(d_kv[0], d_kv[1], tokens, cu_rows, cu_keys, count, q.dtype)
    else:
        d_k, d_v = d_kv.to(k.dtype)
    return d_q, d_k, d_v


def _choose_parts(group: int, programs: int, device: torch.device) -> int:
    """The largest number of parts of a group of heads that the device still runs at the same time."""
    max_programs = 2 * sm_count(device)
    return max(
        part for part in range(1, group + 1) if group % part == 0 and (part == 1 or programs * part <= max_programs)
    )
