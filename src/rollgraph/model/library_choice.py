"""Gradients of products, by whichever way that cuBLAS offers is the fastest one with the library's own bits.

What was found for a product holds for all weights of its shape. Without a choice, a gradient is the library's. The
products themselves follow routes; see `products.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rollgraph.graph.direct_sums import DirectSum
from rollgraph.model.cublas_offers import LibraryProduct, Offer, offers
from rollgraph.model.operators import sum_operator
from rollgraph.model.product_trials import lasting_times, row_digests

_LEAST_GAIN = 0.01  # of the library's time

_chosen: dict[tuple[LibraryProduct, torch.device], Offer] = {}


def input_gradient(d_out: Tensor, weight: Tensor) -> Tensor:
    """`d_out @ weight`."""
    columns, depth = weight.shape
    offer = _choice(LibraryProduct("input gradient", len(d_out), columns, depth, d_out.dtype), d_out.device)
    if offer is None or weight.dtype != d_out.dtype:
        return d_out @ weight
    out = d_out.new_empty(len(d_out), depth)
    offer.run(d_out, weight, out)
    return out


def add_weight_gradient(total: DirectSum, d_out: Tensor, x: Tensor) -> None:
    """Add `d_out.T @ x` to the sum of a weight's gradients."""
    if _choice(_weight_product(d_out, x), x.device) is None or d_out.dtype != x.dtype:
        total.add_product(d_out.t(), x)
    else:
        _add_product(total.buffer(), d_out, x)


@sum_operator
def _add_product(total: Tensor, d_out: Tensor, x: Tensor) -> None:
    _chosen[_weight_product(d_out, x), x.device].run(d_out, x, total)


def _weight_product(d_out: Tensor, x: Tensor) -> LibraryProduct:
    return LibraryProduct("weight gradient", len(x), d_out.shape[1], x.shape[1], x.dtype)


def _choice(product: LibraryProduct, device: torch.device) -> Offer | None:
    """None also where autograd has to see the product, for second derivatives."""
    if not _chosen or torch.is_grad_enabled():
        return None
    return _chosen.get((product, device))


def choose(product: LibraryProduct, device: torch.device, index: int | None) -> None:
    """Compute a gradient as the offer with this index does from now on; None: as the library does."""
    _chosen.pop((product, device), None)
    if index is not None:
        _chosen[product, device] = offers(product, device)[index]


@torch.no_grad()
def find_choice(product: LibraryProduct, device: torch.device) -> int | None:
    """The index of the fastest offer that has the bits of the library's own gradient; None if that one is fastest."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), dtype=product.dtype, device=device, generator=generator)

    d_out = draw(product.rows, product.columns)
    if product.kind == "input gradient":
        other = draw(product.columns, product.depth)
        out = torch.empty((product.rows, product.depth), dtype=product.dtype, device=device)
    else:
        other = draw(product.rows, product.depth)
        out = torch.empty((product.columns, product.depth), dtype=torch.float32, device=device)

    def run_library() -> None:
        if product.kind == "input gradient":
            torch.mm(d_out, other, out=out)
        else:
            torch.addmm(out, d_out.t(), other, out_dtype=torch.float32, out=out)

    def run_offer(index: int) -> None:
        offers(product, device)[index].run(d_out, other, out)

    out.zero_()
    run_library()
    expected = row_digests(out)
    equal = []
    for index in range(len(offers(product, device))):
        out.zero_()
        run_offer(index)
        if torch.equal(row_digests(out), expected):
            equal.append(index)
    if not equal:
        return None
    library, *times = lasting_times([run_library, *(partial(run_offer, index) for index in equal)])
    best = min(range(len(equal)), key=times.__getitem__)
    return equal[best] if times[best] < (1 - _LEAST_GAIN) * library else None
