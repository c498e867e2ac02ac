"""Triton kernels of attention of a decode step: one query in each row, over a paged cache.

The kernel can begin where the qkv projection ends: it then rotates queries and the new key as `head_kernels.py` does,
and writes key and value to the cache. The arithmetic of attention is that of `attention_kernels.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.attention_kernels import (
    NOTHING,
    PART,
    TILE,
    attend,
    attend_part,
    dot_precision,
    join,
    processors,
    score_scale,
    visible_from,
)
from rollgraph.model.chained_launch import can_chain


class Unrotated(NamedTuple):
    """A projection that is not divided into heads yet, and what it takes to do so."""

    qkv: Tensor  # [rows, (heads + 2 kv_heads) head_dim]
    cos: Tensor  # [rows, head_dim / 2]
    sin: Tensor
    slots: Tensor  # [rows]: where the cache takes the new key and value
    heads: int
    chained: bool = False  # the kernel of the projection lets the next one start early


@triton.jit
def _rotate(source, cos, sin, dims, shown, DIM: tl.constexpr):
    """Rotate pairs (i, i + DIM / 2) of the heads at `source`. What is rounded is what `head_kernels.turn` rounds."""
    first = dims < DIM // 2
    place = tl.where(first, dims, dims - DIM // 2)
    inside = dims < DIM
    value = tl.load(source + dims, mask=shown, other=0.0)
    other = tl.load(source + tl.where(first, dims + DIM // 2, place), mask=shown, other=0.0).to(tl.float32)
    c = tl.load(cos + place, mask=inside, other=0.0)
    s = tl.load(sin + place, mask=inside, other=0.0)
    product = other * s
    turned = tl.fma(value.to(tl.float32), tl.broadcast_to(c, value.shape), tl.where(first, -product, product))
    return turned.to(value.dtype)


@triton.jit
def _decode_kernel(
    q, cos, sin, slots, pages, table, lengths, out, sums, scale, table_stride,
    ROTATES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr,
    STARTS_NEXT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads that share one key/value head. With PARTS > 1, over one part of a row's places."""
    if STARTS_NEXT:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    kv_head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # neighbours read the same places
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
    shown = (group < HEADS // KV_HEADS)[:, None] & in_dim
    head = kv_head * (HEADS // KV_HEADS) + group
    keys = pages + kv_head * DIM
    values = keys + KV_HEADS * DIM
    if ROTATES:
        heads = q + row * (HEADS + 2 * KV_HEADS) * DIM
        cos += row * (DIM // 2)
        sin += row * (DIM // 2)
        queries = _rotate(heads + head[:, None] * DIM, cos, sin, dims[None, :], shown, DIM)
        if end == length:  # the program of the last places adds the new one to them
            new = heads + (HEADS + kv_head) * DIM
            here = tl.load(slots + row).to(tl.int64) * (2 * KV_HEADS * DIM) + dims
            tl.store(keys + here, _rotate(new, cos, sin, dims, in_dim, DIM), mask=in_dim)
            tl.store(values + here, tl.load(new + KV_HEADS * DIM + dims, mask=in_dim, other=0.0), mask=in_dim)
        tl.debug_barrier()  # all threads see what one has stored
    else:
        queries = tl.load(q + (row * HEADS + head)[:, None] * DIM + dims, mask=shown, other=0.0)
    positions = tl.zeros((GROUP,), tl.int32) + (length - 1)
    if PARTS > 1:
        best, total, mixed = attend_part(
            queries, positions, keys, values, 2 * KV_HEADS * DIM, 2 * KV_HEADS * DIM, table + row * table_stride,
            0, 0, 0, begin, begin, end, scale, DIM, WIDTH, BLOCK, AHEAD, WINDOW, TILE, False, PRECISION,
        )  # fmt: skip
        where = (row * HEADS + head).to(tl.int64) * PARTS + part
        tl.store(sums + where * 2, best, mask=group < HEADS // KV_HEADS)
        tl.store(sums + where * 2 + 1, total, mask=group < HEADS // KV_HEADS)
        tl.store(out + where[:, None] * DIM + dims, mixed, mask=shown)
    else:
        best, total, mixed = attend(
            queries, positions, keys, values, 2 * KV_HEADS * DIM, 2 * KV_HEADS * DIM, table + row * table_stride,
            0, 0, 0, begin, begin, end, scale, DIM, WIDTH, BLOCK, AHEAD, WINDOW, TILE, PART, SEVERAL, False, PRECISION,
        )  # fmt: skip
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * HEADS + head)[:, None] * DIM + dims, result, mask=shown)


@triton.jit
def _join_kernel(
    parts, sums, lengths, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Join the parts of one head of one row, in order."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + head // HEADS)
    dims = tl.arange(0, WIDTH)
    in_dim = dims < DIM
    best = tl.full((1,), NOTHING, tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((1, WIDTH), tl.float32)
    for part in range(visible_from(length - 1, WINDOW, TILE) // PART, tl.cdiv(length, PART)):
        where = head * PARTS + part + tl.arange(0, 1)
        part_mixed = tl.load(parts + where[:, None] * DIM + dims, mask=in_dim[None, :], other=0.0)
        part_best, part_total = tl.load(sums + where * 2), tl.load(sums + where * 2 + 1)
        best, total, mixed = join(best, total, mixed, part_best, part_total, part_mixed)
    target = out + head * DIM + dims[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=in_dim[None, :])


def decode(
    q: Tensor | Unrotated, pages: Tensor, table: Tensor, lengths: Tensor, window: int | None, split: bool | None = None
) -> Tensor:
    """See `attention.paged_decode`. If there are few rows, each part of a row is given to a program of its own."""
    _, block, _, kv_heads, dim = pages.shape
    device = pages.device
    chains = can_chain(device)
    waits = chains
    if isinstance(q, Unrotated):
        source, rows, heads = q.qkv, len(q.qkv), q.heads
        rotation = (q.cos, q.sin, q.slots)
        waits = waits and q.chained
    else:
        source, (rows, heads, _) = q, q.shape
        rotation = (q, q, q)
    most = triton.cdiv(table.shape[1] * block, PART)
    few = rows * kv_heads < 2 * processors(device)
    if split is None:
        split = few
    parts = most if split else 1
    out = torch.empty((rows, heads, dim), dtype=source.dtype, device=device)
    target, sums = out, out
    if parts > 1:
        target = torch.empty((rows, heads, parts, dim), dtype=torch.float32, device=device)
        sums = torch.empty((rows, heads, parts, 2), dtype=torch.float32, device=device)
    width = max(16, triton.next_power_of_2(dim))
    _decode_kernel[(kv_heads, rows, parts)](
        source, *rotation, pages, table, lengths, target, sums, score_scale(dim), table.stride(0),
        ROTATES=isinstance(q, Unrotated), HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width,
        GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK=block, AHEAD=few, WINDOW=window or 0, TILE=TILE,
        PART=PART, PARTS=parts, SEVERAL=most > 1, PRECISION=dot_precision(source), STARTS_NEXT=chains, WAITS=waits,
        num_warps=4 if few else 2, num_stages=3, launch_pdl=waits,
    )  # fmt: skip
    if parts > 1:
        _join_kernel[(rows * heads,)](
            target, sums, lengths, out,
            HEADS=heads, DIM=dim, WIDTH=width, WINDOW=window or 0, TILE=TILE, PART=PART, PARTS=parts, CHAINED=chains,
            num_warps=1, launch_pdl=chains,
        )  # fmt: skip
    return out
