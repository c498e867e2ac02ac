"""Triton kernels between the qkv projection and attention: split the heads, norm and rotate them, fill the cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.kernels.launch import supports_pdl
from rollgraph.model.kernels.lora import load_b, load_xa, lora_matmul, rank_constants, scaled_sum
from rollgraph.model.kernels.pointwise import sum_or_accumulate
from rollgraph.model.layers import PendingLoRA

# -- without adapters ------------------------------------------------------------------------------
# One kernel serves all phases, so queries and keys have the same bits in all of them. In decode and prefill it writes
# keys and values to the paged cache, in training and scoring to new tensors. It launches outside PyTorch's dispatcher.
# So the undo log of a capture does not see it write to the cache, and does not copy the whole cache to roll back a
# warm-up. That is safe: before the first request, the cache holds nothing that matters.

_PROGRAMS = 1056  # programs of the backward; each sums the norms' gradients over its share of the tokens


@triton.jit
def rotate_pairs(first, second, c, s):
    """Rotate pairs. The explicit `fma` says which multiplication is rounded, so the compiler has no choice."""
    return tl.fma(first, c, -(second * s)), tl.fma(second, c, first * s)


@triton.jit
def _heads_kernel(
    qkv, cos, sin, q_weight, k_weight, slots, q_out, k_out, v_out, eps, key_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HEAD_NORMS: tl.constexpr, PAGED: tl.constexpr, WAITS: tl.constexpr, TRIGGERS_PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of one token. Keys and values go to its row; with PAGED, to its slot in the cache."""
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    token, head, dim = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)[:, None], tl.arange(0, HALF)
    in_half = dim < DIM // 2
    inside = (head < HEADS + 2 * KV_HEADS) & in_half
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + dim
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    is_rotated = head < HEADS + KV_HEADS  # values are stored unchanged
    if HEAD_NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        q_first = tl.load(q_weight + dim, mask=in_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + dim, mask=in_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + DIM // 2 + dim, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + DIM // 2 + dim, mask=in_half, other=0.0).to(tl.float32)
        dtype = q_out.dtype.element_ty  # round where `layers.norm` rounds
        normed_first = (first * scale).to(dtype).to(tl.float32)
        normed_second = (second * scale).to(dtype).to(tl.float32)
        weighted_first = (normed_first * tl.where(head < HEADS, q_first, k_first)).to(dtype).to(tl.float32)
        weighted_second = (normed_second * tl.where(head < HEADS, q_second, k_second)).to(dtype).to(tl.float32)
        first = tl.where(is_rotated, weighted_first, first)
        second = tl.where(is_rotated, weighted_second, second)
    c = tl.load(cos + token * (DIM // 2) + dim, mask=in_half, other=0.0)
    s = tl.load(sin + token * (DIM // 2) + dim, mask=in_half, other=0.0)
    rotated_first, rotated_second = rotate_pairs(first, second, c, s)
    first = tl.where(is_rotated, rotated_first, first).to(q_out.dtype.element_ty)
    second = tl.where(is_rotated, rotated_second, second).to(q_out.dtype.element_ty)
    target = q_out + (token * HEADS + head) * DIM + dim
    tl.store(target, first, mask=inside & (head < HEADS))
    tl.store(target + DIM // 2, second, mask=inside & (head < HEADS))
    row = token
    if PAGED:
        row = tl.load(slots + token).to(tl.int64)
    target = k_out + row * key_stride + (head - HEADS) * DIM + dim
    tl.store(target, first, mask=inside & (head >= HEADS) & is_rotated)
    tl.store(target + DIM // 2, second, mask=inside & (head >= HEADS) & is_rotated)
    target = v_out + row * key_stride + (head - HEADS - KV_HEADS) * DIM + dim
    tl.store(target, first, mask=inside & (head >= HEADS + KV_HEADS))
    tl.store(target + DIM // 2, second, mask=inside & (head >= HEADS + KV_HEADS))


@triton.jit
def _heads_backward_kernel(
    d_q, d_k, d_v, qkv, cos, sin, q_weight, k_weight, d_qkv, d_weights, eps, tokens, tokens_per_program,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HEAD_NORMS: tl.constexpr,
):  # fmt: skip
    """The gradient of qkv for some of the tokens, and the sum over them of the gradients of the norms' weights."""
    program, head, dim = tl.program_id(0), tl.arange(0, ALL)[:, None], tl.arange(0, HALF)
    in_half = dim < DIM // 2
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    q_first = tl.zeros((HALF,), tl.float32)
    q_second = tl.zeros((HALF,), tl.float32)
    k_first = tl.zeros((HALF,), tl.float32)
    k_second = tl.zeros((HALF,), tl.float32)
    begin = program * tokens_per_program
    row = begin.to(tl.int64)
    for _ in range(begin, tl.minimum(begin + tokens_per_program, tokens)):
        d_q_ptr = d_q + (row * HEADS + head) * DIM + dim
        d_k_ptr = d_k + (row * KV_HEADS + head - HEADS) * DIM + dim
        d_v_ptr = d_v + (row * KV_HEADS + head - HEADS - KV_HEADS) * DIM + dim
        first = tl.load(d_q_ptr, mask=is_query & in_half, other=0.0).to(tl.float32)
        second = tl.load(d_q_ptr + DIM // 2, mask=is_query & in_half, other=0.0).to(tl.float32)
        first += tl.load(d_k_ptr, mask=is_key & in_half, other=0.0).to(tl.float32)
        second += tl.load(d_k_ptr + DIM // 2, mask=is_key & in_half, other=0.0).to(tl.float32)
        c = tl.load(cos + row * (DIM // 2) + dim, mask=in_half, other=0.0)
        s = tl.load(sin + row * (DIM // 2) + dim, mask=in_half, other=0.0)
        first, second = rotate_pairs(first, second, c, -s)
        head_offset = (row * (HEADS + 2 * KV_HEADS) + head) * DIM + dim
        if HEAD_NORMS:
            load_mask = (is_query | is_key) & in_half
            x_first = tl.load(qkv + head_offset, mask=load_mask, other=0.0).to(tl.float32)
            x_second = tl.load(qkv + head_offset + DIM // 2, mask=load_mask, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)) / DIM + eps)[:, None]
            x_first = x_first * scale
            x_second = x_second * scale
            q_first += tl.sum(tl.where(is_query, first * x_first, 0.0), 0)
            q_second += tl.sum(tl.where(is_query, second * x_second, 0.0), 0)
            k_first += tl.sum(tl.where(is_key, first * x_first, 0.0), 0)
            k_second += tl.sum(tl.where(is_key, second * x_second, 0.0), 0)
            w_first = tl.where(is_query, tl.load(q_weight + dim, mask=in_half, other=0.0).to(tl.float32),
                               tl.load(k_weight + dim, mask=in_half, other=0.0).to(tl.float32))  # fmt: skip
            w_second = tl.where(is_query, tl.load(q_weight + DIM // 2 + dim, mask=in_half, other=0.0).to(tl.float32),
                                tl.load(k_weight + DIM // 2 + dim, mask=in_half, other=0.0).to(tl.float32))  # fmt: skip
            first = first * w_first
            second = second * w_second
            mean = ((tl.sum(first * x_first, 1) + tl.sum(second * x_second, 1)) / DIM)[:, None]
            first = scale * (first - x_first * mean)
            second = scale * (second - x_second * mean)
        first += tl.load(d_v_ptr, mask=is_value & in_half, other=0.0).to(tl.float32)
        second += tl.load(d_v_ptr + DIM // 2, mask=is_value & in_half, other=0.0).to(tl.float32)
        inside = (head < HEADS + 2 * KV_HEADS) & in_half
        tl.store(d_qkv + head_offset, first.to(d_qkv.dtype.element_ty), mask=inside)
        tl.store(d_qkv + head_offset + DIM // 2, second.to(d_qkv.dtype.element_ty), mask=inside)
        row += 1
    if HEAD_NORMS:
        target = d_weights + program * (2 * DIM) + dim
        tl.store(target, q_first, mask=in_half)
        tl.store(target + DIM // 2, q_second, mask=in_half)
        tl.store(target + DIM, k_first, mask=in_half)
        tl.store(target + DIM + DIM // 2, k_second, mask=in_half)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    slots: Tensor,
    pages: Tensor,
    heads: int,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return the queries of `qkv`, [tokens, heads, head_dim], and write its keys and values to `slots` of the cache.

    `weights` are those of the query and key norms; None leaves the norms out. `pdl` is as for `layers.add_norm`.
    """
    _, _, _, kv_heads, dim = pages.shape
    q = torch.empty((qkv.shape[0], heads, dim), dtype=qkv.dtype, device=qkv.device)
    values = pages.flatten()[kv_heads * dim :]
    _launch(qkv, cos, sin, weights, eps, slots, q, pages, values, 2 * kv_heads * dim, heads, kv_heads, pdl)
    return q


def _launch(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float, slots: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, key_stride: int, heads: int, kv_heads: int, pdl: bool = False,
) -> None:  # fmt: skip
    q_weight, k_weight = weights or (qkv, qkv)  # a kernel needs some pointer, and does not read this one
    triggers_pdl = supports_pdl(qkv.device)
    waits = pdl and triggers_pdl
    _heads_kernel[(qkv.shape[0],)](
        qkv, cos, sin, q_weight, k_weight, qkv if slots is None else slots, q, k, v, eps, key_stride,
        HEAD_NORMS=weights is not None, PAGED=slots is not None, WAITS=waits, TRIGGERS_PDL=triggers_pdl,
        **_sizes(heads, kv_heads, q.shape[2]), num_warps=4, launch_pdl=waits,
    )  # fmt: skip


def _sizes(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "ALL": triton.next_power_of_2(heads + 2 * kv_heads),
        "DIM": dim,
        "HALF": triton.next_power_of_2(dim // 2),
    }


class SplitHeads(torch.autograd.Function):
    """Queries and keys, normed and rotated, and values of `qkv`, each [tokens, heads, head_dim]."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
        heads: int, kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        qkv = qkv.contiguous()
        tokens, width = qkv.shape
        dim = width // (heads + 2 * kv_heads)
        q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
        k = torch.empty((tokens, kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
        v = torch.empty_like(k)
        weights = None
        if q_weight is not None and k_weight is not None:
            weights = (q_weight, k_weight)
        _launch(qkv, cos, sin, weights, eps, None, q, k, v, kv_heads * dim, heads, kv_heads)
        ctx.save_for_backward(cos, sin, q_weight, k_weight, qkv if weights else None)
        ctx.weights = weights  # the parameters themselves, for their direct gradient sums
        ctx.eps = eps
        return q, k, v

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, q_weight, k_weight, qkv = ctx.saved_tensors
        has_norms = qkv is not None
        tokens, heads, dim = d_q.shape
        kv_heads = d_k.shape[1]
        tokens_per_program = triton.cdiv(tokens, _PROGRAMS)
        programs = triton.cdiv(tokens, tokens_per_program)
        d_qkv = torch.empty((tokens, (heads + 2 * kv_heads) * dim), dtype=d_q.dtype, device=d_q.device)
        d_weights = torch.empty((programs if has_norms else 1, 2, dim), dtype=torch.float32, device=d_q.device)
        unused = d_qkv  # a placeholder for arguments that the kernel does not read
        _heads_backward_kernel[(programs,)](
            d_q.contiguous(), d_k.contiguous(), d_v.contiguous(), qkv if has_norms else unused, cos, sin,
            q_weight if has_norms else unused, k_weight if has_norms else unused, d_qkv, d_weights, ctx.eps, tokens,
            tokens_per_program, HEAD_NORMS=has_norms, **_sizes(heads, kv_heads, dim), num_warps=4,
        )  # fmt: skip
        if not has_norms or not ctx.needs_input_grad[3]:
            return d_qkv, None, None, None, None, None, None, None
        d_q_weight, d_k_weight = sum_or_accumulate(ctx.weights, d_weights)
        return d_qkv, None, None, d_q_weight, d_k_weight, None, None, None


# -- with adapters ---------------------------------------------------------------------------------
# This kernel adds the LoRA as well. Its results have the bits of `fused_add_lora` followed by `rotate_and_store`. It is
# for heads without norms, because the summation order of a norm depends on the shape of the tile.

_ROWS, _COLUMNS, _WARPS = 16, 32, 2  # of a tile, which has this many columns of each half of a head


@triton.jit
def _adapted_heads_kernel(
    base_and_xa, b, scale, cos, sin, slots, q_out, k_out, v_out, tokens, stride, b_width, key_stride,
    xa_column_q, xa_column_k, xa_column_v, b_column_q, b_column_k, b_column_v,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, WAITS: tl.constexpr, TRIGGERS_PDL: tl.constexpr,
):  # fmt: skip
    """Rotate one head of a tile of tokens. Keys and values go to the slots of the tokens in the cache.

    `xa_column` is the first column of a projection's x A^T, negative if it has no adapter; `b_column` that of its B.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_token, in_half = token < tokens, dim < DIM // 2
    inside = in_token & in_half
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    xa_column = tl.where(is_query, xa_column_q, tl.where(is_value, xa_column_v, xa_column_k))
    b_column = tl.where(
        is_query, b_column_q, tl.where(is_value, b_column_v - KV_HEADS * DIM, b_column_k) - HEADS * DIM
    ) + head * DIM  # fmt: skip
    b_mask = in_half & (xa_column >= 0)
    b_first = load_b(b, b_width, b_column, dim, b_mask, 0, RANK, DEPTH)
    b_second = load_b(b, b_width, b_column + DIM // 2, dim, b_mask, 0, RANK, DEPTH)
    if WAITS:
        gdc_wait()
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    row_ptr = base_and_xa + token.to(tl.int64) * stride
    source = row_ptr + head * DIM + dim
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0)
    c = tl.load(cos + token * (DIM // 2) + dim, mask=inside, other=0.0)
    s = tl.load(sin + token * (DIM // 2) + dim, mask=inside, other=0.0)
    slot = tl.load(slots + token, mask=in_token, other=0).to(tl.int64)
    factor = tl.load(scale)
    xa_tile = load_xa(row_ptr, in_token & (xa_column >= 0), xa_column, 0, RANK, DEPTH)
    if xa_column >= 0:
        delta = lora_matmul(
            xa_tile, b_first, row_ptr, in_token, xa_column, b, b_width, b_column, dim, in_half, RANK, DEPTH, PRECISION
        )  # fmt: skip
        first = scaled_sum(first, delta, factor)
        delta = lora_matmul(
            xa_tile, b_second, row_ptr, in_token, xa_column, b, b_width, b_column + DIM // 2, dim, in_half,
            RANK, DEPTH, PRECISION,
        )  # fmt: skip
        second = scaled_sum(second, delta, factor)
    rotated_first, rotated_second = rotate_pairs(first.to(tl.float32), second.to(tl.float32), c, s)
    first = tl.where(is_value, first, rotated_first.to(first.dtype))
    second = tl.where(is_value, second, rotated_second.to(second.dtype))
    if is_query:
        target = q_out + (token.to(tl.int64) * HEADS + head) * DIM + dim
    elif is_value:
        target = v_out + slot * key_stride + (head - HEADS - KV_HEADS) * DIM + dim
    else:
        target = k_out + slot * key_stride + (head - HEADS) * DIM + dim
    tl.store(target, first, mask=inside)
    tl.store(target + DIM // 2, second, mask=inside)


def rotate_and_store_adapted(
    qkv: PendingLoRA, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor, heads: int
) -> Tensor:
    """`rotate_and_store` of a `PendingLoRA`, without norms."""
    base_and_xa, b, adapter, pdl = qkv
    _, _, _, kv_heads, dim = pages.shape
    tokens = len(base_and_xa)
    triggers_pdl = supports_pdl(base_and_xa.device)
    waits = pdl and triggers_pdl
    q = torch.empty((tokens, heads, dim), dtype=base_and_xa.dtype, device=base_and_xa.device)
    values = pages.flatten()[kv_heads * dim :]
    columns_of = {
        projection.columns.start: (projection.xa_columns.start, projection.b_columns.start)
        for projection in adapter.projections
    }
    xa_columns, b_columns = zip(
        *(columns_of.get(start * dim, (-1, 0)) for start in (0, heads, heads + kv_heads)), strict=True
    )
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(dim // 2)))
    grid = (triton.cdiv(tokens, _ROWS), heads + 2 * kv_heads, triton.cdiv(dim // 2, columns))
    _adapted_heads_kernel[grid](
        base_and_xa, b, adapter.scale, cos, sin, slots, q, pages, values, tokens, base_and_xa.stride(0), b.shape[1],
        2 * kv_heads * dim, *xa_columns, *b_columns,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, COLUMNS=columns, ROWS=_ROWS, num_warps=_WARPS, num_stages=1,
        WAITS=waits, TRIGGERS_PDL=triggers_pdl, launch_pdl=waits, **rank_constants(base_and_xa, adapter),
    )  # fmt: skip
    return q
