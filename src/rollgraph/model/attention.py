"""Causal attention in two layouts: over packed sequences, and over a paged cache.

Training and scoring use the packed layout, prefill and decode the paged one. The batch is described by tensors of
static shape, so that a graph can capture either. On CUDA, packed attention is PyTorch's variable-length flash attention
and paged attention are the kernels of `paged_kernels.py`. On a CPU, both are plain PyTorch with a mask. Knows nothing
of models, of who owns a cache, or of graphs.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional


class Keys(NamedTuple):
    """The keys of packed sequences, some of which begin with a shared prompt.

    Sequence i attends to the keys `cu_seqlens[i]` to `cu_seqlens[i + 1]`: first those of the prompt that it shares,
    then those of its own tokens. The shared prompt is a sequence itself, right before the sequences that share it.
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
    keys: Keys | None = None,
) -> Tensor:
    """Causal attention within each of several sequences that are packed one after the other.

    q is [tokens, heads, head_dim]; k and v have kv_heads instead of heads. Sequence i is rows `cu_seqlens[i]` to
    `cu_seqlens[i + 1]`. The last entry is the number of rows (padding is a sequence, too), and entries may repeat to
    fill a fixed length. With `keys`, a sequence also attends to the prompt that it shares, which precedes its tokens.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        cu_keys = cu_seqlens
        if keys is not None:
            from rollgraph.model.shared_keys_kernels import TakeKeys

            cu_keys = keys.cu_seqlens
            k, v = TakeKeys.apply(k, v, keys.tokens, cu_seqlens, cu_keys)  # type: ignore[no-untyped-call]
        # How far to the left and to the right a query sees; the last query of a sequence is aligned with its last key.
        sizes = (-1 if window is None else window - 1, 0)
        lengths = (cu_seqlens, cu_keys, max_length, max_length)
        return cast(Tensor, varlen_attn(q, k, v, *lengths, window_size=sizes, **_varlen_options()))
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens, rows, right=True, out_int32=True)
    mask = (sequence[:, None] == sequence) & _visible(rows[:, None], rows, window)
    if keys is not None:
        shared = keys.cu_seqlens.diff() - cu_seqlens.diff()  # how many tokens each sequence shares
        first = keys.tokens[keys.cu_seqlens[:-1].clamp_max(len(keys.tokens) - 1)]  # the row of the first of them
        own = sequence.long() - 1
        place = rows - cu_seqlens[own] + shared[own]  # the place of a query in its sequence
        other = rows - first[own][:, None]  # the place of a key in the prompt that the query's sequence shares
        mask = mask | ((other >= 0) & (other < shared[own][:, None]) & _visible(place[:, None], other, window))
    return _attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask).transpose(0, 1)


def paged_decode(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, window: int | None = None) -> Tensor:
    """Attention of one query in each row, [rows, heads, head_dim], to the row's first `lengths` keys and values.

    `pages` is [blocks, block_size, 2, kv_heads, head_dim]: keys, then values. Place p of a row is in block
    `table[row, p // block_size]`.
    """
    if q.is_cuda:
        from rollgraph.model.paged_kernels import decode

        return decode(q, pages, table, lengths, window)
    keys, values, places = _gather(pages, table, lengths)
    mask = _visible(lengths[:, None] - 1, places, window)
    return _attend(q[:, :, None], keys, values, mask[:, None, None])[:, :, 0]


def paged_prefill(
    q: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, window: int | None = None
) -> Tensor:
    """Causal attention of packed queries to paged keys and values, which include those of the queries' own tokens.

    Rows `cu_seqlens[i]` to `cu_seqlens[i + 1]` of q are the last places of sequence i, which has `lengths[i]` places.
    Rows after the last sequence are padding; their result is zero.
    """
    if q.is_cuda:
        from rollgraph.model.paged_kernels import prefill

        return prefill(q, pages, table, cu_seqlens, lengths, window)
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = (torch.searchsorted(cu_seqlens, rows, right=True) - 1).clamp_max(table.shape[0] - 1)
    position = lengths[sequence] - cu_seqlens[sequence + 1] + rows
    keys, values, places = _gather(pages, table, lengths)
    mask = _visible(position[:, None], places, window)  # [rows, places]
    # Compute every row against every sequence, and take its own.
    out = _attend(q.transpose(0, 1).expand(len(table), -1, -1, -1), keys, values, mask)[sequence, :, rows]
    return torch.where((rows < cu_seqlens[-1])[:, None, None], out, 0)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which keys a query may attend to, given the places of both."""
    visible = key <= query
    if window is None:
        return visible
    return visible & (query - key < window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention; q, k and v are [heads, places, head_dim], with or without a batch dimension before."""
    if q.dim() == 4:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
    return out[0]


def _gather(pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of each row of the table, [rows, kv_heads, places, head_dim], and the places.

    They are zero beyond a row's length. A block may still hold anything of its last owner, even NaN, and a mask does
    not keep a NaN out of the result.
    """
    places = torch.arange(table.shape[1] * pages.shape[1], device=pages.device)
    found = pages[table].flatten(1, 2)  # [rows, places, 2, kv_heads, head_dim]
    found = torch.where((places < lengths[:, None])[:, :, None, None, None], found, 0)
    return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2), places


@cache
def _varlen_options() -> dict[str, Any]:
    """Newer versions of PyTorch must be told that heads share key/value heads; older ones have no such option."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return {"enable_gqa": True}
    return {}
