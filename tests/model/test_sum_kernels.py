"""The kernels that sum gradients: compared with float64 at any number of rows, and with the same bits each time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rollgraph.graph import capture
from rollgraph.graph.direct_sums import direct_sums
from rollgraph.model.layers import add_norm, norm, rotary_angles, rotate
from tests.interpreter import run_interpreted

ROWS = (1, 7, 128, 129, 300)  # a part of a block, a whole one, and several
COLUMNS = (1, 16, 130)


def check(actual: Tensor, before: Tensor, added: Tensor, *others: Tensor) -> None:
    """`actual` is `before` plus the sum of the rows of `added`, within the error of fp32. The others have its bits."""
    expected = before.double() + added.double().sum(0)
    size = before.double().abs() + added.double().abs().sum(0)
    assert ((actual.double() - expected).abs() <= 1e-6 * size).all()
    assert all(torch.equal(actual, other) for other in others)


def compare_bias(device: str, dtype: torch.dtype) -> None:
    from rollgraph.model.kernels.pointwise import add_rows, sum_blocks

    for rows in ROWS:
        for columns in COLUMNS:
            x = torch.randn(rows, columns).to(device, dtype)
            before = torch.randn(columns, device=device)
            totals = [before.clone(), before.clone()]
            for total in totals:
                add_rows(total, sum_blocks(x))
            check(totals[0], before, x, totals[1])
            transposed = x.t().contiguous().t()  # its rows are not contiguous
            total = before.clone()
            add_rows(total, sum_blocks(transposed))
            assert torch.equal(total, totals[0])


def compare_partial_sums(device: str) -> None:
    """Rows that are slices of longer ones, added to a slice of a buffer: nothing beside it changes."""
    from rollgraph.model.kernels.pointwise import add_rows

    for rows in (1, 255, 600):
        for columns in COLUMNS:
            both = torch.randn(rows, 2, columns, device=device)
            buffer = torch.randn(columns + 8, device=device)
            before = buffer.clone()
            add_rows(buffer[3 : columns + 3], both[:, 1])
            check(buffer[3 : columns + 3], before[3 : columns + 3], both[:, 1])
            assert torch.equal(buffer[:3], before[:3])
            assert torch.equal(buffer[columns + 3 :], before[columns + 3 :])


def check_captured(device: str) -> None:
    """A capture rolls back the additions of its warm-up, and each replay adds once."""
    from rollgraph.model.kernels.pointwise import add_rows

    total = torch.ones(5, device=device)

    def step(partials: Tensor) -> None:
        add_rows(total, partials)

    partials = torch.ones(300, 5, device=device)
    graph = capture(step, (partials,), backend="tape" if device == "cpu" else "cuda")
    assert total.tolist() == [1.0] * 5
    for scale in (1, 2):
        graph(scale * partials)
    assert total.tolist() == [901.0] * 5


def compare_all(device: str) -> None:
    torch.manual_seed(0)
    compare_bias(device, torch.bfloat16)
    compare_partial_sums(device)
    check_captured(device)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(compare_all)


@pytest.mark.gpu
def test_kernels_on_cuda() -> None:
    compare_all("cuda")


def direct_sums_of(outputs: Sequence[Tensor], weights: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The direct sums of these weights after a backward."""
    buffers: dict[Tensor, Tensor] = {weight: torch.zeros(weight.shape, device="cuda") for weight in weights}
    with direct_sums(buffers) as sums:
        for weight, gradient in zip(weights, torch.autograd.grad(outputs, weights, upstream), strict=True):
            added = buffers[weight].clone()
            sums[weight].add(gradient)
            assert torch.equal(buffers[weight], added)  # autograd got only a stand-in
    return list(buffers.values())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_norms_add_the_gradients_of_their_weights_in_fp32(rows: int) -> None:
    stream, update, weight, d_out = (torch.randn(n, 96).to("cuda", torch.bfloat16) for n in (rows, rows, 1, rows))
    weight = weight[0].clone().requires_grad_()
    out, summed = add_norm(stream, update, weight, 1e-5)
    (total,) = direct_sums_of([out], [weight], [d_out])
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(norm(summed.detach().double(), wide, 1e-5), [wide], d_out.double())
    assert (total.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 3000])
def test_norms_of_heads_add_the_gradients_of_their_weights_in_fp32(tokens: int) -> None:
    from rollgraph.model.kernels.heads import SplitHeads

    heads, kv_heads, dim = 3, 1, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to("cuda", torch.bfloat16)
    weights = [torch.randn(dim).to("cuda", torch.bfloat16).requires_grad_() for _ in range(2)]
    cos, sin = (x.cuda() for x in rotary_angles(torch.arange(tokens), torch.rand(dim // 2), 1.0))
    outputs = SplitHeads.apply(qkv, cos, sin, *weights, 1e-5, heads, kv_heads)
    upstream = [torch.randn_like(output) for output in outputs]
    totals = direct_sums_of(outputs, weights, upstream)
    wide = [weight.detach().double().requires_grad_() for weight in weights]
    q, k, _ = qkv.double().view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
    plain = [rotate(norm(x, weight, 1e-5), cos, sin) for x, weight in zip((q, k), wide, strict=True)]
    expected = torch.autograd.grad(plain, wide, [x.double() for x in upstream[:2]])
    for total, exact in zip(totals, expected, strict=True):
        assert (total.double() - exact).norm() <= 1e-5 * exact.norm()
