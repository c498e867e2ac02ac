"""Triton kernels of the LoRA up-projection: base + scale (x A^T) B^T. The base and x A^T are columns of one matrix.

One kernel does just that, and one fuses it with SwiGLU, whose input is the widest. Each result is one chain of matrix
instructions along the rank, in the same order in every tile. So its bits do not depend on the number of rows.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.kernels.attention import dot_precision
from rollgraph.model.kernels.launch import supports_pdl
from rollgraph.model.kernels.matmul import silu_mul
from rollgraph.model.lora_layer import LinearAdapter, lora_backward

# Rows, columns and warps of a tile. Narrow tiles make more programs, which helps if there are few rows.
_TILE = (32, 32, 1)
_SWIGLU_TILE, _SWIGLU_TILE_FEW_ROWS = (32, 64, 4), (64, 32, 4)
_FEW_ROWS = 128
_MAX_DEPTH = 64  # along the rank, of one `tl.dot`
_MAX_PROJECTIONS = 3


@triton.jit
def load_xa(row_ptr, in_row, xa_column, start, RANK: tl.constexpr, DEPTH: tl.constexpr):
    """A step along the rank of x A^T, which begins at column `xa_column`."""
    k = start + tl.arange(0, DEPTH)[None, :]
    return tl.load(row_ptr + xa_column + k, mask=in_row & (k < RANK), other=0.0)


@triton.jit
def load_b(b, b_width, b_column, column, in_column, start, RANK: tl.constexpr, DEPTH: tl.constexpr):
    """A step along the rank of B, from its column `b_column`."""
    k = start + tl.arange(0, DEPTH)[:, None]
    return tl.load(b + k * b_width + b_column + column, mask=(k < RANK) & in_column, other=0.0)


@triton.jit
def lora_matmul(
    xa_tile, b_tile, row_ptr, in_row, xa_column, b, b_width, b_column, column, in_column,
    RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(x A^T) B^T of a tile. The caller has loaded the first step along the rank, to overlap it with other loads."""
    total = tl.dot(xa_tile, b_tile, input_precision=PRECISION)
    for start in range(DEPTH, RANK, DEPTH):
        xa_tile = load_xa(row_ptr, in_row, xa_column, start, RANK, DEPTH)
        b_tile = load_b(b, b_width, b_column, column, in_column, start, RANK, DEPTH)
        total = tl.dot(xa_tile, b_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def scaled_sum(base, delta, factor):
    """Base + factor * delta, rounded once; the base itself if the factor is 0."""
    return tl.where(factor != 0, tl.fma(delta, factor, base.to(tl.float32)).to(base.dtype), base)


@triton.jit(do_not_specialize=["rows"])
def _add_lora_kernel(
    base_and_xa, b, scale, out, rows, outputs, stride, b_width,
    begin_0, end_0, b_column_0, begin_1, end_1, b_column_1, begin_2, end_2, b_column_2,
    ALL_ADAPTED: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WAITS: tl.constexpr, TRIGGERS_PDL: tl.constexpr,
):  # fmt: skip
    """Add the LoRA to a tile of the base: some rows, and some columns of one projection.

    The i-th projection with an adapter has the columns begin_i to end_i of the base, and those from b_column_i on of B.
    ALL_ADAPTED: every projection has an adapter, so B has the columns of the base.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    in_1 = (first >= begin_1) & (first < end_1)
    in_2 = (first >= begin_2) & (first < end_2)
    xa_column = outputs + tl.where(in_1, RANK, tl.where(in_2, 2 * RANK, 0))
    b_column = first
    has_lora = True
    if not ALL_ADAPTED:
        has_lora = (first >= begin_0) & (first < end_0) | in_1 | in_2
        b_column = first + tl.where(
            in_1, b_column_1 - begin_1, tl.where(in_2, b_column_2 - begin_2, b_column_0 - begin_0)
        )
    row_ptr = base_and_xa + row.to(tl.int64) * stride
    in_row, in_column = row < rows, column < outputs - first
    # B does not depend on the kernel before, so its first tile is loaded before the wait.
    b_tile = load_b(b, b_width, b_column, column, in_column & has_lora, 0, RANK, DEPTH)
    if WAITS:
        gdc_wait()
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    base = tl.load(row_ptr + first + column, mask=in_row & in_column, other=0.0)
    value = base
    if has_lora:
        factor = tl.load(scale)
        xa_tile = load_xa(row_ptr, in_row, xa_column, 0, RANK, DEPTH)
        delta = lora_matmul(
            xa_tile, b_tile, row_ptr, in_row, xa_column, b, b_width, b_column, column, in_column, RANK, DEPTH, PRECISION
        )  # fmt: skip
        value = scaled_sum(base, delta, factor)
    tl.store(out + row.to(tl.int64) * outputs + first + column, value, mask=in_row & in_column)


def fused_add_lora(base_and_xa: Tensor, b: Tensor, adapter: LinearAdapter, pdl: bool = False) -> Tensor:
    """Base + scale (x A^T) B^T, [rows, outputs]. See `PendingLoRA`."""
    rows = len(base_and_xa)
    triggers_pdl = supports_pdl(base_and_xa.device)
    waits = pdl and triggers_pdl
    out = base_and_xa.new_empty(rows, adapter.outputs)
    bounds = []
    for index in range(_MAX_PROJECTIONS):
        begin = end = b_column = 0
        if index < len(adapter.projections):
            projection = adapter.projections[index]
            begin, end, b_column = projection.columns.start, projection.columns.stop, projection.b_columns.start
        bounds += [begin, end, b_column]
    tile_rows, tile_columns, warps = _TILE
    columns = gcd(tile_columns, *(bound for bound in bounds if bound < adapter.outputs))
    grid = (triton.cdiv(adapter.outputs, columns), triton.cdiv(rows, tile_rows))
    _add_lora_kernel[grid](
        base_and_xa, b, adapter.scale, out, rows, adapter.outputs, base_and_xa.stride(0), b.shape[1], *bounds,
        ALL_ADAPTED=b.shape[1] == adapter.outputs, ROWS=tile_rows, COLUMNS=columns, num_warps=warps, num_stages=1,
        WAITS=waits, TRIGGERS_PDL=triggers_pdl, launch_pdl=waits, **rank_constants(base_and_xa, adapter),
    )  # fmt: skip
    return out


def rank_constants(base_and_xa: Tensor, adapter: LinearAdapter) -> dict[str, Any]:
    """The constants of a kernel that multiplies along the rank."""
    depth = max(16, min(_MAX_DEPTH, triton.next_power_of_2(adapter.rank)))
    return {"RANK": adapter.rank, "DEPTH": depth, "PRECISION": dot_precision(base_and_xa)}


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


@triton.jit
def _gate_and_up(
    base_and_xa, b, scale, row, column, rows, width, stride, b_width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    WAITS: tl.constexpr, TRIGGERS_PDL: tl.constexpr,
):  # fmt: skip
    """A tile of gate and of up, in fp32. GATE and UP say which of them have an adapter; gate's comes first."""
    in_row, in_column = row < rows, column < width
    row_ptr = base_and_xa + row.to(tl.int64) * stride
    gate_xa_column = 2 * width
    up_xa_column = gate_xa_column + GATE * RANK
    up_b_column = GATE * width
    if GATE:
        gate_b = load_b(b, b_width, 0, column, in_column, 0, RANK, DEPTH)
    if UP:
        up_b = load_b(b, b_width, up_b_column, column, in_column, 0, RANK, DEPTH)
    if WAITS:
        gdc_wait()
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    if GATE:
        gate_xa = load_xa(row_ptr, in_row, gate_xa_column, 0, RANK, DEPTH)
    if UP:
        up_xa = load_xa(row_ptr, in_row, up_xa_column, 0, RANK, DEPTH)
    gate_base = tl.load(row_ptr + column, mask=in_row & in_column, other=0.0)
    up_base = tl.load(row_ptr + width + column, mask=in_row & in_column, other=0.0)
    factor = tl.load(scale)
    gate_delta = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_delta = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATE:
        gate_delta = lora_matmul(
            gate_xa, gate_b, row_ptr, in_row, gate_xa_column, b, b_width, 0, column, in_column, RANK, DEPTH, PRECISION
        )  # fmt: skip
    if UP:
        up_delta = lora_matmul(
            up_xa, up_b, row_ptr, in_row, up_xa_column, b, b_width, up_b_column, column, in_column, RANK, DEPTH,
            PRECISION,
        )  # fmt: skip
    return scaled_sum(gate_base, gate_delta, factor).to(tl.float32), scaled_sum(up_base, up_delta, factor).to(
        tl.float32
    )


@triton.jit
def _swiglu_kernel(
    base_and_xa, b, scale, out, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, WAITS: tl.constexpr,
    TRIGGERS_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate, up = _gate_and_up(
        base_and_xa, b, scale, row, column, rows, width, stride, b_width, ROWS, COLUMNS, GATE, UP, RANK, DEPTH,
        PRECISION, WAITS, TRIGGERS_PDL,
    )  # fmt: skip
    inside = (row < rows) & (column < width)
    activated = silu_mul(gate, up, out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * width + column, activated, mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    d_out, base_and_xa, b, scale, d_base_and_xa, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of gate and of up, given that of silu(gate) * up. Computes gate and up again."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate, up = _gate_and_up(
        base_and_xa, b, scale, row, column, rows, width, stride, b_width, ROWS, COLUMNS, GATE, UP, RANK, DEPTH,
        PRECISION, False, False,
    )  # fmt: skip
    inside = (row < rows) & (column < width)
    gradient = tl.load(d_out + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = gradient * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = gradient * gate * sigmoid
    target = d_base_and_xa + row.to(tl.int64) * stride + column
    tl.store(target, d_gate.to(d_base_and_xa.dtype.element_ty), mask=inside)
    tl.store(target + width, d_up.to(d_base_and_xa.dtype.element_ty), mask=inside)


class AdaptedSwiGLU(torch.autograd.Function):
    """SwiGLU of a `PendingLoRA` of gate and up, which adds the LoRA as well."""

    @staticmethod
    def forward(
        ctx: Any, base_and_xa: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter, padded: int, pdl: bool
    ) -> Tensor:
        triggers_pdl = supports_pdl(base_and_xa.device)
        waits = pdl and triggers_pdl
        rows, width = len(base_and_xa), adapter.outputs // 2
        out = base_and_xa.new_empty(padded, width)
        grid, constants = _tiles(base_and_xa, adapter)
        _swiglu_kernel[grid](
            base_and_xa, b, scale, out, rows, width, base_and_xa.stride(0), b.shape[1],
            WAITS=waits, TRIGGERS_PDL=triggers_pdl, launch_pdl=waits, **constants,
        )  # fmt: skip
        ctx.save_for_backward(base_and_xa, b, scale)
        ctx.adapter = adapter
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        base_and_xa, b, scale = ctx.saved_tensors
        adapter = ctx.adapter
        rows, width = len(base_and_xa), adapter.outputs // 2
        d_base_and_xa = torch.empty_like(base_and_xa)
        grid, constants = _tiles(base_and_xa, adapter)
        _swiglu_backward_kernel[grid](
            d_out.contiguous(),
            base_and_xa,
            b,
            scale,
            d_base_and_xa,
            rows,
            width,
            base_and_xa.stride(0),
            b.shape[1],
            **constants,
        )
        d_b = lora_backward(d_base_and_xa, base_and_xa[:, adapter.xa_columns], b, scale, adapter)
        return d_base_and_xa, d_b, None, None, None, None


def _tiles(base_and_xa: Tensor, adapter: LinearAdapter) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a SwiGLU kernel, and its constants."""
    rows, columns, warps = _SWIGLU_TILE_FEW_ROWS if len(base_and_xa) <= _FEW_ROWS else _SWIGLU_TILE
    width = adapter.outputs // 2
    starts = [projection.columns.start for projection in adapter.projections]
    constants = {
        "GATE": int(0 in starts),
        "UP": int(width in starts),
        "ROWS": rows,
        "COLUMNS": columns,
        "num_warps": warps,
        "num_stages": 1,
    }
    return (triton.cdiv(width, columns), triton.cdiv(len(base_and_xa), rows)), constants | rank_constants(
        base_and_xa, adapter
    )
