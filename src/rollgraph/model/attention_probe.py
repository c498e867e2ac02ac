"""Finds out whether attention of a decode step gives the bits of attention over packed sequences, on this machine.

On CUDA both are our kernels. On a CPU they are small products of a library, which is not bound to compute them in the
same way in batches of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from rollgraph.model.attention import packed_attention, paged_decode
from rollgraph.model.decoder import Decoder
from rollgraph.model.kernel_compilation import compiling_together

_PLACES = 150  # more than two tiles
_BLOCK = 16
_MOST_ROWS = 32  # beyond that, a batch is like one of packed tokens


def attention_agrees(model: Decoder, row_counts: Sequence[int]) -> bool:
    """Compare both for random numbers, with every window of the model and these numbers of decode rows."""
    a = model.architecture
    weight = model.embed.weight
    rows = tuple(sorted({min(count, _MOST_ROWS) for count in row_counts}))
    windows = {a.window(layer) for layer in range(a.layers)}
    heads = (a.heads, a.kv_heads, a.head_dim)
    threads = torch.get_num_threads()  # a library may divide its work by them
    return all(_agrees(*heads, window, weight.dtype, weight.device, rows, threads) for window in windows)


@cache
@torch.no_grad()
def _agrees(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device,
    row_counts: tuple[int, ...], threads: int,
) -> bool:  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn((_PLACES, count, head_dim), device=device, generator=generator).to(dtype)

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    bounds = torch.tensor([0, _PLACES], dtype=torch.int32, device=device)
    pages, table = _paged(k, v)

    def compare() -> bool:
        expected = packed_attention(q, k, v, bounds, _PLACES, window)
        agree = True
        for rows in row_counts:
            places = torch.arange(_PLACES - rows, _PLACES, device=device)
            lengths = (places + 1).int()
            found = paged_decode(q[places], pages, table.expand(rows, -1).contiguous(), lengths, window)
            agree &= torch.equal(found, expected[places])
        return agree

    if device.type == "cuda":
        with compiling_together():
            compare()
    return compare()


def _paged(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values in pages, and the table of the one sequence that has them."""
    blocks = -(-len(k) // _BLOCK)
    pages = torch.zeros((blocks, _BLOCK, 2, *k.shape[1:]), dtype=k.dtype, device=k.device)
    slots = pages.flatten(0, 1)
    slots[: len(k), 0] = k
    slots[: len(v), 1] = v
    table = torch.arange(blocks, dtype=torch.int32, device=k.device)[None]
    return pages, table
