"""Triton kernels between the qkv projection and attention: norm the heads (Qwen3 does), rotate them, divide them up.

One kernel serves all phases, so that queries and keys have the same bits in all of them. In decode and prefill it
writes keys and values to the paged cache, in training and scoring to tensors of their own. It launches outside of
PyTorch's dispatcher: the undo log of a capture does not see it write to the cache, and does not copy the whole cache in
order to roll back a warm-up. It does not need to: before the first request, the cache holds nothing that matters.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.chained_launch import can_chain
from rollgraph.model.sum_kernels import summed_gradients

_PROGRAMS = 1056  # programs of the backward; each adds up the gradients of the norms over its share of the tokens


@triton.jit
def turn(first, second, c, s):
    """Rotate pairs. Which product is rounded is written down, so that the compiler has no choice."""
    return tl.fma(first, c, -(second * s)), tl.fma(second, c, first * s)


@triton.jit
def _heads_kernel(
    qkv, cos, sin, q_weight, k_weight, slots, q_out, k_out, v_out, eps, key_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr, PAGED: tl.constexpr, WAITS: tl.constexpr, STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of one token. Keys and values go to its row; with PAGED, to its slot in the cache."""
    if STARTS_NEXT:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
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
        kind = q_out.dtype.element_ty  # rounded as the model's own norms are
        unit_first = (first * scale).to(kind).to(tl.float32)
        unit_second = (second * scale).to(kind).to(tl.float32)
        normed_first = (unit_first * tl.where(head < HEADS, q_first, k_first)).to(kind).to(tl.float32)
        normed_second = (unit_second * tl.where(head < HEADS, q_second, k_second)).to(kind).to(tl.float32)
        first = tl.where(turned, normed_first, first)
        second = tl.where(turned, normed_second, second)
    c = tl.load(cos + token * (DIM // 2) + at, mask=half, other=0.0)
    s = tl.load(sin + token * (DIM // 2) + at, mask=half, other=0.0)
    turned_first, turned_second = turn(first, second, c, s)
    first = tl.where(turned, turned_first, first).to(q_out.dtype.element_ty)
    second = tl.where(turned, turned_second, second).to(q_out.dtype.element_ty)
    target = q_out + (token * HEADS + head) * DIM + at
    tl.store(target, first, mask=inside & (head < HEADS))
    tl.store(target + DIM // 2, second, mask=inside & (head < HEADS))
    row = token
    if PAGED:
        row = tl.load(slots + token).to(tl.int64)
    target = k_out + row * key_stride + (head - HEADS) * DIM + at
    tl.store(target, first, mask=inside & (head >= HEADS) & turned)
    tl.store(target + DIM // 2, second, mask=inside & (head >= HEADS) & turned)
    target = v_out + row * key_stride + (head - HEADS - KV_HEADS) * DIM + at
    tl.store(target, first, mask=inside & (head >= HEADS + KV_HEADS))
    tl.store(target + DIM // 2, second, mask=inside & (head >= HEADS + KV_HEADS))


@triton.jit
def _heads_backward_kernel(
    d_q, d_k, d_v, qkv, cos, sin, q_weight, k_weight, d_qkv, d_weights, eps, tokens, share,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """The gradient of qkv for a share of the tokens, and the sum over them of the gradients of the norms' weights."""
    program, head, at = tl.program_id(0), tl.arange(0, ALL)[:, None], tl.arange(0, HALF)
    half = at < DIM // 2
    query, key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    q_first = tl.zeros((HALF,), tl.float32)
    q_second = tl.zeros((HALF,), tl.float32)
    k_first = tl.zeros((HALF,), tl.float32)
    k_second = tl.zeros((HALF,), tl.float32)
    begin = program * share
    row = begin.to(tl.int64)
    for _ in range(begin, tl.minimum(begin + share, tokens)):
        from_q = d_q + (row * HEADS + head) * DIM + at
        from_k = d_k + (row * KV_HEADS + head - HEADS) * DIM + at
        from_v = d_v + (row * KV_HEADS + head - HEADS - KV_HEADS) * DIM + at
        first = tl.load(from_q, mask=query & half, other=0.0).to(tl.float32)
        second = tl.load(from_q + DIM // 2, mask=query & half, other=0.0).to(tl.float32)
        first += tl.load(from_k, mask=key & half, other=0.0).to(tl.float32)
        second += tl.load(from_k + DIM // 2, mask=key & half, other=0.0).to(tl.float32)
        c = tl.load(cos + row * (DIM // 2) + at, mask=half, other=0.0)
        s = tl.load(sin + row * (DIM // 2) + at, mask=half, other=0.0)
        first, second = turn(first, second, c, -s)
        here = (row * (HEADS + 2 * KV_HEADS) + head) * DIM + at
        if NORMED:
            shown = (query | key) & half
            x_first = tl.load(qkv + here, mask=shown, other=0.0).to(tl.float32)
            x_second = tl.load(qkv + here + DIM // 2, mask=shown, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)) / DIM + eps)[:, None]
            x_first = x_first * scale
            x_second = x_second * scale
            q_first += tl.sum(tl.where(query, first * x_first, 0.0), 0)
            q_second += tl.sum(tl.where(query, second * x_second, 0.0), 0)
            k_first += tl.sum(tl.where(key, first * x_first, 0.0), 0)
            k_second += tl.sum(tl.where(key, second * x_second, 0.0), 0)
            w_first = tl.where(query, tl.load(q_weight + at, mask=half, other=0.0).to(tl.float32),
                               tl.load(k_weight + at, mask=half, other=0.0).to(tl.float32))  # fmt: skip
            w_second = tl.where(query, tl.load(q_weight + DIM // 2 + at, mask=half, other=0.0).to(tl.float32),
                                tl.load(k_weight + DIM // 2 + at, mask=half, other=0.0).to(tl.float32))  # fmt: skip
            first = first * w_first
            second = second * w_second
            mean = ((tl.sum(first * x_first, 1) + tl.sum(second * x_second, 1)) / DIM)[:, None]
            first = scale * (first - x_first * mean)
            second = scale * (second - x_second * mean)
        first += tl.load(from_v, mask=value & half, other=0.0).to(tl.float32)
        second += tl.load(from_v + DIM // 2, mask=value & half, other=0.0).to(tl.float32)
        inside = (head < HEADS + 2 * KV_HEADS) & half
        tl.store(d_qkv + here, first.to(d_qkv.dtype.element_ty), mask=inside)
        tl.store(d_qkv + here + DIM // 2, second.to(d_qkv.dtype.element_ty), mask=inside)
        row += 1
    if NORMED:
        target = d_weights + program * (2 * DIM) + at
        tl.store(target, q_first, mask=half)
        tl.store(target + DIM // 2, q_second, mask=half)
        tl.store(target + DIM, k_first, mask=half)
        tl.store(target + DIM + DIM // 2, k_second, mask=half)


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
    chained: bool = False,
) -> Tensor:
    """The queries, [tokens, heads, head_dim], of the projection `qkv`. Its keys and values go to `slots` of the cache.

    `weights` are those of the query and key norms; None leaves the norms out. `chained` is as for `pointwise.add_norm`.
    """
    _, _, _, kv_heads, dim = pages.shape
    q = torch.empty((qkv.shape[0], heads, dim), dtype=qkv.dtype, device=qkv.device)
    values = pages.flatten()[kv_heads * dim :]
    _launch(qkv, cos, sin, weights, eps, slots, q, pages, values, 2 * kv_heads * dim, heads, kv_heads, chained)
    return q


def _launch(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float, slots: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, key_stride: int, heads: int, kv_heads: int, chained: bool = False,
) -> None:  # fmt: skip
    q_weight, k_weight = weights or (qkv, qkv)
    chains = can_chain(qkv.device)
    waits = chained and chains
    _heads_kernel[(qkv.shape[0],)](
        qkv, cos, sin, q_weight, k_weight, qkv if slots is None else slots, q, k, v, eps, key_stride,
        NORMED=weights is not None, PAGED=slots is not None, WAITS=waits, STARTS_NEXT=chains,
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
    """Queries and keys, normed and rotated, and values, each [tokens, heads, head_dim], of the projection `qkv`."""

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
        ctx.weights = weights  # the parameters themselves, which know where their gradients are added up
        ctx.eps = eps
        return q, k, v

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, q_weight, k_weight, qkv = ctx.saved_tensors
        normed = qkv is not None
        tokens, heads, dim = d_q.shape
        kv_heads = d_k.shape[1]
        share = triton.cdiv(tokens, _PROGRAMS)
        programs = triton.cdiv(tokens, share)
        d_qkv = torch.empty((tokens, (heads + 2 * kv_heads) * dim), dtype=d_q.dtype, device=d_q.device)
        d_weights = torch.empty((programs if normed else 1, 2, dim), dtype=torch.float32, device=d_q.device)
        absent = d_qkv  # stands in for what the kernel does not read
        _heads_backward_kernel[(programs,)](
            d_q.contiguous(), d_k.contiguous(), d_v.contiguous(), qkv if normed else absent, cos, sin,
            q_weight if normed else absent, k_weight if normed else absent, d_qkv, d_weights, ctx.eps, tokens, share,
            NORMED=normed, **_sizes(heads, kv_heads, dim), num_warps=4,
        )  # fmt: skip
        if not normed or not ctx.needs_input_grad[3]:
            return d_qkv, None, None, None, None, None, None, None
        d_q_weight, d_k_weight = summed_gradients(ctx.weights, d_weights)
        return d_qkv, None, None, d_q_weight, d_k_weight, None, None, None
