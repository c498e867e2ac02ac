"""Triton kernels of the paged key/value cache: store, decode attention, prefill attention.

They launch outside of PyTorch's dispatcher. The undo log of a capture therefore does not see their writes to the cache,
and does not copy the whole cache in order to roll back a warm-up. It does not need to: before the first request, the
cache holds nothing that matters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # keys that a program reads in one iteration
_ROWS = 64  # queries of one prefill program


@triton.jit
def _store_kernel(
    qkv, cos, sin, q_weight, k_weight, slots, q_out, pages, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of one token. Queries go to q_out, keys and values to their slot in the cache."""
    token, head, at = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)[:, None], tl.arange(0, HALF)
    half = at < DIM // 2
    inside = (head < HEADS + 2 * KV_HEADS) & half
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    turned = head < HEADS + KV_HEADS  # values are stored unchanged
    if NORMED:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        q_first = tl.load(q_weight + at, mask=half, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + at, mask=half, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + DIM // 2 + at, mask=half, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + DIM // 2 + at, mask=half, other=0.0).to(tl.float32)
        first = tl.where(turned, first * scale * tl.where(head < HEADS, q_first, k_first), first)
        second = tl.where(turned, second * scale * tl.where(head < HEADS, q_second, k_second), second)
    c = tl.where(turned, tl.load(cos + token * (DIM // 2) + at, mask=half, other=0.0), 1.0)
    s = tl.where(turned, tl.load(sin + token * (DIM // 2) + at, mask=half, other=0.0), 0.0)
    first, second = first * c - second * s, second * c + first * s
    query = inside & (head < HEADS)
    target = q_out + (token * HEADS + head) * DIM + at
    tl.store(target, first.to(q_out.dtype.element_ty), mask=query)
    tl.store(target + DIM // 2, second.to(q_out.dtype.element_ty), mask=query)
    place = inside & (head >= HEADS)
    target = pages + (tl.load(slots + token).to(tl.int64) * (2 * KV_HEADS) + head - HEADS) * DIM + at
    tl.store(target, first.to(pages.dtype.element_ty), mask=place)
    tl.store(target + DIM // 2, second.to(pages.dtype.element_ty), mask=place)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    slots: Tensor,
    pages: Tensor,
    heads: int,
) -> Tensor:
    """The queries, [tokens, heads, head_dim], of the projection `qkv`. Its keys and values go to `slots` of the cache.

    `weights` are those of the query and key norms; None leaves the norms out.
    """
    _, _, _, kv_heads, dim = pages.shape
    q = torch.empty((qkv.shape[0], heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = weights or (qkv, qkv)
    _store_kernel[(qkv.shape[0],)](
        qkv, cos, sin, q_weight, k_weight, slots, q, pages, eps,
        HEADS=heads, KV_HEADS=kv_heads, ALL=triton.next_power_of_2(heads + 2 * kv_heads), DIM=dim,
        HALF=triton.next_power_of_2(dim // 2), NORMED=weights is not None, num_warps=4,
    )  # fmt: skip
    return q


@triton.jit
def _look(
    queries, positions, pages, table, begin, end, kv_head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of queries, [n, WIDTH], at `positions` over the places begin to end of one row of the table.

    Gives each query's highest score, the sum of its weights relative to that score, and the weighted sum of values.
    """
    dims = tl.arange(0, WIDTH)
    in_dim = dims < DIM
    best = tl.full((queries.shape[0],), -1e30, tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    mixed = tl.zeros((queries.shape[0], WIDTH), tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        block = tl.load(table + place // BLOCK, mask=inside, other=0)
        at = ((block.to(tl.int64) * BLOCK + place % BLOCK) * (2 * KV_HEADS) + kv_head) * DIM
        shown = inside[:, None] & in_dim
        keys = tl.load(pages + at[:, None] + dims, mask=shown, other=0.0)
        values = tl.load(pages + at[:, None] + KV_HEADS * DIM + dims, mask=shown, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = (place <= positions[:, None]) & inside
        if WINDOW > 0:
            seen = seen & (positions[:, None] - place < WINDOW)
        scores = tl.where(seen, scores, -1e30)
        highest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - highest[:, None]), 0.0)
        shrink = tl.exp(best - highest)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        best = highest
    return best, total, mixed


@triton.jit
def _decode_kernel(
    q, pages, table, lengths, out, sums, scale, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads that share one key/value head, over one of SPLITS parts of a row's places."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    part = tl.cdiv(tl.cdiv(length - begin, TILE), SPLITS) * TILE
    begin = begin + split * part
    end = tl.minimum(begin + part, length)

    group, dims = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    in_group, in_dim = group < HEADS // KV_HEADS, dims < DIM
    head = kv_head * (HEADS // KV_HEADS) + group
    queries = tl.load(q + (row * HEADS + head)[:, None] * DIM + dims, mask=in_group[:, None] & in_dim, other=0.0)
    positions = tl.zeros((GROUP,), tl.int32) + (length - 1)
    best, total, mixed = _look(
        queries, positions, pages, table + row * table_stride, begin, end, kv_head, scale,
        KV_HEADS, DIM, WIDTH, BLOCK, WINDOW, TILE, PRECISION,
    )  # fmt: skip
    where = (row * HEADS + head) * SPLITS + split
    if SPLITS == 1:
        mixed = mixed / total[:, None]
    else:
        tl.store(sums + where * 2, best, mask=in_group)
        tl.store(sums + where * 2 + 1, total, mask=in_group)
    tl.store(out + where[:, None] * DIM + dims, mixed.to(out.dtype.element_ty), mask=in_group[:, None] & in_dim)


@triton.jit
def _join_kernel(parts, sums, out, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the SPLITS parts of one head of one row."""
    head = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    in_dim = dims < DIM
    best = tl.load(sums + (head * SPLITS + splits) * 2)
    weight = tl.exp(best - tl.max(best, 0))
    total = tl.sum(weight * tl.load(sums + (head * SPLITS + splits) * 2 + 1), 0)
    mixed = tl.load(parts + (head * SPLITS + splits)[:, None] * DIM + dims, mask=in_dim, other=0.0)
    mixed = tl.sum(mixed * weight[:, None], 0) / total
    tl.store(out + head * DIM + dims, mixed.to(out.dtype.element_ty), mask=in_dim)


def decode(
    q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, window: int | None, splits: int | None = None
) -> Tensor:
    """See `attention.paged_decode`. If there are few rows, each is split over several programs and joined again."""
    rows, heads, dim = q.shape
    _, block, _, kv_heads, _ = pages.shape
    splits = splits or _splits(rows * kv_heads, table.shape[1] * block, q.device)
    crowded = rows * kv_heads > 4 * _processors(q.device)
    out = torch.empty_like(q)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=q.device)
    width = max(16, triton.next_power_of_2(dim))
    _decode_kernel[(rows, kv_heads, splits)](
        q, pages, table, lengths, parts, sums, dim**-0.5, table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=block, WINDOW=window or 0, SPLITS=splits, TILE=_TILE // 2 if crowded else _TILE, PRECISION=_precision(q),
        num_warps=2 if crowded else 4, num_stages=2 if crowded else 3,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows * heads,)](parts, sums, out, DIM=dim, WIDTH=width, SPLITS=splits, num_warps=1)
    return out


def _splits(programs: int, places: int, device: torch.device) -> int:
    """Into how many parts to split a row: a power of two that fills the GPU four times over, if rows are long enough.

    If most of the GPU would idle, a part may be as short as one tile. Otherwise parts must be long enough to pay for
    joining them.
    """
    processors = _processors(device)
    useful = triton.cdiv(places, _TILE) if 4 * programs <= processors else places // (4 * _TILE)
    wanted = min(4 * processors // programs, triton.next_power_of_2(max(useful, 1)), 32)
    return 1 << max(0, wanted.bit_length() - 1)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _prefill_kernel(
    q, pages, table, cu_seqlens, lengths, out, scale, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of ROWS queries of one head of one sequence."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - first
    if tile * ROWS >= count:
        return
    length = tl.load(lengths + sequence)
    kv_head = head // (HEADS // KV_HEADS)
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_row, in_dim = row < count, dims < DIM
    position = length - count + row
    at_q = ((first + row).to(tl.int64) * HEADS + head) * DIM
    queries = tl.load(q + at_q[:, None] + dims, mask=in_row[:, None] & in_dim, other=0.0)
    end = tl.minimum(length - count + (tile + 1) * ROWS, length)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - count + tile * ROWS - WINDOW + 1, 0)
    _, total, mixed = _look(
        queries, position, pages, table + sequence * table_stride, lowest, end, kv_head, scale,
        KV_HEADS, DIM, WIDTH, BLOCK, WINDOW, TILE, PRECISION,
    )  # fmt: skip
    mixed = mixed / tl.where(in_row, total, 1.0)[:, None]
    tl.store(out + at_q[:, None] + dims, mixed.to(out.dtype.element_ty), mask=in_row[:, None] & in_dim)


def prefill(q: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """See `attention.paged_prefill`."""
    tokens, heads, dim = q.shape
    _, block, _, kv_heads, _ = pages.shape
    out = torch.zeros_like(q)  # so that padding stays finite
    _prefill_kernel[(triton.cdiv(tokens, _ROWS), heads, table.shape[0])](
        q, pages, table, cu_seqlens, lengths, out, dim**-0.5, table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)), BLOCK=block,
        WINDOW=window or 0, ROWS=_ROWS, TILE=_TILE, PRECISION=_precision(q), num_warps=4,
    )  # fmt: skip
    return out


def _precision(q: Tensor) -> Any:
    return "ieee" if q.dtype == torch.float32 else "tf32"  # "tf32" has no effect on half precision
