"""The linear layers of the decoder, each of which can have a low-rank adapter: y = x W^T + scale (x A^T) B^T.

The weight of a layer is that of several projections (q, k and v, or gate and up), and each of these parts has an
adapter of its own. The rows of all A stand below W in one matrix, `extended`, so that base and x A^T are one product.
`expand` then adds scale (x A^T) B^T to the base, in fp32 and rounded once. The base is no parameter and gets no
gradient. `adapters.py` owns the adapters of a whole model.

Where ranks divide layers among themselves, each has some outputs of a layer, or some of its inputs. With some inputs a
product is a part of a sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollgraph.model.library_choice import input_gradient
from rollgraph.model.low_rank import LinearAdapter, Part, expand_backward, expand_by_products, expanding_weight
from rollgraph.model.products import LIBRARY, Route, Routes, compute, multiply
from rollgraph.model.tensor_group import TensorGroup

_ALIGNMENT = 16  # rows of `extended` are a multiple of this, or else libraries and kernels read more slowly


class Unexpanded(NamedTuple):
    """The extended product of a layer. The kernel that reads it adds what the adapter adds."""

    product: Tensor
    b: Tensor
    adapter: LinearAdapter
    chained: bool = False  # the kernel of the product lets the next one start early; see `chained_launch.py`


class Shared(NamedTuple):
    """Rows of a layer that several ranks of a group have alike, while each uses them for outputs of its own."""

    group: TensorGroup
    first: int  # the rows from here on
    ranks: range


class Linear(nn.Linear):
    """A linear layer that follows routes. All layers of one shape share their routes.

    With `sums_over`, the inputs are those of one rank of that group; with `outputs_of`, the outputs are. What A makes
    of the inputs is then the same on all ranks, and so is what B makes of a sum.

    Of `lora_a`, the rows are those of all parts, [rank of all parts, inputs]. `lora_b` is transposed, [rank, outputs of
    all parts], which is how a kernel reads it.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        *,
        sums_over: TensorGroup | None = None,
        outputs_of: TensorGroup | None = None,
        shared: Shared | None = None,
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.routes: Routes = {}
        self.sums_over = sums_over
        self.outputs_of = outputs_of
        self.shared = shared
        self.adapter: LinearAdapter | None = None

    def starts_next(self, rows: int) -> bool:
        """Whether a product of so many rows ends with a kernel of ours, which lets the next one start early."""
        if self.adapter is not None:
            return True
        return self.sums_over is None and self.routes.get(rows, LIBRARY).way == "fixed"

    @property
    def multiplied(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of the product that `routes` belong to."""
        if self.adapter is None:
            return self.weight, None if self.sums_over is not None else self.bias
        return self.adapter.extended, self.adapter.bias

    def forward(  # type: ignore[override]
        self, x: Tensor, rows: int | None = None, *, defer: bool = False
    ) -> Tensor | Unexpanded:
        """The product of the first `rows` rows; see `multiply`.

        With `defer`, the caller takes an unexpanded product, too. It gets one on CUDA, if there is an adapter.
        """
        if self.adapter is None:
            return self._unadapted(x, rows)
        product = self.extended_product(x, rows)
        own_kernel = self.routes.get(len(product), LIBRARY).way == "fixed" and self.sums_over is None
        unexpanded = Unexpanded(product, self.lora_b, self.adapter, own_kernel)
        return unexpanded if defer and x.is_cuda else expand(unexpanded)

    def _unadapted(self, x: Tensor, rows: int | None) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.shared is not None:
            weight = self.shared.group.enter_rows(weight, self.shared.first, self.shared.ranks)
            if bias is not None:
                bias = self.shared.group.enter_rows(bias, self.shared.first, self.shared.ranks)
        if self.sums_over is None:
            return multiply(x, weight, bias, self.routes, rows=rows)
        product = self.sums_over.sum(multiply(x, weight, None, self.routes, rows=rows))
        return product if bias is None else product + bias

    def extended_product(self, x: Tensor, rows: int | None = None) -> Tensor:
        """The base and x A^T of all parts, side by side."""
        assert self.adapter is not None
        adapter = self.adapter
        count = len(x) if rows is None else rows
        if adapter.dropout and torch.is_grad_enabled():
            return self._with_dropout(x[:count], adapter)
        route = self.routes.get(count, LIBRARY)
        a: Tensor = self.lora_a if self.outputs_of is None else self.outputs_of.enter(self.lora_a)
        product: Tensor = _ExtendedProduct.apply(x, a, adapter, route, count)  # type: ignore[no-untyped-call]
        return product if self.sums_over is None else self.sums_over.sum(product)

    def _with_dropout(self, x: Tensor, adapter: LinearAdapter) -> Tensor:
        bias = None if adapter.bias is None else self.bias  # of a sum over ranks, one of them adds it
        base = functional.linear(x, self.weight, bias)
        a: Tensor = self.lora_a if self.outputs_of is None else self.outputs_of.enter(self.lora_a)
        low = functional.linear(self._drop(x, adapter.dropout), a)
        padding = len(adapter.extended) - adapter.low.stop
        product = torch.cat((base, functional.pad(low, (0, padding))), 1)
        return product if self.sums_over is None else self.sums_over.sum(product)

    def _drop(self, x: Tensor, rate: float) -> Tensor:
        """Leave out inputs. Ranks that divide layers draw from the same generator, and leave out what one rank would.

        Those that divide the inputs draw for all of them, and each takes its part: their generators stay alike.
        """
        group = self.sums_over
        if group is None:
            return functional.dropout(x, rate)
        drawn = functional.dropout(x.new_ones(len(x), x.shape[1] * group.size), rate)
        return x * (drawn.chunk(group.size, 1)[group.rank] != 0) / (1 - rate)  # not by a factor that bf16 would round

    def expanding_weights(self) -> Iterator[Tensor]:
        """B of each part, [outputs, rank], in the dtype that it is multiplied in on a CPU."""
        assert self.adapter is not None
        for part in self.adapter.parts:
            yield expanding_weight(self.lora_b, part)

    def adapt(self, columns: Sequence[slice], a: Tensor, scale: Tensor, dropout: float) -> None:
        """Give the parts with these outputs adapters: `a` is A of all of them, and every B is zero.

        The weight and the bias stay what they are, but are buffers from now on, in other memory.
        """
        rank = len(a) // len(columns)
        outputs, inputs = self.weight.shape
        padded = -(-(outputs + len(a)) // _ALIGNMENT) * _ALIGNMENT
        parts = []
        width = 0
        for index, part in enumerate(columns):
            start = outputs + index * rank
            end = width + part.stop - part.start
            parts.append(Part(part, slice(start, start + rank), slice(width, end)))
            width = end
        extended = self.weight.new_zeros(padded, inputs)
        extended[:outputs] = self.weight.detach()
        bias = None
        if self.bias is not None:
            bias = functional.pad(self.bias.detach(), (0, padded - outputs))
        del self.weight, self.bias
        self.register_buffer("weight", extended[:outputs], persistent=False)
        self.register_buffer("bias", None if bias is None else bias[:outputs], persistent=False)
        self.lora_a = nn.Parameter(a.to(extended))
        self.lora_b = nn.Parameter(extended.new_zeros(rank, width))
        if self.sums_over is not None and self.sums_over.rank > 0:
            bias = None  # it is added once
        self.adapter = LinearAdapter(tuple(parts), rank, outputs, extended, bias, scale, dropout)


class _ExtendedProduct(torch.autograd.Function):
    """The product with `extended`, by a route. Only x and A get gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, adapter: LinearAdapter, route: Route, count: int) -> Tensor:
        ctx.save_for_backward(x, adapter.extended)
        ctx.adapter = adapter
        ctx.count = count
        return compute(x if route != LIBRARY else x[:count], adapter.extended, adapter.bias, route, count, wide=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, extended = ctx.saved_tensors
        d_x = d_a = None
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(d_out, extended)
            if len(x) > ctx.count:
                d_x = functional.pad(d_x, (0, 0, 0, len(x) - ctx.count))
        if ctx.needs_input_grad[1]:
            d_a = d_out[:, ctx.adapter.low].t() @ x[: ctx.count]
        return d_x, d_a, None, None, None


def expand(unexpanded: Unexpanded) -> Tensor:
    """The base plus what the adapter adds to it, [rows, outputs]."""
    product, b, adapter, chained = unexpanded
    if not torch.is_grad_enabled():
        return _expanded(product, b, adapter, chained)
    expanded: Tensor = _Expand.apply(product, b, adapter.scale, adapter)  # type: ignore[no-untyped-call]
    return expanded


def _expanded(product: Tensor, b: Tensor, adapter: LinearAdapter, chained: bool = False) -> Tensor:
    if not product.is_cuda:
        return expand_by_products(product, b, adapter)
    from rollgraph.model import adapter_kernels

    return adapter_kernels.expand(product, b, adapter, chained)


class _Expand(torch.autograd.Function):
    """See `expand`."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter) -> Tensor:
        # A copy, because a view would keep the whole product alive until the backward.
        ctx.save_for_backward(product[:, adapter.low].clone(), b, scale)
        ctx.adapter = adapter
        return _expanded(product, b, adapter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        low, b, scale = ctx.saved_tensors
        adapter = ctx.adapter
        d_product = d_out.new_empty(len(d_out), len(adapter.extended))
        d_product[:, : adapter.outputs] = d_out
        d_b = expand_backward(d_product, low, b, scale, adapter)
        return d_product, d_b, None, None
