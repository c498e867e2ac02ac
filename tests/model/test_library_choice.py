"""Ways that cuBLAS offers give the library's results, and a choice among them changes the speed alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture
from rollgraph.graph.direct_sums import DirectSum
from rollgraph.model import library_choice
from rollgraph.model.cublas_offers import LibraryProduct, Offer, ProductKind, offers
from rollgraph.model.library_choice import add_weight_gradient, choose, find_choice, input_gradient
from rollgraph.model.products import Route, multiply

ROWS, COLUMNS, DEPTH = 320, 192, 256
HALF = [torch.bfloat16, torch.float16]
GRADIENTS: list[ProductKind] = ["input gradient", "weight gradient"]
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    library_choice._chosen.clear()
    yield
    library_choice._chosen.clear()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_a_gradient_without_a_choice_is_the_librarys() -> None:
    d_out, weight = drawn(5, 4, device=CPU), drawn(4, 6, device=CPU)
    assert torch.equal(input_gradient(d_out, weight), d_out @ weight)
    assert offers(LibraryProduct("input gradient", 5, 4, 6, torch.float32), CPU) == ()


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("forward", drawn(5, 6, device=CPU), drawn(4, 8, device=CPU)),
        ("forward", drawn(5, 8, device=CPU), drawn(4, 8, device=CPU, dtype=torch.float32)),
        ("input gradient", drawn(5, 8, device=CPU), drawn(4, 8, device=CPU)),
        ("weight gradient", drawn(5, 4, device=CPU), drawn(4, 8, device=CPU)),
    ],
)
def test_operands_of_another_product_are_refused(kind: ProductKind, one: Tensor, other: Tensor) -> None:
    """Before cuBLAS, which knows addresses alone, is called."""
    offer = Offer(LibraryProduct(kind, 5, 4, 8, torch.bfloat16), (), None, None)
    out = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=rf"a product \({kind}\) of \(5, .* was given \(5, "):
        offer.run(one, other, out)
    assert not out.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("wide", "biased"), [(False, False), (False, True), (True, False)])
def test_every_offer_computes_the_product(dtype: torch.dtype, wide: bool, biased: bool) -> None:
    x, weight = drawn(ROWS, DEPTH, dtype=dtype), drawn(COLUMNS, DEPTH, dtype=dtype)
    bias = drawn(COLUMNS, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    found = offers(LibraryProduct("forward", ROWS, COLUMNS, DEPTH, dtype, wide, biased), CUDA)
    assert found
    for index in range(len(found)):
        product = multiply(x, weight, bias, {ROWS: Route("offered", tiling=index)}, wide=wide)
        assert product.dtype == (torch.float32 if wide else dtype)
        assert error(product, expected) < (1e-6 if wide else 5e-3), index


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_every_offer_computes_both_gradients(dtype: torch.dtype) -> None:
    d_out, weight = drawn(ROWS, COLUMNS, dtype=dtype), drawn(COLUMNS, DEPTH, dtype=dtype)
    x, before = drawn(ROWS, DEPTH, dtype=dtype), drawn(COLUMNS, DEPTH, dtype=torch.float32)
    with torch.no_grad():
        for kind in GRADIENTS:
            product = LibraryProduct(kind, ROWS, COLUMNS, DEPTH, dtype)
            assert offers(product, CUDA)
            for index in range(len(offers(product, CUDA))):
                choose(product, CUDA, index)
                if kind == "input gradient":
                    found = input_gradient(d_out, weight)
                    assert error(found, d_out.double() @ weight.double()) < 5e-3, index
                else:
                    total = before.clone()
                    add_weight_gradient(DirectSum(total, total.new_zeros(())), d_out, x)
                    assert error(total, before.double() + d_out.double().t() @ x.double()) < 1e-6, index


@pytest.mark.gpu
def test_operands_may_begin_anywhere_and_be_strided() -> None:
    flat = drawn(COLUMNS * DEPTH + 3)
    weight = flat[3:].view(COLUMNS, DEPTH)  # 6 bytes after a boundary
    x = drawn(DEPTH, ROWS).t()
    expected = x.double() @ weight.double().t()
    assert error(multiply(x, weight, None, {ROWS: Route("offered")}), expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GRADIENTS)
def test_what_is_chosen_has_the_bits_of_the_library(kind: ProductKind) -> None:
    product = LibraryProduct(kind, 4096, 1536, 8960, torch.bfloat16)
    choose(product, CUDA, find_choice(product, CUDA))
    d_out, weight, x = drawn(4096, 1536), drawn(1536, 8960), drawn(4096, 8960)
    with torch.no_grad():
        if kind == "input gradient":
            assert torch.equal(input_gradient(d_out, weight), d_out @ weight)
            return
        totals = [torch.zeros(1536, 8960, device=CUDA) for _ in range(2)]
        add_weight_gradient(DirectSum(totals[0], totals[0].new_zeros(())), d_out, x)
        torch.addmm(totals[1], d_out.t(), x, out_dtype=torch.float32, out=totals[1])
        assert torch.equal(*totals)


@pytest.mark.gpu
def test_a_capture_takes_back_what_it_adds_and_a_replay_adds_once() -> None:
    product = LibraryProduct("weight gradient", ROWS, COLUMNS, DEPTH, torch.bfloat16)
    choose(product, CUDA, 0)
    d_out, x = drawn(ROWS, COLUMNS), drawn(ROWS, DEPTH)
    total = torch.ones(COLUMNS, DEPTH, device=CUDA)
    own = DirectSum(total, total.new_zeros(()))

    @torch.no_grad()
    def step() -> None:
        add_weight_gradient(own, d_out, x)

    captured = capture(step, pool=GraphPool(), backend="cuda", name="step")
    assert torch.equal(total, torch.ones_like(total))
    captured()
    captured()
    expected = 1 + 2 * (d_out.double().t() @ x.double())
    assert error(total, expected) < 1e-6


@pytest.mark.gpu
def test_second_derivatives_do_not_follow_a_choice() -> None:
    choose(LibraryProduct("input gradient", ROWS, COLUMNS, DEPTH, torch.bfloat16), CUDA, 0)
    x, weight = drawn(ROWS, DEPTH).requires_grad_(), drawn(COLUMNS, DEPTH).requires_grad_()
    (first,) = torch.autograd.grad(multiply(x, weight, None, {}).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(second, torch.full_like(weight, ROWS))
