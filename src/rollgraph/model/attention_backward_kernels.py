"""Triton kernels of the backward of packed attention: one for gradients of queries, one for those of keys and values.

Both compute the weights again from the logarithm of each query's sum, and each adds up its results in one program, so
that the order is fixed and nothing is added atomically. Sequences read the keys of a prompt that they share where these
are. Each leaves gradients of its own for them, which `shared_keys_kernels.py` adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.model.attention_kernels import dot_precision, packed_row, processors, sequence_of, visible_from
from rollgraph.model.shared_keys_kernels import sum_over_copies

MOST_DIM = 256  # of a head
_LOG2_E = tl.constexpr(1.4426950408889634)


class BackwardTiling(NamedTuple):
    """How a kernel divides the work: what a program keeps, what it reads at a time, and how it is compiled."""

    kept: int
    read: int
    warps: int
    stages: int


# Of the kernels for queries and for keys, by the width of a head.
_OF_QUERIES = {128: BackwardTiling(64, 64, 4, 2), MOST_DIM: BackwardTiling(64, 32, 8, 2)}
_OF_KEYS = {128: BackwardTiling(64, 32, 4, 3), MOST_DIM: BackwardTiling(64, 32, 8, 2)}


@triton.jit(do_not_specialize=["sequences"])  # specialized to 1, the search does not compile
def _query_kernel(
    d_out, out, q, k, v, normalizers, products, tokens, cu_rows, cu_keys, d_q, scale, sequences, count_all,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS queries of one head of one sequence, and the product of each result with its gradient."""
    program, head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of(program, cu_rows, sequences, ROWS)
    begin_rows = tl.load(cu_rows + sequence)
    count = tl.load(cu_rows + sequence + 1) - begin_rows
    tile = program - begin_rows // ROWS - sequence
    if tile * ROWS >= count:
        return
    begin_keys = tl.load(cu_keys + sequence)
    length = tl.load(cu_keys + sequence + 1) - begin_keys
    shared = length - count
    first = 0
    if shared > 0:
        first = tl.load(tokens + begin_keys).to(tl.int32)
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_row, in_dim = row < count, dims < DIM
    shown = in_row[:, None] & in_dim
    position = shared + row
    here = ((begin_rows + row).to(tl.int64) * HEADS + head)[:, None] * DIM + dims
    queries = tl.load(q + here, mask=shown, other=0.0)
    gradients = tl.load(d_out + here, mask=shown, other=0.0)
    results = tl.load(out + here, mask=shown, other=0.0)
    product = tl.sum(gradients.to(tl.float32) * results.to(tl.float32), 1)
    per_row = head.to(tl.int64) * count_all + begin_rows + row
    tl.store(products + per_row, product, mask=in_row)
    normalizer = tl.load(normalizers + per_row, mask=in_row, other=0.0) * _LOG2_E
    kv_head = head // (HEADS // KV_HEADS)
    keys, values = k + kv_head * DIM, v + kv_head * DIM
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tl.minimum(shared + (tile + 1) * ROWS, length)
    for start in range(visible_from(shared + tile * ROWS, WINDOW, TILE), end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        at = packed_row(place, first, shared, begin_rows)[:, None] * (KV_HEADS * DIM) + dims
        tile_keys = tl.load(keys + at, mask=inside[:, None] & in_dim, other=0.0)
        tile_values = tl.load(values + at, mask=inside[:, None] & in_dim, other=0.0)
        scores = tl.dot(queries, tl.trans(tile_keys), input_precision=PRECISION)
        seen = (place <= position[:, None]) & inside
        if WINDOW > 0:
            seen = seen & (position[:, None] - place < WINDOW)
        weights = tl.where(seen, tl.exp2(scores * (scale * _LOG2_E) - normalizer[:, None]), 0.0)
        d_weights = tl.dot(gradients, tl.trans(tile_values), input_precision=PRECISION)
        d_scores = (weights * (d_weights - product[:, None])).to(tile_keys.dtype)
        total = tl.dot(d_scores, tile_keys, total, input_precision=PRECISION)
    tl.store(d_q + here, (total * scale).to(d_q.dtype.element_ty), mask=shown)


@triton.jit(do_not_specialize=["sequences", "keys_all"])
def _key_kernel(
    d_out, q, k, v, normalizers, products, tokens, cu_rows, cu_keys, d_k, d_v, scale, sequences, count_all, keys_all,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of TILE keys and values of one head, as far as the queries of one sequence see them.

    They come from SHARE of the heads of these queries. Other programs have the others, and results of their own.
    """
    program, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = sequence_of(program, cu_keys, sequences, TILE)
    begin_keys = tl.load(cu_keys + sequence)
    length = tl.load(cu_keys + sequence + 1) - begin_keys
    first_place = (program - begin_keys // TILE - sequence) * TILE
    if first_place >= length:
        return
    begin_rows = tl.load(cu_rows + sequence)
    count = tl.load(cu_rows + sequence + 1) - begin_rows
    shared = length - count
    first = 0
    if shared > 0:
        first = tl.load(tokens + begin_keys).to(tl.int32)
    place, dims = first_place + tl.arange(0, TILE), tl.arange(0, WIDTH)
    inside, in_dim = place < length, dims < DIM
    shown = inside[:, None] & in_dim
    at = packed_row(place, first, shared, begin_rows)[:, None] * (KV_HEADS * DIM) + dims
    keys = tl.load(k + kv_head * DIM + at, mask=shown, other=0.0)
    values = tl.load(v + kv_head * DIM + at, mask=shown, other=0.0)
    d_keys = tl.zeros((TILE, WIDTH), tl.float32)
    d_values = tl.zeros((TILE, WIDTH), tl.float32)
    begin = tl.maximum(first_place - shared, 0) // ROWS * ROWS  # queries before it see none of these keys
    end = count
    if WINDOW > 0:
        end = tl.maximum(tl.minimum(count, first_place + TILE - 1 + WINDOW - shared), begin)
    tiles = tl.cdiv(end - begin, ROWS)
    for index in range(tiles * SHARE):
        head = kv_head * (HEADS // KV_HEADS) + part * SHARE + index // tiles
        row = begin + index % tiles * ROWS + tl.arange(0, ROWS)
        in_row = row < end
        here = ((begin_rows + row).to(tl.int64) * HEADS + head)[:, None] * DIM + dims
        queries = tl.load(q + here, mask=in_row[:, None] & in_dim, other=0.0)
        gradients = tl.load(d_out + here, mask=in_row[:, None] & in_dim, other=0.0)
        per_row = head.to(tl.int64) * count_all + begin_rows + row
        normalizer = tl.load(normalizers + per_row, mask=in_row, other=0.0) * _LOG2_E
        product = tl.load(products + per_row, mask=in_row, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        position = shared + row
        seen = (place[:, None] <= position) & in_row & inside[:, None]
        if WINDOW > 0:
            seen = seen & (position - place[:, None] < WINDOW)
        weights = tl.where(seen, tl.exp2(scores * (scale * _LOG2_E) - normalizer), 0.0)
        d_values = tl.dot(weights.to(gradients.dtype), gradients, d_values, input_precision=PRECISION)
        d_weights = tl.dot(values, tl.trans(gradients), input_precision=PRECISION)
        d_scores = (weights * (d_weights - product)).to(queries.dtype)
        d_keys = tl.dot(d_scores, queries, d_keys, input_precision=PRECISION)
    at_key = part.to(tl.int64) * keys_all + begin_keys + place
    target = (at_key * KV_HEADS + kv_head)[:, None] * DIM + dims
    tl.store(d_k + target, (d_keys * scale).to(d_k.dtype.element_ty), mask=shown)
    tl.store(d_v + target, d_values.to(d_v.dtype.element_ty), mask=shown)


def packed_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, out: Tensor,
    normalizers: Tensor, window: int | None, shares: bool, parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, given what `attention_kernels.packed` returned. All tensors are contiguous.

    `shares` says whether sequences can share a prompt; otherwise `tokens` is not used. The query heads of a key/value
    head are divided into `parts`, of which each has programs of its own, if there are few programs.
    """
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    sequences = len(cu_rows) - 1
    width = max(16, triton.next_power_of_2(dim))
    d_q = torch.empty_like(q)
    products = torch.empty_like(normalizers)
    common = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": width, "WINDOW": window or 0,
        "PRECISION": dot_precision(q),
    }  # fmt: skip
    scale = dim**-0.5
    tiling = _OF_QUERIES[max(128, width)]
    _query_kernel[(count // tiling.kept + sequences, heads)](
        d_out, out, q, k, v, normalizers, products, tokens, cu_rows, cu_keys, d_q, scale, sequences, count,
        ROWS=tiling.kept, TILE=tiling.read, **common, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    tiling = _OF_KEYS[max(128, width)]
    keys = len(tokens) if shares else len(k)
    programs = keys // tiling.kept + sequences
    if parts is None:
        parts = _suited_parts(heads // kv_heads, programs * kv_heads, q.device)
    summed = torch.float32 if shares or parts > 1 else k.dtype
    both = torch.empty((2, parts, keys, kv_heads, dim), dtype=summed, device=k.device)
    _key_kernel[(programs, kv_heads, parts)](
        d_out, q, k, v, normalizers, products, tokens, cu_rows, cu_keys, *both, scale, sequences, count, keys,
        TILE=tiling.kept, ROWS=tiling.read, SHARE=heads // kv_heads // parts, **common,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    both = both.sum(1) if parts > 1 else both[:, 0]
    if shares:
        d_k, d_v = sum_over_copies(both[0], both[1], tokens, cu_rows, cu_keys, count, q.dtype)
    else:
        d_k, d_v = both.to(k.dtype)
    return d_q, d_k, d_v


def _suited_parts(group: int, programs: int, device: torch.device) -> int:
    """The most parts of a group of heads that the device can still run at the same time."""
    enough = 2 * processors(device)
    return max(part for part in range(1, group + 1) if group % part == 0 and (part == 1 or programs * part <= enough))
