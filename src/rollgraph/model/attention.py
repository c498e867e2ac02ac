"""Attention over the same keys and values in two layouts: packed sequences, and a paged cache.

Packed is for training and scoring, paged for prefill and decode. What describes the batch comes as
tensors of static shape, so that a graph can hold either. On CUDA packed is PyTorch's variable-length
flash attention and paged are the kernels of `paged_kernels.py`; on a CPU both are plain PyTorch under a
mask. Knows nothing of models, caches' owners or graphs.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional


class Keys(NamedTuple):
    """The keys of packed sequences some of which begin with the tokens of another one, a shared prompt.

    Sequence i has the keys `cu_seqlens[i]` to `cu_seqlens[i + 1]`: first those of the tokens that it shares, then those
    of its own. What it shares is a whole sequence, which those that share it follow.
    """

    tokens: Tensor  # [keys] int64: the token that each key is of
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
    """Causal attention inside each of the sequences that lie one after the other.

    q is [tokens, heads, head_dim], k and v have kv_heads. Sequence i is rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`;
    the last entry is the number of rows (padding is a sequence, too), and entries may repeat to fill a fixed length.
    With `keys`, a sequence also sees the tokens it shares, which come before its own.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        cu_keys = cu_seqlens
        if keys is not None:
            from rollgraph.model.shared_keys_kernels import TakeKeys

            cu_keys = keys.cu_seqlens
            k, v = TakeKeys.apply(k, v, keys.tokens, cu_seqlens, cu_keys)
        sizes = (-1 if window is None else window - 1, 0)  # the last query of a sequence sees its last key
        lengths = (cu_seqlens, cu_keys, max_length, max_length)
        return cast(Tensor, varlen_attn(q, k, v, *lengths, window_size=sizes, **_varlen_options()))
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens, rows, right=True, out_int32=True)
    mask = (sequence[:, None] == sequence) & _visible(rows[:, None], rows, window)
    if keys is not None:
        shared = keys.cu_seqlens.diff() - cu_seqlens.diff()  # how many tokens each sequence shares
        first = keys.tokens[keys.cu_seqlens[:-1].clamp_max(len(keys.tokens) - 1)]  # and where they lie
        own = sequence.long() - 1
        place = rows - cu_seqlens[own] + shared[own]  # of a query in its sequence
        other = rows - first[own][:, None]  # of a key among those that the query's sequence shares
        mask = mask | ((other >= 0) & (other < shared[own][:, None]) & _visible(place[:, None], other, window))
    return _attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask).transpose(0, 1)


def paged_decode(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, window: int | None = None) -> Tensor:
    """Attention of one query for each row, [rows, heads, head_dim], to its first `lengths` keys and values.

    `pages` is [blocks, block_size, 2, kv_heads, head_dim], keys and then values; place p of a row lies in block
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
    """Causal attention of packed queries to paged keys and values, which contain those of the queries.

    Rows `cu_seqlens[i]` to `cu_seqlens[i + 1]` of q are the last ones of sequence i, which has `lengths[i]` places.
    Rows beyond the last sequence are padding and give zeros.
    """
    if q.is_cuda:
        from rollgraph.model.paged_kernels import prefill

        return prefill(q, pages, table, cu_seqlens, lengths, window)
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = (torch.searchsorted(cu_seqlens, rows, right=True) - 1).clamp_max(table.shape[0] - 1)
    position = lengths[sequence] - cu_seqlens[sequence + 1] + rows
    keys, values, places = _gather(pages, table, lengths)
    mask = _visible(position[:, None], places, window)  # [rows, places]
    # Every row with every sequence, of which its own is taken: no row reads what is another's.
    out = _attend(q.transpose(0, 1).expand(len(table), -1, -1, -1), keys, values, mask)[sequence, :, rows]
    return torch.where((rows < cu_seqlens[-1])[:, None, None], out, 0)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees, by their places."""
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    batched = q.dim() == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out if batched else out[0]


def _gather(pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of each row of the table, [rows, kv_heads, places, head_dim], and the places.

    Zeros beyond a row's length: a block may hold anything from its last owner, even NaN, which a mask does not stop.
    """
    places = torch.arange(table.shape[1] * pages.shape[1], device=pages.device)
    found = pages[table].flatten(1, 2)  # [rows, places, 2, kv_heads, head_dim]
    found = torch.where((places < lengths[:, None])[:, :, None, None, None], found, 0)
    return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2), places


@cache
def _varlen_options() -> dict[str, Any]:
    """Newer versions of PyTorch want to be told that key/value heads are shared; older ones find out."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
