"""Triton kernels of matrix products that add up along K in one order, whatever the number of rows.

Libraries split K where there are few rows, which changes the order of the sum. These kernels do not: they are used
where a library's product of few rows would differ from that of many. With few rows they are often faster, too, because
they start while the kernel before them still runs, and because the product of gate and up can end with SwiGLU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.attention_kernels import dot_precision
from rollgraph.model.chained_launch import can_chain


class Tiling(NamedTuple):
    """How a kernel divides the work. It changes the speed, never the result. The depth is that of 2-byte numbers."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


# From few rows to many. A product of few rows has few programs, so each must have much of the weight in flight.
TILINGS = (
    Tiling(16, 16, 1024, 3, 4),
    Tiling(16, 16, 512, 4, 2),
    Tiling(16, 32, 256, 4, 2),
    Tiling(64, 16, 128, 6, 4),
    Tiling(64, 32, 256, 4, 4),
    Tiling(64, 64, 64, 6, 4),
    Tiling(128, 128, 64, 3, 8),
)
GATED_TILINGS = (
    Tiling(16, 32, 256, 3, 4),
    Tiling(64, 32, 64, 4, 4),
    Tiling(64, 64, 64, 4, 4),
)
_CHAINED_ROWS = 128  # with more, the kernel before is a library's


@triton.jit
def swish_product(gate, up, kind):
    """`silu(gate) * up`, rounded to `kind` in the same places in all phases."""
    wide = gate.to(kind).to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(kind).to(tl.float32)
    return (opened * up.to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["rows"])  # one kernel for all numbers of rows takes less time to compile
def _product_kernel(
    x, weight, bias, out, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, STARTS_NEXT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A tile of x times the weight. With GATED, the weight has the columns of up below those of gate."""
    if STARTS_NEXT:
        gdc_launch_dependents()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    in_row, in_column = row < rows, column < columns
    from_x = x + row.to(tl.int64)[:, None] * x_stride + at
    from_weight = weight + column.to(tl.int64)[None, :] * depth + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if WAITS:
        gdc_wait()
    if GATED:
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        to_up = columns.to(tl.int64) * depth
        for start in range(0, depth, DEPTH):
            inside = at < depth - start
            shown = inside[:, None] & in_column[None, :]
            left = tl.load(from_x, mask=in_row[:, None] & inside, other=0.0)
            right = tl.load(from_weight, mask=shown, other=0.0)
            below = tl.load(from_weight + to_up, mask=shown, other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            up = tl.dot(left, below, up, input_precision=PRECISION)
            from_x += DEPTH
            from_weight += DEPTH
        if BIAS:
            total += tl.load(bias + column, mask=in_column, other=0.0).to(tl.float32)
            up += tl.load(bias + columns + column, mask=in_column, other=0.0).to(tl.float32)
        total = swish_product(total, up, out.dtype.element_ty)
    else:
        for start in range(0, depth, DEPTH):
            inside = at < depth - start
            left = tl.load(from_x, mask=in_row[:, None] & inside, other=0.0)
            right = tl.load(from_weight, mask=inside[:, None] & in_column[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            from_x += DEPTH
            from_weight += DEPTH
        if BIAS:
            total += tl.load(bias + column, mask=in_column, other=0.0).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * columns + column
    tl.store(target, total.to(out.dtype.element_ty), mask=in_row[:, None] & in_column)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ weight.T + bias`, for x of [rows, depth] and a weight of [columns, depth], in the given dtype."""
    return _launch(x, weight, bias, tiling, len(weight), dtype or x.dtype, gated=False)


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """SwiGLU of `x @ weight.T + bias`, [rows, columns / 2]."""
    return _launch(x, weight, bias, tiling, len(weight) // 2, x.dtype, gated=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, columns: int, dtype: torch.dtype, gated: bool
) -> Tensor:
    rows, depth = x.shape
    step = tiling.depth * 2 // x.element_size()
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    chains = can_chain(x.device)
    waits = chains and rows <= _CHAINED_ROWS
    grid = (triton.cdiv(columns, tiling.columns), triton.cdiv(rows, tiling.rows))
    _product_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, depth, x.stride(0),
        BIAS=bias is not None, GATED=gated, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=step,
        PRECISION=dot_precision(x), STARTS_NEXT=chains, WAITS=waits,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=waits,
    )  # fmt: skip
    return out
