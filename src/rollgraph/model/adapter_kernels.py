"""Triton kernels that add what an adapter adds: scale (x A^T) B^T, to the base beside which x A^T stands in a product.

One is on its own, and one is part of SwiGLU, whose input is the widest. Each result is one chain of matrix instructions
along the rank, in the same order in every tile, so its bits do not depend on the number of rows.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.attention_kernels import dot_precision
from rollgraph.model.chained_launch import can_chain
from rollgraph.model.low_rank import LinearAdapter, expand_backward
from rollgraph.model.matmul_kernels import swish_product

# Rows, columns and warps of a tile. Narrow ones make more programs, which counts if there are few rows.
_EXPANDED = (32, 32, 1)
_GATED, _GATED_FEW_ROWS = (32, 64, 4), (64, 32, 4)
_FEW_ROWS = 128
_MOST_DEPTH = 64  # along the rank, of one matrix product
_MOST_PARTS = 3


@triton.jit
def load_low(from_row, in_row, low, start, RANK: tl.constexpr, DEPTH: tl.constexpr):
    """A step along the rank of x A^T, which begins at `low` in the rows."""
    at = start + tl.arange(0, DEPTH)[None, :]
    return tl.load(from_row + low + at, mask=in_row & (at < RANK), other=0.0)


@triton.jit
def load_up(b, b_width, up, column, in_column, start, RANK: tl.constexpr, DEPTH: tl.constexpr):
    """A step along the rank of B, from its column `up`."""
    at = start + tl.arange(0, DEPTH)[:, None]
    return tl.load(b + at * b_width + up + column, mask=(at < RANK) & in_column, other=0.0)


@triton.jit
def low_rank_product(
    low_tile, up_tile, from_row, in_row, low, b, b_width, up, column, in_column,
    RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(x A^T) B^T of a tile, of which the first step along the rank is there already: loads do not wait for it."""
    total = tl.dot(low_tile, up_tile, input_precision=PRECISION)
    for start in range(DEPTH, RANK, DEPTH):
        low_tile = load_low(from_row, in_row, low, start, RANK, DEPTH)
        up_tile = load_up(b, b_width, up, column, in_column, start, RANK, DEPTH)
        total = tl.dot(low_tile, up_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def scaled_sum(base, added, factor):
    """Base plus factor times what is added, rounded once; the base itself if the factor is 0."""
    return tl.where(factor != 0, tl.fma(added, factor, base.to(tl.float32)).to(base.dtype), base)


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    product, b, scale, out, rows, outputs, stride, b_width, begin_0, end_0, up_0, begin_1, end_1, up_1, begin_2, end_2,
    up_2, WHOLE: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WAITS: tl.constexpr, STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    """A tile, which lies in one part or in none. WHOLE: there is an adapter in all of them."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    in_1 = (first >= begin_1) & (first < end_1)
    in_2 = (first >= begin_2) & (first < end_2)
    low = outputs + tl.where(in_1, RANK, tl.where(in_2, 2 * RANK, 0))
    up = first
    adapted = True
    if not WHOLE:
        adapted = (first >= begin_0) & (first < end_0) | in_1 | in_2
        up = first + tl.where(in_1, up_1 - begin_1, tl.where(in_2, up_2 - begin_2, up_0 - begin_0))
    from_row = product + row.to(tl.int64) * stride
    in_row, in_column = row < rows, column < outputs - first
    up_tile = load_up(b, b_width, up, column, in_column & adapted, 0, RANK, DEPTH)
    if WAITS:
        gdc_wait()
    if STARTS_NEXT:
        gdc_launch_dependents()
    base = tl.load(from_row + first + column, mask=in_row & in_column, other=0.0)
    value = base
    if adapted:
        factor = tl.load(scale)
        low_tile = load_low(from_row, in_row, low, 0, RANK, DEPTH)
        added = low_rank_product(
            low_tile, up_tile, from_row, in_row, low, b, b_width, up, column, in_column, RANK, DEPTH, PRECISION
        )  # fmt: skip
        value = scaled_sum(base, added, factor)
    tl.store(out + row.to(tl.int64) * outputs + first + column, value, mask=in_row & in_column)


def expand(product: Tensor, b: Tensor, adapter: LinearAdapter, chained: bool = False) -> Tensor:
    """The base of an extended product plus what the adapter adds to it, [rows, outputs]. See `Unexpanded`."""
    rows = len(product)
    starts_next = can_chain(product.device)
    waits = chained and starts_next
    out = product.new_empty(rows, adapter.outputs)
    bounds = []
    for index in range(_MOST_PARTS):
        begin = end = up = 0
        if index < len(adapter.parts):
            part = adapter.parts[index]
            begin, end, up = part.columns.start, part.columns.stop, part.up.start
        bounds += [begin, end, up]
    tile_rows, tile_columns, warps = _EXPANDED
    columns = gcd(tile_columns, *(bound for bound in bounds if bound < adapter.outputs))
    grid = (triton.cdiv(adapter.outputs, columns), triton.cdiv(rows, tile_rows))
    _expand_kernel[grid](
        product, b, adapter.scale, out, rows, adapter.outputs, product.stride(0), b.shape[1], *bounds,
        WHOLE=b.shape[1] == adapter.outputs, ROWS=tile_rows, COLUMNS=columns, num_warps=warps, num_stages=1,
        WAITS=waits, STARTS_NEXT=starts_next, launch_pdl=waits, **rank_constants(product, adapter),
    )  # fmt: skip
    return out


def rank_constants(product: Tensor, adapter: LinearAdapter) -> dict[str, Any]:
    """The constants of a product along the rank."""
    depth = max(16, min(_MOST_DEPTH, triton.next_power_of_2(adapter.rank)))
    return {"RANK": adapter.rank, "DEPTH": depth, "PRECISION": dot_precision(product)}


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


@triton.jit
def _gate_and_up(
    product, b, scale, row, column, rows, width, stride, b_width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    WAITS: tl.constexpr, STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    """A tile of both, in fp32. GATE and UP say which of them have an adapter; gate's comes first."""
    in_row, in_column = row < rows, column < width
    from_row = product + row.to(tl.int64) * stride
    low = 2 * width
    low_up = low + GATE * RANK
    up = GATE * width
    if GATE:
        gate_b = load_up(b, b_width, 0, column, in_column, 0, RANK, DEPTH)
    if UP:
        up_b = load_up(b, b_width, up, column, in_column, 0, RANK, DEPTH)
    if WAITS:
        gdc_wait()
    if STARTS_NEXT:
        gdc_launch_dependents()
    if GATE:
        gate_low = load_low(from_row, in_row, low, 0, RANK, DEPTH)
    if UP:
        up_low = load_low(from_row, in_row, low_up, 0, RANK, DEPTH)
    gate_base = tl.load(from_row + column, mask=in_row & in_column, other=0.0)
    up_base = tl.load(from_row + width + column, mask=in_row & in_column, other=0.0)
    factor = tl.load(scale)
    for_gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    for_up = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATE:
        for_gate = low_rank_product(
            gate_low, gate_b, from_row, in_row, low, b, b_width, 0, column, in_column, RANK, DEPTH, PRECISION
        )  # fmt: skip
    if UP:
        for_up = low_rank_product(
            up_low, up_b, from_row, in_row, low_up, b, b_width, up, column, in_column, RANK, DEPTH, PRECISION
        )  # fmt: skip
    return scaled_sum(gate_base, for_gate, factor).to(tl.float32), scaled_sum(up_base, for_up, factor).to(tl.float32)


@triton.jit
def _swiglu_kernel(
    product, b, scale, out, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, WAITS: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate, up = _gate_and_up(
        product, b, scale, row, column, rows, width, stride, b_width, ROWS, COLUMNS, GATE, UP, RANK, DEPTH, PRECISION,
        WAITS, STARTS_NEXT,
    )  # fmt: skip
    inside = (row < rows) & (column < width)
    activated = swish_product(gate, up, out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * width + column, activated, mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    d_out, product, b, scale, d_product, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate, up = _gate_and_up(
        product, b, scale, row, column, rows, width, stride, b_width, ROWS, COLUMNS, GATE, UP, RANK, DEPTH, PRECISION,
        False, False,
    )  # fmt: skip
    inside = (row < rows) & (column < width)
    gradient = tl.load(d_out + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = gradient * up * share * (1.0 + gate * (1.0 - share))
    d_up = gradient * gate * share
    target = d_product + row.to(tl.int64) * stride + column
    tl.store(target, d_gate.to(d_product.dtype.element_ty), mask=inside)
    tl.store(target + width, d_up.to(d_product.dtype.element_ty), mask=inside)


class AdaptedSwiGLU(torch.autograd.Function):
    """`pointwise.swiglu` of an extended product."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter, padded: int, chained: bool
    ) -> Tensor:
        starts_next = can_chain(product.device)
        waits = chained and starts_next
        rows, width = len(product), adapter.outputs // 2
        out = product.new_empty(padded, width)
        grid, constants = _tiles(product, adapter)
        _swiglu_kernel[grid](
            product, b, scale, out, rows, width, product.stride(0), b.shape[1],
            WAITS=waits, STARTS_NEXT=starts_next, launch_pdl=waits, **constants,
        )  # fmt: skip
        ctx.save_for_backward(product, b, scale)
        ctx.adapter = adapter
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        product, b, scale = ctx.saved_tensors
        adapter = ctx.adapter
        rows, width = len(product), adapter.outputs // 2
        d_product = torch.empty_like(product)
        grid, constants = _tiles(product, adapter)
        _swiglu_backward_kernel[grid](
            d_out.contiguous(), product, b, scale, d_product, rows, width, product.stride(0), b.shape[1], **constants
        )
        d_b = expand_backward(d_product, product[:, adapter.low], b, scale, adapter)
        return d_product, d_b, None, None, None, None


def _tiles(product: Tensor, adapter: LinearAdapter) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a kernel of gate and up, and its constants."""
    rows, columns, warps = _GATED_FEW_ROWS if len(product) <= _FEW_ROWS else _GATED
    width = adapter.outputs // 2
    starts = [part.columns.start for part in adapter.parts]
    constants = {
        "GATE": int(0 in starts),
        "UP": int(width in starts),
        "ROWS": rows,
        "COLUMNS": columns,
        "num_warps": warps,
        "num_stages": 1,
    }
    return (triton.cdiv(width, columns), triton.cdiv(len(product), rows)), constants | rank_constants(product, adapter)
