"""Matrix products whose rows do not depend on how many rows there are.

A library chooses an algorithm by the number of rows, and some algorithms add up along K in another order than others. A
route says how to compute a product with some number of rows so that its bits are those of the product with many rows.
`product_probe.py` finds the routes of a model. Without a route, a product is the library's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rollgraph.graph.direct_sums import direct_sum_for
from rollgraph.model.cublas_offers import LibraryProduct, Offer, offers
from rollgraph.model.library_choice import add_weight_gradient, input_gradient

_BLOCK = 16  # rows in one product of the fixed way on a CPU


class Route(NamedTuple):
    """One way to compute a product.

    - library: the library's product of a weight without a bias, or with its bias.
    - offered: one of the ways that cuBLAS offers, of which the library's is the first; see `cublas_offers.py`.
    - fixed: a product with one order along K at any number of rows: our kernel on CUDA, blocks of rows elsewhere.
    - gated: like fixed, and the kernel ends with SwiGLU.
    """

    way: Literal["library", "offered", "fixed", "gated"]
    rows: int = 0  # the rows are padded to this number
    tiling: int = 0  # index of the kernel's tiling, or of the offer

    def __str__(self) -> str:
        padded = f", padded to {self.rows} rows" if self.rows else ""
        return f"{self.way}{padded}"


Routes = Mapping[int, Route]  # by number of rows
LIBRARY = Route("library")


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, routes: Routes, *, rows: int | None = None, wide: bool = False
) -> Tensor:
    """`x @ weight.T + bias` by the route of x's number of rows; with `wide`, in fp32 or more.

    `rows` says how many rows of x count, if x is padded already. The result has only those.
    """
    count = len(x) if rows is None else rows
    route = routes.get(count, LIBRARY)
    if route == LIBRARY:
        if count < len(x):  # even a slice of all rows would cost a copy in the backward
            x = x[:count]
        if not (x.is_cuda and weight.requires_grad and torch.is_grad_enabled()):
            return _library(x, weight, bias, wide)
    product: Tensor = _Product.apply(x, weight, bias, route, count, wide)  # type: ignore[no-untyped-call]
    return product


def gate(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    """SwiGLU of the product with the weights of gate and up, by a gated route."""
    from rollgraph.model.matmul_kernels import GATED_TILINGS, gated_product

    return gated_product(x.contiguous(), weight, bias, GATED_TILINGS[route.tiling])


def weight_gradient(weight: Tensor, d_out: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of a weight, `d_out.T @ x`, or a placeholder for it, if it was added to its sum already."""
    total = direct_sum_for(weight, x.dtype)
    if total is not None:
        add_weight_gradient(total, d_out, x)
        return total.placeholder()
    return d_out.t() @ x


def bias_gradient(bias: Tensor, d_out: Tensor) -> Tensor | None:
    """The gradient of a bias, the sum of all rows of `d_out`, or a placeholder for it, as for a weight."""
    total = direct_sum_for(bias, d_out.dtype)
    if total is not None:
        from rollgraph.model.sum_kernels import add_rows, sum_blocks

        add_rows(total.buffer(), sum_blocks(d_out))
        return total.placeholder()
    return d_out.sum(0)


def padded_rows(routes: Routes, rows: int) -> int:
    """The number of rows that the product of `rows` rows is computed with."""
    return max(rows, routes.get(rows, LIBRARY).rows)


def compute(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route, count: int, wide: bool) -> Tensor:
    """The first `count` rows of the product, by a route."""
    if route.rows and len(x) != route.rows:
        x = functional.pad(x[:count], (0, 0, 0, route.rows - count))
    if route.way == "fixed":
        return _fixed(x, weight, bias, route, wide)[:count]
    if route.way == "offered":
        return _offered(x[:count], weight, bias, route.tiling, wide)
    return _library(x, weight, bias, wide)[:count]


def _library(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    if not wide:
        return functional.linear(x, weight, bias)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))


def offers_of(rows: int, weight: Tensor, wide: bool, biased: bool) -> tuple[Offer, ...]:
    """What cuBLAS offers for a product of so many rows with a weight."""
    columns, depth = weight.shape
    return offers(LibraryProduct("forward", rows, columns, depth, weight.dtype, wide, biased), weight.device)


def _offered(x: Tensor, weight: Tensor, bias: Tensor | None, index: int, wide: bool) -> Tensor:
    offer = offers_of(len(x), weight, wide, bias is not None)[index]
    out = torch.empty((len(x), len(weight)), dtype=torch.float32 if wide else x.dtype, device=x.device)
    offer.run(x, weight, out, bias)
    return out


def _fixed(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route, wide: bool) -> Tensor:
    if x.is_cuda:
        from rollgraph.model.matmul_kernels import TILINGS, product

        dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
        return product(x.contiguous(), weight, bias, TILINGS[route.tiling], dtype)
    padding = -len(x) % _BLOCK
    blocks = functional.pad(x, (0, 0, 0, padding)).split(_BLOCK)
    return torch.cat([_library(block, weight, bias, wide) for block in blocks])[: len(x)]


class _Product(torch.autograd.Function):
    """`compute`, with the library's gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, route: Route, count: int, wide: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameters themselves, which know where their gradients are added up
        ctx.bias = bias
        ctx.count = count
        return compute(x, weight, bias, route, count, wide)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = d_out.to(x.dtype)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(d_out, weight.to(x.dtype))  # dtypes differ under autocast
            if len(x) > ctx.count:
                d_x = functional.pad(d_x, (0, 0, 0, len(x) - ctx.count))
        if ctx.needs_input_grad[1]:
            d_weight = weight_gradient(ctx.weight, d_out, x[: ctx.count])
        if ctx.needs_input_grad[2]:
            d_bias = bias_gradient(ctx.bias, d_out)
        return d_x, d_weight, d_bias, None, None, None
