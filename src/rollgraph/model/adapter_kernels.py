"""Triton kernels that add what an adapter adds: scale (x A^T) B^T, to the base beside which x A^T stands in a product.

Their results do not depend on the number of rows. `expand_columns` adds up along the rank in one order that is written
down, so the kernels that use it may divide rows and columns as they like: one is on its own, and those of a norm and of
heads begin with it if there are few rows, which saves launches in decode. The MLP's has more columns and uses matrix
instructions instead, in tiles of one size for all phases.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.model.attention_kernels import dot_precision
from rollgraph.model.low_rank import LinearAdapter, expand_backward

_ROWS, _COLUMNS = 32, 128  # a tile of `expand`
_SWIGLU_ROWS, _SWIGLU_COLUMNS = 64, 64
_MOST_DEPTH = 64  # along the rank, of one matrix product
_MOST_PARTS = 3


@triton.jit
def expand_columns(
    row, column, inside, b, scale, outputs, b_width, begin_0, end_0, up_0, begin_1, end_1, up_1, begin_2, end_2, up_2,
    PARTS: tl.constexpr, RANK: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """The expanded values of some columns; `row` points to rows of the product. `arguments_of` gives the others."""
    base = tl.load(row + column, mask=inside, other=0.0)
    adapted = (column >= begin_0) & (column < end_0)
    up = tl.where(adapted, column - begin_0 + up_0, 0)
    second = adapted
    third = adapted
    if PARTS > 1:
        second = (column >= begin_1) & (column < end_1)
        up = tl.where(second, column - begin_1 + up_1, up)
        adapted = adapted | second
    if PARTS > 2:
        third = (column >= begin_2) & (column < end_2)
        up = tl.where(third, column - begin_2 + up_2, up)
        adapted = adapted | third
    wide = base.to(tl.float32)
    total = tl.zeros_like(wide)
    low = row + outputs
    for start in range(0, RANK, UNROLLED):
        for step in tl.static_range(UNROLLED):
            at = start + step
            x = tl.load(low + at).to(tl.float32)
            if PARTS > 1:
                x = tl.where(second, tl.load(low + RANK + at).to(tl.float32), x)
            if PARTS > 2:
                x = tl.where(third, tl.load(low + 2 * RANK + at).to(tl.float32), x)
            y = tl.load(b + at * b_width + up, mask=adapted, other=0.0).to(tl.float32)
            total = tl.fma(x, y, total)
    factor = tl.load(scale)
    expanded = tl.fma(total, factor, wide).to(base.dtype)
    return tl.where(factor != 0, tl.where(adapted, expanded, base), base)


def arguments_of(b: Tensor, adapter: LinearAdapter) -> dict[str, Any]:
    """The arguments of `expand_columns` from `b` on."""
    found: dict[str, Any] = {"b": b, "scale": adapter.scale, "outputs": adapter.outputs, "b_width": b.shape[1]}
    for index in range(_MOST_PARTS):
        begin = end = up = 0
        if index < len(adapter.parts):
            part = adapter.parts[index]
            begin, end, up = part.columns.start, part.columns.stop, part.up.start
        found |= {f"begin_{index}": begin, f"end_{index}": end, f"up_{index}": up}
    unrolled = next(steps for steps in (16, 8, 4, 2, 1) if adapter.rank % steps == 0)
    return found | {"PARTS": len(adapter.parts), "RANK": adapter.rank, "UNROLLED": unrolled}


@triton.jit
def _expand_kernel(
    product, out, rows, stride, b, scale, outputs, b_width, begin_0, end_0, up_0, begin_1, end_1, up_1, begin_2, end_2,
    up_2, PARTS: tl.constexpr, RANK: tl.constexpr, UNROLLED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < outputs
    source = product + tl.minimum(row, rows - 1).to(tl.int64) * stride
    value = expand_columns(
        source, column, inside, b, scale, outputs, b_width, begin_0, end_0, up_0, begin_1, end_1, up_1, begin_2, end_2,
        up_2, PARTS, RANK, UNROLLED,
    )  # fmt: skip
    tl.store(out + row.to(tl.int64) * outputs + column, value, mask=inside & (row < rows))


def expand(product: Tensor, b: Tensor, adapter: LinearAdapter) -> Tensor:
    """The base of an extended product plus what the adapter adds to it, [rows, outputs]."""
    rows = len(product)
    out = product.new_empty(rows, adapter.outputs)
    grid = (triton.cdiv(adapter.outputs, _COLUMNS), triton.cdiv(rows, _ROWS))
    _expand_kernel[grid](
        product, out, rows, product.stride(0), **arguments_of(b, adapter), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


@triton.jit
def _expanded_tile(
    product, b, factor, row, column, rows, width, stride, b_width, base_at, low_at, up_at,
    RANK: tl.constexpr, DEPTH: tl.constexpr, ADAPTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of gate or up: `base_at` says where the base of column 0 is, `low_at` x A^T, and `up_at` its row of B."""
    in_row, in_column = row < rows, column < width
    from_row = product + row.to(tl.int64)[:, None] * stride
    base = tl.load(from_row + base_at + column[None, :], mask=in_row[:, None] & in_column[None, :], other=0.0)
    value = base
    if ADAPTED:
        wide = base.to(tl.float32)
        total = tl.zeros_like(wide)
        for start in range(0, RANK, DEPTH):
            at = start + tl.arange(0, DEPTH)
            in_rank = at < RANK
            x = tl.load(from_row + low_at + at[None, :], mask=in_row[:, None] & in_rank[None, :], other=0.0)
            from_b = b + at[:, None] * b_width + up_at + column[None, :]
            y = tl.load(from_b, mask=in_rank[:, None] & in_column[None, :], other=0.0)
            total = tl.dot(x, y, total, input_precision=PRECISION)
        value = tl.where(factor != 0, tl.fma(total, factor, wide).to(base.dtype), base)
    return value


