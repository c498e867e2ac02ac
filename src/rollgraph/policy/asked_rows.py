"""The rows of a microbatch that have logits: taking them out of all rows, and putting what was found back.

Each row occurs once, so both ways only copy, in forward and backward: no sum, hence no order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Some rows of `values`. The gradient of all others is 0."""
    taken: Tensor = _TakeRows.apply(values, rows)  # type: ignore[no-untyped-call]
    return taken


def put_rows(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """The opposite: `count` rows, of which those in `rows` have these values, and all others are 0."""
    return values.new_zeros(count, *values.shape[1:]).index_copy(0, rows, values)


class _TakeRows(torch.autograd.Function):
    """As index_select, whose own backward adds rows up with atomics on a GPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(values)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, for_taken: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return put_rows(for_taken, rows, ctx.count), None
