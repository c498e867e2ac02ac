"""Attention over packed sequences with a gradient.

The forward is the arithmetic of all phases: `attention_kernels.py` on CUDA, `tiled_attention.py` elsewhere. The
backward need not agree with anything but itself: in half precision on CUDA it is that of
`attention_backward_kernels.py`, elsewhere that of a masked attention, which is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollgraph.model.tiled_attention import attend, visible


class PackedAttention(torch.autograd.Function):
    """See `attention.packed_attention`; `tokens` and `cu_keys` are those of `attention.Keys`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, max_length: int,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        if q.is_cuda:
            from rollgraph.model.attention_kernels import packed

            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            out, normalizers = packed(q, k, v, cu_rows, tokens, cu_keys, window, max_length)
        else:
            out = _attend_packed(q, k, v, cu_rows, tokens, cu_keys, max_length, window)
            normalizers = None
        ctx.save_for_backward(q, k, v, cu_rows, tokens, cu_keys, out, normalizers)
        ctx.window = window
        ctx.shares = tokens is not cu_rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_rows, tokens, cu_keys, out, normalizers = ctx.saved_tensors
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            from rollgraph.model.attention_backward_kernels import MOST_DIM, packed_backward

            if q.shape[2] <= MOST_DIM:
                kept = (q, k, v, cu_rows, tokens, cu_keys, out, normalizers)
                return *packed_backward(d_out.contiguous(), *kept, ctx.window, ctx.shares), None, None, None, None, None
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            again = masked_attention(q, k, v, cu_rows, tokens, cu_keys, ctx.window)
            gradients = torch.autograd.grad(again, (q, k, v), d_out)
        return *gradients, None, None, None, None, None


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, max_length: int,
    window: int | None,
) -> Tensor:  # fmt: skip
    sequence, place, shared, first = _places(cu_rows, tokens, cu_keys, len(q))
    begin = cu_rows[sequence]

    def gather(places: Tensor) -> tuple[Tensor, Tensor]:
        in_prompt = places < shared[:, None]
        rows = torch.where(in_prompt, first[:, None] + places, begin[:, None] + places - shared[:, None])
        return k[rows], v[rows]

    return attend(q, gather, place, max_length, window)


def _places(cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row: its sequence, its place there, how many tokens the sequence shares, and the first row of those."""
    rows = torch.arange(count, device=cu_rows.device)
    sequence = torch.searchsorted(cu_rows, rows, right=True) - 1
    shared = (cu_keys.diff() - cu_rows.diff())[sequence].long()
    first = tokens[cu_keys[:-1].clamp_max(len(tokens) - 1)][sequence]
    return sequence, rows - cu_rows[sequence] + shared, shared, first


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, window: int | None
) -> Tensor:
    """The same attention as one product of all tokens with all tokens, most of which a mask hides."""
    sequence, place, shared, first = _places(cu_rows, tokens, cu_keys, len(q))
    rows = torch.arange(len(q), device=q.device)
    mask = (sequence[:, None] == sequence) & visible(rows[:, None], rows, window)
    other = rows - first[:, None]  # the place of a key in the prompt that the query's sequence shares
    in_prompt = (other >= 0) & (other < shared[:, None])
    mask = mask | (in_prompt & visible(place[:, None], other, window))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
