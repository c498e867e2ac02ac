"""The kernels that add up gradients, against sums in float64: at any number of rows, and the same bits each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollgraph.graph import capture
from tests.interpreter import run_interpreted

ROWS = (1, 7, 128, 129, 300)  # a part of a block, a whole one, and several
COLUMNS = (1, 16, 130)


def check(found: Tensor, before: Tensor, added: Tensor, *others: Tensor) -> None:
    """`found` is `before` plus the sum of the rows of `added`, within the error of fp32. The others have its bits."""
    expected = before.double() + added.double().sum(0)
    size = before.double().abs() + added.double().abs().sum(0)
    assert ((found.double() - expected).abs() <= 1e-6 * size).all()
    assert all(torch.equal(found, other) for other in others)


def compare_bias(device: str, dtype: torch.dtype) -> None:
    from rollgraph.model.sum_kernels import add_rows, sum_blocks

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
    """Rows that are pieces of longer ones, added to a piece of a buffer: nothing beside it changes."""
    from rollgraph.model.sum_kernels import add_rows

    for rows in (1, 255, 600):
        for columns in COLUMNS:
            both = torch.randn(rows, 2, columns, device=device)
            buffer = torch.randn(columns + 8, device=device)
            before = buffer.clone()
            add_rows(buffer[3 : columns + 3], both[:, 1])
            check(buffer[3 : columns + 3], before[3 : columns + 3], both[:, 1])
            assert torch.equal(buffer[:3], before[:3])
            assert torch.equal(buffer[columns + 3 :], before[columns + 3 :])


def compare_all(device: str) -> None:
    torch.manual_seed(0)
    compare_bias(device, torch.bfloat16)
    compare_partial_sums(device)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(compare_all)


@pytest.mark.gpu
def test_kernels_on_cuda() -> None:
    compare_all("cuda")


@pytest.mark.gpu
def test_a_capture_takes_back_what_its_warm_up_adds_and_each_replay_adds_once() -> None:
    from rollgraph.model.sum_kernels import add_rows, sum_blocks

    total = torch.ones(5, device="cuda")

    def step(x: Tensor) -> None:
        add_rows(total, sum_blocks(x))

    x = torch.ones(300, 5, device="cuda", dtype=torch.bfloat16)
    graph = capture(step, (x,), backend="cuda")
    assert total.tolist() == [1.0] * 5
    for scale in (1, 2):
        graph(scale * x)
    assert total.tolist() == [901.0] * 5
