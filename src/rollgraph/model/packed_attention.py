"""Attention over packed sequences with a gradient.

The forward is the arithmetic of all phases: `attention_kernels.py` on CUDA, `tiled_attention.py` elsewhere. The
backward need not agree with anything but itself: it is flash attention's, fed with our result, and deterministic. Where
flash attention does not exist, the backward is that of a masked attention, which is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollgraph.model.tiled_attention import attend, visible

_FLASH_DIM = 256  # the largest head of flash attention


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
            out, normalizers = packed(q, k, v, cu_rows, tokens, cu_keys, window)
        else:
            out = _attend_packed(q, k, v, cu_rows, tokens, cu_keys, max_length, window)
            normalizers = None
        ctx.save_for_backward(q, k, v, cu_rows, tokens, cu_keys, out, normalizers)
        ctx.max_length = max_length
        ctx.window = window
        ctx.shares = tokens is not cu_rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_rows, tokens, cu_keys, out, normalizers = ctx.saved_tensors
        half = q.dtype in (torch.bfloat16, torch.float16)
        if q.is_cuda and half and q.shape[2] % 8 == 0 and q.shape[2] <= _FLASH_DIM:
            gradients = _flash_backward(
                d_out, q, k, v, cu_rows, tokens, cu_keys, out, normalizers, ctx.max_length, ctx.window, ctx.shares
            )
        else:
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


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, out: Tensor,
    normalizers: Tensor, max_length: int, window: int | None, shares: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Flash attention wants the keys of a sequence side by side, so those of a shared prompt are repeated."""
    from rollgraph.model.shared_keys_kernels import sum_over_copies

    rows = len(k)
    if shares:
        k, v = k.index_select(0, tokens), v.index_select(0, tokens)
    limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    unused = torch.empty((2,), dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    with _deterministic():
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            d_out.contiguous(), q, k, v, out, normalizers, cu_rows, cu_keys, max_length, max_length, 0.0, True, unused,
            unused, **limits,
        )  # fmt: skip
    if shares:
        d_k, d_v = sum_over_copies(d_k, d_v, tokens, cu_rows, cu_keys, rows)
    return d_q, d_k, d_v


@contextmanager
def _deterministic() -> Iterator[None]:
    """Flash attention's backward adds up in a fixed order if PyTorch is told to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it would only cost time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills
