"""The embedding. Its gradient has as many rows as the vocabulary, of which a microbatch changes a few thousand.

Where gradients are added up in fp32, these rows are added there, and the gradient is never made as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollgraph.graph.direct_sums import direct_sum_for


class Embedding(nn.Embedding):
    """A row of the weight for each of `ids`, [tokens]."""

    def forward(self, ids: Tensor) -> Tensor:
        if not (self.weight.is_cuda and self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(ids)
        rows: Tensor = _Rows.apply(ids, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # the parameter itself, which knows where its gradient is added up
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        total = direct_sum_for(ctx.weight, d_rows.dtype)
        if total is None:
            return None, torch.ops.aten.embedding_dense_backward(d_rows, ids, len(ctx.weight), -1, False)
        from rollgraph.model.embedding_kernels import add_to_rows

        add_to_rows(total.buffer(), ids, d_rows)
        return None, total.placeholder()
