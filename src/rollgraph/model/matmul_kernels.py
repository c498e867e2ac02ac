"""A Triton kernel of a matrix product that adds up along K in one order, whatever the number of rows.

Libraries split K where there are few rows, which changes the order of the sum. This kernel does not: it is used where a
library's product of few rows would differ from that of many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from rollgraph.model.attention_kernels import dot_precision
from rollgraph.model.chained_launch import can_chain


class Tiling(NamedTuple):
    """How the kernel divides the work. It changes the speed, never the result. The depth is that of 2-byte numbers."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


# From few rows to many. A product of few rows has few programs, so each must have much of the weight in flight.
TILINGS = (
    Tiling(16, 16, 512, 4, 2),
    Tiling(32, 16, 512, 3, 2),
    Tiling(64, 16, 128, 6, 4),
    Tiling(64, 32, 256, 4, 4),
    Tiling(128, 128, 64, 3, 8),
)


@triton.jit
def _product_kernel(
    x, weight, bias, out, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    in_row, in_column = row < rows, column < columns
    from_x = x + row.to(tl.int64)[:, None] * x_stride + at
    from_weight = weight + column.to(tl.int64)[None, :] * depth + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        inside = at < depth - start
        left = tl.load(from_x, mask=in_row[:, None] & inside, other=0.0)
        right = tl.load(from_weight, mask=inside[:, None] & in_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        from_x += DEPTH
        from_weight += DEPTH
    if STARTS_NEXT:
        gdc_launch_dependents()
    if BIAS:
        total += tl.load(bias + column, mask=in_column, other=0.0).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * columns + column
    tl.store(target, total.to(out.dtype.element_ty), mask=in_row[:, None] & in_column)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ weight.T + bias`, for x of [rows, depth] and a weight of [columns, depth], in the given dtype."""
    rows, depth = x.shape
    columns = weight.shape[0]
    step = tiling.depth * 2 // x.element_size()
    out = torch.empty((rows, columns), dtype=dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(columns, tiling.columns), triton.cdiv(rows, tiling.rows))
    _product_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, depth, x.stride(0),
        BIAS=bias is not None, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=step, PRECISION=dot_precision(x),
        STARTS_NEXT=can_chain(x.device), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out
