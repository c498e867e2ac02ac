"""Causal attention in two layouts, over packed sequences and over a paged cache, with the same bits.

Training and scoring use the packed layout, prefill and decode the paged one. Both give the same bits: the result of a
query depends on its sequence alone. Tensors of static shape describe the batch, so that a graph can capture either.
`model/kernels/attention.py` has the CUDA kernels, `model/kernels/cpu_operators.py` those for a CPU. Knows nothing of
models, caches or graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollgraph.model.kernels.cpu_operators import (
    attend_packed_backward_on_cpu,
    attend_packed_on_cpu,
    attend_paged_on_cpu,
)

# -- packed sequences, with a gradient -------------------------------------------------------------
# The forward has the same arithmetic in all phases. The backward must agree only with itself. It is in
# `model/kernels/attention_backward.py` for half precision on CUDA, and in `model/kernels/cpu_operators.py` for a CPU.
# Otherwise autograd differentiates a masked attention, which is computed again.


class PackedAttention(torch.autograd.Function):
    """See `packed_attention`; `tokens` and `cu_keys` are those of `PackedKeys`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, max_length: int,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        ctx.window = window
        ctx.has_shared_prompts = tokens is not cu_rows
        if q.is_cuda:
            from rollgraph.model.kernels.attention import packed

            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            out, normalizers = packed(q, k, v, cu_rows, tokens, cu_keys, window, max_length)
        else:
            out, normalizers = attend_packed_on_cpu(
                q, k, v, cu_rows, tokens if ctx.has_shared_prompts else None, cu_keys, window
            )
        ctx.save_for_backward(q, k, v, cu_rows, tokens, cu_keys, out, normalizers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_rows, tokens, cu_keys, out, normalizers = ctx.saved_tensors
        gradients: tuple[Tensor, ...] = ()
        if not q.is_cuda:
            shared_tokens = tokens if ctx.has_shared_prompts else None
            gradients = attend_packed_backward_on_cpu(
                d_out, q, k, v, cu_rows, shared_tokens, cu_keys, out, normalizers, ctx.window
            )
        elif q.dtype in (torch.bfloat16, torch.float16):
            from rollgraph.model.kernels.attention_backward import MAX_HEAD_DIM, packed_backward

            if q.shape[2] <= MAX_HEAD_DIM:
                saved = (q, k, v, cu_rows, tokens, cu_keys, out, normalizers)
                gradients = packed_backward(d_out.contiguous(), *saved, ctx.window, ctx.has_shared_prompts)
        if not gradients:
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                recomputed = masked_attention(q, k, v, cu_rows, tokens, cu_keys, ctx.window)
                gradients = torch.autograd.grad(recomputed, (q, k, v), d_out)
        return *gradients, None, None, None, None, None


def _row_layout(cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row: its sequence, its position there, the length of the shared prompt, and the first row of that."""
    rows = torch.arange(count, device=cu_rows.device)
    sequence = torch.searchsorted(cu_rows, rows, right=True) - 1
    shared = (cu_keys.diff() - cu_rows.diff())[sequence].long()
    first = tokens[cu_keys[:-1].clamp_max(len(tokens) - 1)][sequence]
    return sequence, rows - cu_rows[sequence] + shared, shared, first


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which keys a query may attend to, by the positions of both."""
    is_causal = key <= query
    if window is None:
        return is_causal
    return is_causal & (query - key < window)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor, cu_keys: Tensor, window: int | None
) -> Tensor:
    """The same attention by a mask over all pairs of tokens."""
    sequence, position, shared, first = _row_layout(cu_rows, tokens, cu_keys, len(q))
    rows = torch.arange(len(q), device=q.device)
    mask = (sequence[:, None] == sequence) & _visible(rows[:, None], rows, window)
    prompt_position = rows - first[:, None]  # the position of a key in the prompt that the query's sequence shares
    in_prompt = (prompt_position >= 0) & (prompt_position < shared[:, None])
    mask = mask | (in_prompt & _visible(position[:, None], prompt_position, window))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


# -- both layouts ----------------------------------------------------------------------------------


class PackedKeys(NamedTuple):
    """The keys of packed sequences, some of which begin with a shared prompt.

    Sequence i attends to the keys `cu_seqlens[i]` to `cu_seqlens[i + 1]`: first those of its shared prompt, then those
    of its own tokens. The shared prompt is a sequence itself, right before the sequences that share it.
    """

    tokens: Tensor  # [keys] int64: the index of the token that each key belongs to
    cu_seqlens: Tensor  # [sequences + 1] int32; the last entry may be less than the number of keys


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    window: int | None = None,
    keys: PackedKeys | None = None,
) -> Tensor:
    """Causal attention within each of several sequences that are packed one after the other.

    q is [tokens, heads, head_dim]; k and v have kv_heads instead of heads. Sequence i is rows `cu_seqlens[i]` to
    `cu_seqlens[i + 1]`. The last entry is the number of rows (padding is a sequence, too), and entries may repeat to
    fill a fixed length. With `keys`, a sequence also attends to its shared prompt, which precedes its tokens.
    """
    tokens, cu_keys = keys if keys is not None else (cu_seqlens, cu_seqlens)
    out: Tensor = PackedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, cu_seqlens, tokens, cu_keys, max_length, window
    )
    return out


def paged_decode(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, window: int | None = None) -> Tensor:
    """Attention of one query in each row, [rows, heads, head_dim], to the row's first `lengths` keys and values.

    `pages` is [blocks, block_size, 2, kv_heads, head_dim]: keys, then values. Position p of a row is in block
    `table[row, p // block_size]`.
    """
    if q.is_cuda:
        from rollgraph.model.kernels.attention import decode

        return decode(q, pages, table, lengths, window)
    return attend_paged_on_cpu(q, pages, table, None, lengths, window)


def paged_prefill(
    q: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, window: int | None = None
) -> Tensor:
    """Causal attention of packed queries to paged keys and values, which include those of the queries' own tokens.

    Rows `cu_seqlens[i]` to `cu_seqlens[i + 1]` of q are the last positions of sequence i, which has `lengths[i]`
    positions. Rows after the last sequence are padding; their result is zero.
    """
    if q.is_cuda:
        from rollgraph.model.kernels.attention import prefill

        return prefill(q, pages, table, cu_seqlens, lengths, window)
    return attend_paged_on_cpu(q, pages, table, cu_seqlens, lengths, window)