@triton.jit
def _gate_and_up(
    product, b, scale, row, column, rows, width, stride, b_width,
    GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of both. GATE and UP say which of them have an adapter; gate's comes first."""
    factor = tl.load(scale)
    gate = _expanded_tile(
        product, b, factor, row, column, rows, width, stride, b_width, 0, 2 * width, 0, RANK, DEPTH, GATE, PRECISION
    )  # fmt: skip
    low, behind = 2 * width, 0
    if GATE:
        low, behind = 2 * width + RANK, width
    up = _expanded_tile(
        product, b, factor, row, column, rows, width, stride, b_width, width, low, behind, RANK, DEPTH, UP, PRECISION
    )  # fmt: skip
    return gate, up


@triton.jit
def _swiglu_kernel(
    product, b, scale, out, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr, RANK: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    gate, up = _gate_and_up(
        product, b, scale, row, column, rows, width, stride, b_width, GATE, UP, RANK, DEPTH, PRECISION
    )
    wide = gate.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(target, (opened * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    d_out, product, b, scale, d_product, rows, width, stride, b_width, GATE: tl.constexpr, UP: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    gate, up = _gate_and_up(
        product, b, scale, row, column, rows, width, stride, b_width, GATE, UP, RANK, DEPTH, PRECISION
    )
    gate = gate.to(tl.float32)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    gradient = tl.load(d_out + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
    gradient = gradient.to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = gradient * up.to(tl.float32) * share * (1.0 + gate * (1.0 - share))
    d_up = gradient * gate * share
    target = d_product + row.to(tl.int64)[:, None] * stride + column[None, :]
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
        "GATE": 0 in starts,
        "UP": adapter.outputs // 2 in starts,
        "RANK": adapter.rank,
        "DEPTH": max(16, min(_MOST_DEPTH, triton.next_power_of_2(adapter.rank))),
        "ROWS": _SWIGLU_ROWS,
        "COLUMNS": _SWIGLU_COLUMNS,
        "PRECISION": dot_precision(product),
        "num_warps": 4,
    }
