"""Triton kernels that add what an adapter adds: scale (x A^T) B^T, to the base beside which x A^T stands in a product.

Their results do not depend on the number of rows. `expanded` adds up along the rank in one order that is written down,
so the kernels that use it may divide rows and columns as they like: one is on its own, and those of a norm and of heads
expand what they read if there are few rows, which saves launches in decode. The MLP's has more columns and uses matrix
instructions instead, in tiles of one size for all phases.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.model.attention_kernels import dot_precision
from rollgraph.model.low_rank import LinearAdapter, expand_backward

_ROWS, _COLUMNS = 32, 128  # a tile of `expand`
_SWIGLU_ROWS, _SWIGLU_COLUMNS = 32, 128
_MOST_UNROLLED = 32
_MOST_DEPTH = 64  # along the rank, of one matrix product
_MOST_PARTS = 3


@triton.jit
def expanded(base, low, up, inside, b_width, factor, RANK: tl.constexpr, UNROLLED: tl.constexpr):
    """Base plus factor times (x A^T) B^T, where `low` points to x A^T, and `up` to columns of the first row of B."""
    wide = base.to(tl.float32)
    total = tl.zeros_like(wide)
    for start in range(0, RANK, UNROLLED):
        for step in tl.static_range(UNROLLED):
            x = tl.load(low + start + step).to(tl.float32)
            y = tl.load(up + (start + step) * b_width, mask=inside, other=0.0).to(tl.float32)
            total = tl.fma(x, y, total)
    return tl.where(factor != 0, tl.fma(total, factor, wide).to(base.dtype), base)


def sizes_of(adapter: LinearAdapter) -> dict[str, int]:
    """The constants of `expanded`."""
    unrolled = gcd(adapter.rank, _MOST_UNROLLED)
    return {"RANK": adapter.rank, "UNROLLED": unrolled}


@triton.jit
def _expand_kernel(
    product, b, scale, out, rows, outputs, stride, b_width, begin_0, end_0, up_0, begin_1, end_1, up_1, begin_2, end_2,
    up_2, RANK: tl.constexpr, UNROLLED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile, which lies in one part or in none."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None, :]
    in_1 = (first >= begin_1) & (first < end_1)
    in_2 = (first >= begin_2) & (first < end_2)
    adapted = (first >= begin_0) & (first < end_0) | in_1 | in_2
    low = outputs + tl.where(in_1, RANK, tl.where(in_2, 2 * RANK, 0))
    up = tl.where(in_1, up_1 - begin_1, tl.where(in_2, up_2 - begin_2, up_0 - begin_0)) + first
    up = tl.multiple_of(tl.where(adapted, up, 0), COLUMNS)
    source = product + tl.minimum(row, rows - 1).to(tl.int64) * stride
    inside = column < outputs
    base = tl.load(source + column, mask=inside, other=0.0)
    value = base
    if adapted:
        value = expanded(
            base, source + low, b + up + tl.arange(0, COLUMNS)[None, :], inside, b_width, tl.load(scale), RANK, UNROLLED
        )
    tl.store(out + row.to(tl.int64) * outputs + column, value, mask=inside & (row < rows))


def expand(product: Tensor, b: Tensor, adapter: LinearAdapter) -> Tensor:
    """The base of an extended product plus what the adapter adds to it, [rows, outputs]."""
    rows = len(product)
    out = product.new_empty(rows, adapter.outputs)
    bounds = []
    for index in range(_MOST_PARTS):
        begin = end = up = 0
        if index < len(adapter.parts):
            part = adapter.parts[index]
            begin, end, up = part.columns.start, part.columns.stop, part.up.start
        bounds += [begin, end, up]
    columns = gcd(_COLUMNS, *(bound for bound in bounds if bound < adapter.outputs))
    grid = (triton.cdiv(adapter.outputs, columns), triton.cdiv(rows, _ROWS))
    _expand_kernel[grid](
        product, b, adapter.scale, out, rows, adapter.outputs, product.stride(0), b.shape[1], *bounds,
        **sizes_of(adapter), ROWS=_ROWS, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


@triton.jit
def _low_rank_product(
    total, from_row, in_row, b, column, in_column, b_width, low, up, start,
    RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add some of the rank's terms of a tile, of which x A^T begins at `low` and B at column `up`."""
    at = start + tl.arange(0, DEPTH)
    in_rank = at < RANK
    x = tl.load(from_row + low + at[None, :], mask=in_row & in_rank[None, :], other=0.0)
    y = tl.load(b + at[:, None] * b_width + up + column, mask=in_rank[:, None] & in_column, other=0.0)
    return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def _gate_and_up(
    product, b, scale, row, column, rows, width, stride, b_width,
    GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of both, in fp32. GATE and UP say which of them have an adapter; gate's comes first."""
    in_row, in_column = row < rows, column < width
    from_row = product + row.to(tl.int64) * stride
    gate = tl.load(from_row + column, mask=in_row & in_column, other=0.0)
    up = tl.load(from_row + width + column, mask=in_row & in_column, other=0.0)
    factor = tl.load(scale)
    for_gate = tl.zeros(gate.shape, tl.float32)
    for_up = tl.zeros(gate.shape, tl.float32)
    for start in range(0, RANK, DEPTH):
        if GATE:
            for_gate = _low_rank_product(
                for_gate, from_row, in_row, b, column, in_column, b_width, 2 * width, 0, start, RANK, DEPTH, PRECISION
            )  # fmt: skip
        if UP:
            for_up = _low_rank_product(
                for_up, from_row, in_row, b, column, in_column, b_width, 2 * width + GATE * RANK, GATE * width, start,
                RANK, DEPTH, PRECISION,
            )  # fmt: skip
    wide_gate = tl.where(factor != 0, tl.fma(for_gate, factor, gate.to(tl.float32)), gate.to(tl.float32))
    wide_up = tl.where(factor != 0, tl.fma(for_up, factor, up.to(tl.float32)), up.to(tl.float32))
    return wide_gate.to(gate.dtype).to(tl.float32), wide_up.to(gate.dtype).to(tl.float32)


@triton.jit
def _swiglu_kernel(
    product, b, scale, out, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate, up = _gate_and_up(
        product, b, scale, row, column, rows, width, stride, b_width, GATE, UP, RANK, DEPTH, PRECISION
    )
    kind = out.dtype.element_ty
    opened = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    inside = (row < rows) & (column < width)
    tl.store(out + row.to(tl.int64) * width + column, (opened * up).to(kind), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    d_out, product, b, scale, d_product, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate, up = _gate_and_up(
        product, b, scale, row, column, rows, width, stride, b_width, GATE, UP, RANK, DEPTH, PRECISION
    )
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
    def forward(ctx: Any, product: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter, padded: int) -> Tensor:
        rows, width = len(product), adapter.outputs // 2
        out = product.new_empty(padded, width)
        _swiglu_kernel[_tiles(rows, width)](
            product, b, scale, out, rows, width, product.stride(0), b.shape[1], **_tile_sizes(product, adapter)
        )
        ctx.save_for_backward(product, b, scale)
        ctx.adapter = adapter
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        product, b, scale = ctx.saved_tensors
        adapter = ctx.adapter
        rows, width = len(product), adapter.outputs // 2
        d_product = torch.empty_like(product)
        _swiglu_backward_kernel[_tiles(rows, width)](
            d_out.contiguous(), product, b, scale, d_product, rows, width, product.stride(0), b.shape[1],
            **_tile_sizes(product, adapter),
        )  # fmt: skip
        d_b = expand_backward(d_product, product[:, adapter.low], b, scale, adapter)
        return d_product, d_b, None, None, None


def _tiles(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(width, _SWIGLU_COLUMNS), triton.cdiv(rows, _SWIGLU_ROWS)


def _tile_sizes(product: Tensor, adapter: LinearAdapter) -> dict[str, Any]:
    starts = [part.columns.start for part in adapter.parts]
    return {
        "GATE": int(0 in starts),
        "UP": int(adapter.outputs // 2 in starts),
        "RANK": adapter.rank,
        "DEPTH": max(16, min(_MOST_DEPTH, triton.next_power_of_2(adapter.rank))),
        "ROWS": _SWIGLU_ROWS,
        "COLUMNS": _SWIGLU_COLUMNS,
        "PRECISION": dot_precision(product),
        "num_warps": 4,
        "num_stages": 1,
    }
