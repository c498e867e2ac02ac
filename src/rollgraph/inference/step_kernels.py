"""Triton kernels at the two ends of a decode step: what each row needs before its layers, and its state afterwards.

`decode_graphs.py` does the same in PyTorch, in some twenty kernels, which take longer than their work. These launch
outside of PyTorch's dispatcher, so the undo log of a capture does not see them. It does not need to: they change the
state of rows that are not idle, and during a capture all are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 128


@triton.jit
def _begin_kernel(
    orders, positions, table, cos_of, sin_of, slots, lengths, cos, sin, state_stride, BLOCK: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, IDLE: tl.constexpr,
):  # fmt: skip
    """Append a row's new block to its table, and find its slot in the cache, its length and its rotary angles."""
    row = tl.program_id(0)
    order = tl.load(orders + row)
    position = tl.load(positions + row * state_stride)
    active = order > IDLE
    entry = table + row * state_stride + position // BLOCK
    block = tl.load(entry, mask=active & (order < 0), other=0)
    block = tl.where(order < 0, block, order)
    tl.store(entry, block, mask=order >= 0)
    tl.store(slots + row, tl.where(active, block * BLOCK + position % BLOCK, 0))
    tl.store(lengths + row, tl.where(active, position + 1, 1))
    at = tl.arange(0, WIDTH)
    inside = at < HALF
    tl.store(cos + row * HALF + at, tl.load(cos_of + position * HALF + at, mask=inside, other=0.0), mask=inside)
    tl.store(sin + row * HALF + at, tl.load(sin_of + position * HALF + at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(orders, results, tokens, positions, rows, state_stride, IDLE: tl.constexpr, LANES: tl.constexpr):
    """Make a sampled token the next one to be fed, and move on by one position."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    active = (row < rows) & (tl.load(orders + row, mask=row < rows, other=IDLE) > IDLE)
    token = tl.load(results + row * 3, mask=active, other=0)
    place = row * state_stride
    tl.store(tokens + place, tl.maximum(token, 0), mask=active)
    tl.store(positions + place, tl.load(positions + place, mask=active, other=0) + 1, mask=active)


def begin_step(
    orders: Tensor, positions: Tensor, table: Tensor, angles: tuple[Tensor, Tensor], block_size: int, idle: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Slots, lengths, and cos and sin of all rows. `positions` and `table` are columns of one state.

    `angles` are cos and sin of every position.
    """
    rows = len(orders)
    half = angles[0].shape[1]
    slots = torch.empty_like(orders)
    lengths = torch.empty_like(orders)
    cos, sin = (each.new_empty(rows, half) for each in angles)
    _begin_kernel[(rows,)](
        orders, positions, table, *angles, slots, lengths, cos, sin, table.stride(0),
        BLOCK=block_size, HALF=half, WIDTH=triton.next_power_of_2(half), IDLE=idle, num_warps=1,
    )  # fmt: skip
    return slots, lengths, (cos, sin)


def advance(orders: Tensor, results: Tensor, tokens: Tensor, positions: Tensor, idle: int) -> None:
    """Write the tokens of `results`, [rows, 3], to the state of rows that are not idle, and move them on."""
    rows = len(orders)
    _advance_kernel[(triton.cdiv(rows, _LANES),)](
        orders, results, tokens, positions, rows, positions.stride(0), IDLE=idle, LANES=_LANES, num_warps=4
    )
