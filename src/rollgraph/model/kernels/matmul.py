"""Triton GEMM kernels that add up along K in one order, whatever the number of rows.

With few rows, cuBLAS may split K, which changes the order of the sum. These kernels never do. They run where a cuBLAS
GEMM of few rows would differ from that of many. With few rows they are often faster, too: PDL lets them start while the
kernel before still runs, and the GEMM of gate and up can end with SwiGLU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.kernels.attention import dot_precision
from rollgraph.model.kernels.launch import supports_pdl


class Tiling(NamedTuple):
    """Tile sizes of a GEMM kernel. They change the speed, never the result. `depth` is for 2-byte numbers."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


# From few rows to many. A GEMM of few rows has few programs, so each must have many loads of the weight in flight.
TILINGS = (
    Tiling(16, 16, 1024, 3, 4),
    Tiling(16, 16, 512, 4, 2),
    Tiling(16, 32, 256, 4, 2),
    Tiling(64, 16, 128, 6, 4),
    Tiling(64, 32, 256, 4, 4),
    Tiling(64, 64, 64, 6, 4),
    Tiling(128, 128, 64, 3, 8),
)
SWIGLU_TILINGS = (
    Tiling(16, 32, 256, 3, 4),
    Tiling(64, 32, 64, 4, 4),
    Tiling(64, 64, 64, 4, 4),
)
_MAX_PDL_ROWS = 128  # with more, a cuBLAS kernel runs before, which does not trigger PDL


@triton.jit
def silu_mul(gate, up, dtype):
    """`silu(gate) * up`, rounded to `dtype` at the same points in all phases."""
    wide_gate = gate.to(dtype).to(tl.float32)
    silu = (wide_gate * tl.sigmoid(wide_gate)).to(dtype).to(tl.float32)
    return (silu * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["rows"])  # one kernel for all row counts compiles faster
def _matmul_kernel(
    x, weight, bias, out, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, SWIGLU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, TRIGGERS_PDL: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A tile of `x @ weight.T`. With SWIGLU, the weight has the rows of up below those of gate."""
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    in_row, in_column = row < rows, column < columns
    x_ptr = x + row.to(tl.int64)[:, None] * x_stride + k
    weight_ptr = weight + column.to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if WAITS:
        gdc_wait()
    if SWIGLU:
        up_acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        up_offset = columns.to(tl.int64) * depth
        for start in range(0, depth, DEPTH):
            in_k = k < depth - start
            weight_mask = in_k[:, None] & in_column[None, :]
            x_tile = tl.load(x_ptr, mask=in_row[:, None] & in_k, other=0.0)
            weight_tile = tl.load(weight_ptr, mask=weight_mask, other=0.0)
            up_tile = tl.load(weight_ptr + up_offset, mask=weight_mask, other=0.0)
            acc = tl.dot(x_tile, weight_tile, acc, input_precision=PRECISION)
            up_acc = tl.dot(x_tile, up_tile, up_acc, input_precision=PRECISION)
            x_ptr += DEPTH
            weight_ptr += DEPTH
        if BIAS:
            acc += tl.load(bias + column, mask=in_column, other=0.0).to(tl.float32)
            up_acc += tl.load(bias + columns + column, mask=in_column, other=0.0).to(tl.float32)
        acc = silu_mul(acc, up_acc, out.dtype.element_ty)
    else:
        for start in range(0, depth, DEPTH):
            in_k = k < depth - start
            x_tile = tl.load(x_ptr, mask=in_row[:, None] & in_k, other=0.0)
            weight_tile = tl.load(weight_ptr, mask=in_k[:, None] & in_column[None, :], other=0.0)
            acc = tl.dot(x_tile, weight_tile, acc, input_precision=PRECISION)
            x_ptr += DEPTH
            weight_ptr += DEPTH
        if BIAS:
            acc += tl.load(bias + column, mask=in_column, other=0.0).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * columns + column
    tl.store(target, acc.to(out.dtype.element_ty), mask=in_row[:, None] & in_column)


def fixed_order_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, dtype: torch.dtype | None = None
) -> Tensor:
    """`x @ weight.T + bias` in `dtype`, for x of [rows, depth] and a weight of [columns, depth]."""
    return _launch(x, weight, bias, tiling, len(weight), dtype or x.dtype, with_swiglu=False)


def fixed_order_matmul_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """SwiGLU of `x @ weight.T + bias`, [rows, columns / 2]."""
    return _launch(x, weight, bias, tiling, len(weight) // 2, x.dtype, with_swiglu=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, columns: int, dtype: torch.dtype, with_swiglu: bool
) -> Tensor:
    rows, depth = x.shape
    step = tiling.depth * 2 // x.element_size()
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    triggers_pdl = supports_pdl(x.device)
    waits = triggers_pdl and rows <= _MAX_PDL_ROWS
    grid = (triton.cdiv(columns, tiling.columns), triton.cdiv(rows, tiling.rows))
    _matmul_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, depth, x.stride(0),
        BIAS=bias is not None, SWIGLU=with_swiglu, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=step,
        PRECISION=dot_precision(x), TRIGGERS_PDL=triggers_pdl, WAITS=waits,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=waits,
    )  # fmt: skip
    return out
