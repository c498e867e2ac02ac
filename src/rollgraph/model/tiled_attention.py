"""Attention in plain PyTorch, with one arithmetic for all phases, as `attention_kernels.py` has it for a GPU.

Each query gathers the keys that it sees, tile by tile, and every tile is the same small matrix product in decode,
prefill and training. So the result of a query does not depend on what else is in its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64  # keys in one product
_NOTHING = -1e30  # the highest score where no key is visible


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which keys a query may attend to, given the places of both."""
    seen = key <= query
    if window is None:
        return seen
    return seen & (query - key < window)


def attend(
    q: Tensor, gather: Callable[[Tensor], tuple[Tensor, Tensor]], positions: Tensor, places: int, window: int | None
) -> Tensor:
    """Attention of each query, [tokens, heads, head_dim], at its position, to the places before it.

    `gather` takes places, [tokens, n], of the queries' own sequences, and gives their keys and values, each
    [tokens, n, kv_heads, head_dim]. No position is at or beyond `places`, of which there is at least one.
    """
    sums: _Sums | None = None
    for start in range(0, places, TILE):
        place = torch.arange(start, start + TILE, device=q.device)
        # A place that is not seen is replaced by the query's own, which is known to hold a number.
        keys, values = gather(torch.minimum(place, positions[:, None]))
        tile = _attend_tile(q, keys, values, visible(positions[:, None], place, window))
        sums = tile if sums is None else _join(sums, tile)
    assert sums is not None
    return (sums.mixed / sums.total).flatten(1, 2).to(q.dtype)


class _Sums(NamedTuple):
    """What is known of queries after some tiles; tensors of [tokens, kv_heads, group, ...]."""

    best: Tensor  # [..., 1]: the highest score
    total: Tensor  # [..., 1]: the sum of weights, relative to the highest score
    mixed: Tensor  # [..., head_dim]: the weighted sum of values


def _attend_tile(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> _Sums:
    """Attention to the places of one tile.

    A library would multiply in other ways if operands were not contiguous, or if there were a single product, which it
    divides among threads. So all operands are contiguous, and a single query is computed twice.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if len(q) == 1:
        twice = _attend_tile(*(torch.cat((x, x)) for x in (q, keys, values, seen)))
        return _Sums(*(x[:1] for x in twice))
    queries = q.to(wide).contiguous().unflatten(1, (keys.shape[2], -1))  # [tokens, kv_heads, group, head_dim]
    keys = keys.to(wide).permute(0, 2, 3, 1).contiguous()
    values = values.to(wide).transpose(1, 2).contiguous()
    scores = queries @ keys * q.shape[2] ** -0.5
    seen = seen[:, None, None]
    scores = torch.where(seen, scores, _NOTHING)
    best = scores.amax(-1, keepdim=True)
    weights = torch.where(seen, (scores - best).exp(), 0.0)
    return _Sums(best, weights.sum(-1, keepdim=True), weights @ values)


def _join(sums: _Sums, tile: _Sums) -> _Sums:
    best = torch.maximum(sums.best, tile.best)
    shrink = (sums.best - best).exp()
    tile_shrink = (tile.best - best).exp()
    total = sums.total * shrink + tile.total * tile_shrink
    mixed = sums.mixed * shrink + tile.mixed * tile_shrink
    return _Sums(best, total, mixed)
