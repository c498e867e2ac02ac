"""A Triton kernel between an extended qkv projection and attention: `head_kernels.py` after `adapter_kernels.expand`.

Its results have the bits of both, one after the other. It is for heads without norms: the order in which a norm adds up
depends on the shape of the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.adapter_kernels import load_low, load_up, low_rank_product, rank_constants, scaled_sum
from rollgraph.model.chained_launch import can_chain
from rollgraph.model.head_kernels import turn
from rollgraph.model.linear import Unexpanded

_ROWS, _COLUMNS, _WARPS = 16, 32, 2  # of a tile, which has as many columns of both halves of a head


@triton.jit
def _adapted_heads_kernel(
    product, b, scale, cos, sin, slots, q_out, k_out, v_out, tokens, stride, b_width, key_stride,
    low_q, low_k, low_v, up_q, up_k, up_v,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, WAITS: tl.constexpr, STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    """Rotate one head of a tile of tokens. Keys and values go to the slots of the tokens in the cache.

    `low` is where x A^T of a part begins in the rows, or negative without an adapter, and `up` where B does.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_token, half = token < tokens, at < DIM // 2
    inside = in_token & half
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    low = tl.where(is_query, low_q, tl.where(is_value, low_v, low_k))
    up = tl.where(is_query, up_q, tl.where(is_value, up_v - KV_HEADS * DIM, up_k) - HEADS * DIM) + head * DIM
    half_b = half & (low >= 0)
    up_first = load_up(b, b_width, up, at, half_b, 0, RANK, DEPTH)
    up_second = load_up(b, b_width, up + DIM // 2, at, half_b, 0, RANK, DEPTH)
    if WAITS:
        gdc_wait()
    if STARTS_NEXT:
        gdc_launch_dependents()
    from_row = product + token.to(tl.int64) * stride
    source = from_row + head * DIM + at
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0)
    c = tl.load(cos + token * (DIM // 2) + at, mask=inside, other=0.0)
    s = tl.load(sin + token * (DIM // 2) + at, mask=inside, other=0.0)
    slot = tl.load(slots + token, mask=in_token, other=0).to(tl.int64)
    factor = tl.load(scale)
    low_tile = load_low(from_row, in_token & (low >= 0), low, 0, RANK, DEPTH)
    if low >= 0:
        added = low_rank_product(
            low_tile, up_first, from_row, in_token, low, b, b_width, up, at, half, RANK, DEPTH, PRECISION
        )  # fmt: skip
        first = scaled_sum(first, added, factor)
        added = low_rank_product(
            low_tile, up_second, from_row, in_token, low, b, b_width, up + DIM // 2, at, half, RANK, DEPTH,
            PRECISION,
        )  # fmt: skip
        second = scaled_sum(second, added, factor)
    turned_first, turned_second = turn(first.to(tl.float32), second.to(tl.float32), c, s)
    first = tl.where(is_value, first, turned_first.to(first.dtype))
    second = tl.where(is_value, second, turned_second.to(second.dtype))
    if is_query:
        target = q_out + (token.to(tl.int64) * HEADS + head) * DIM + at
    elif is_value:
        target = v_out + slot * key_stride + (head - HEADS - KV_HEADS) * DIM + at
    else:
        target = k_out + slot * key_stride + (head - HEADS) * DIM + at
    tl.store(target, first, mask=inside)
    tl.store(target + DIM // 2, second, mask=inside)


def rotate_and_store_adapted(
    qkv: Unexpanded, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor, heads: int
) -> Tensor:
    """`head_kernels.rotate_and_store`, without norms, of an extended product."""
    product, b, adapter, chained = qkv
    _, _, _, kv_heads, dim = pages.shape
    tokens = len(product)
    starts_next = can_chain(product.device)
    waits = chained and starts_next
    q = torch.empty((tokens, heads, dim), dtype=product.dtype, device=product.device)
    values = pages.flatten()[kv_heads * dim :]
    parts = {part.columns.start: (part.low.start, part.up.start) for part in adapter.parts}
    lows, ups = zip(*(parts.get(start * dim, (-1, 0)) for start in (0, heads, heads + kv_heads)), strict=True)
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(dim // 2)))
    grid = (triton.cdiv(tokens, _ROWS), heads + 2 * kv_heads, triton.cdiv(dim // 2, columns))
    _adapted_heads_kernel[grid](
        product, b, adapter.scale, cos, sin, slots, q, pages, values, tokens, product.stride(0), b.shape[1],
        2 * kv_heads * dim, *lows, *ups,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, COLUMNS=columns, ROWS=_ROWS, num_warps=_WARPS, num_stages=1,
        WAITS=waits, STARTS_NEXT=starts_next, launch_pdl=waits, **rank_constants(product, adapter),
    )  # fmt: skip
    return q
