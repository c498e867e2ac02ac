"""Causal attention in two layouts: over packed sequences, and over a paged cache.

Training and scoring use the packed layout, prefill and decode the paged one. Both give the same bits: a query's result
depends on its own sequence alone. The batch is described by tensors of static shape, so that a graph can capture
either. `attention_kernels.py` computes on CUDA, `tiled_attention.py` elsewhere. Knows nothing of models, of who owns a
cache, or of graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.model.packed_attention import PackedAttention
from rollgraph.model.tiled_attention import attend


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
    tokens, cu_keys = keys if keys is not None else (cu_seqlens, cu_seqlens)
    out: Tensor = PackedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, cu_seqlens, tokens, cu_keys, max_length, window
    )
    return out


def paged_decode(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, window: int | None = None) -> Tensor:
    """Attention of one query in each row, [rows, heads, head_dim], to the row's first `lengths` keys and values.

    `pages` is [blocks, block_size, 2, kv_heads, head_dim]: keys, then values. Place p of a row is in block
    `table[row, p // block_size]`.
    """
    if q.is_cuda:
        from rollgraph.model.decode_kernels import decode

        return decode(q, pages, table, lengths, window)
    return _attend_paged(q, pages, table, lengths - 1, window)


def paged_prefill(
    q: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, window: int | None = None
) -> Tensor:
    """Causal attention of packed queries to paged keys and values, which include those of the queries' own tokens.

    Rows `cu_seqlens[i]` to `cu_seqlens[i + 1]` of q are the last places of sequence i, which has `lengths[i]` places.
    Rows after the last sequence are padding; their result is zero.
    """
    if q.is_cuda:
        from rollgraph.model.attention_kernels import prefill

        return prefill(q, pages, table, cu_seqlens, lengths, window)
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = (torch.searchsorted(cu_seqlens, rows, right=True) - 1).clamp_max(table.shape[0] - 1)
    position = lengths[sequence] - cu_seqlens[sequence + 1] + rows
    used = rows < cu_seqlens[-1]
    out = _attend_paged(q, pages, table[sequence], torch.where(used, position, 0), window)
    return torch.where(used[:, None, None], out, 0)


def _attend_paged(q: Tensor, pages: Tensor, tables: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention of each query at its position, through its row of `tables`."""
    block = pages.shape[1]
    slots = pages.flatten(0, 1)  # [slots, 2, kv_heads, head_dim]

    def gather(places: Tensor) -> tuple[Tensor, Tensor]:
        found = slots[tables.gather(1, places // block) * block + places % block]
        return found[:, :, 0], found[:, :, 1]

    return attend(q, gather, positions.long(), tables.shape[1] * block, window)
