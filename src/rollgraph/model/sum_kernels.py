"""Triton kernels that add up rows: the gradients of biases and norms are sums over all tokens.

Many programs add up some rows each, and write what they found as a row of partial sums. A last kernel adds these up and
adds the result to the fp32 sum over microbatches. The order of every sum is fixed, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.graph.direct_sums import DirectSum, direct_sum_for
from rollgraph.model.operators import sum_operator

_BLOCK = 128  # rows that a program adds up


@triton.jit
def _sum_blocks_kernel(x, partials, rows, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of one block of rows, in some columns."""
    block = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < columns
    row = block * BLOCK + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in tl.static_range(BLOCK // ROWS):
        mask = (row < rows)[:, None] & inside[None, :]
        total += tl.load(x + row[:, None] * columns + at[None, :], mask=mask, other=0.0).to(tl.float32)
        row += ROWS
    tl.store(partials + block * columns + at, tl.sum(total, 0), mask=inside)


@triton.jit
def _add_rows_kernel(total, partials, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add all rows of partial sums to the total, in some columns."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < columns
    before = tl.load(total + at, mask=inside, other=0.0)
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        source = partials + row.to(tl.int64)[:, None] * stride + at[None, :]
        found += tl.load(source, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
    tl.store(total + at, before + tl.sum(found, 0), mask=inside)


def sum_blocks(x: Tensor) -> Tensor:
    """The sums of blocks of rows of x, [blocks, columns] in fp32."""
    x = x.contiguous()
    rows, columns = x.shape
    blocks = triton.cdiv(rows, _BLOCK)
    partials = torch.empty((blocks, columns), dtype=torch.float32, device=x.device)
    _sum_blocks_kernel[(triton.cdiv(columns, 128), blocks)](
        x, partials, rows, columns, BLOCK=_BLOCK, ROWS=32, COLUMNS=128, num_warps=4
    )
    return partials


@sum_operator
def add_rows(total: Tensor, partials: Tensor) -> None:
    """Add all rows of partial sums, which are fp32, to a contiguous total."""
    rows, columns = partials.shape
    _add_rows_kernel[(triton.cdiv(columns, 16),)](
        total, partials, rows, columns, partials.stride(0), ROWS=256, COLUMNS=16, num_warps=8
    )


def summed_gradients(weights: Sequence[Tensor], partials: Tensor) -> list[Tensor | None]:
    """The gradients of weights, the sums over the rows of `partials`, [rows, weights, columns] in fp32.

    If all can be added where gradients are summed, they are, and there are placeholders in their place.
    """
    totals: list[DirectSum] = []
    for weight in weights:
        total = direct_sum_for(weight, weight.dtype)
        if total is None:
            return list(partials.sum(0).to(weight.dtype))
        totals.append(total)
    for total, rows in zip(totals, partials.unbind(1), strict=True):
        add_rows(total.buffer(), rows)
    return [total.placeholder() for total in totals]
