"""Rows are taken out and put back without arithmetic, in forward and backward."""

from __future__ import annotations

import torch

from rollgraph.policy.score_graphs import gather_rows, scatter_rows

ROWS = torch.tensor([4, 1, 6])


def test_the_gradient_of_taken_rows_goes_to_them_alone() -> None:
    values = torch.randn(7, 3, requires_grad=True)
    for_taken = torch.randn(3, 3)
    taken = gather_rows(values, ROWS)
    assert torch.equal(taken, values[ROWS])
    taken.backward(for_taken)
    expected = torch.zeros(7, 3)
    expected[ROWS] = for_taken
    assert values.grad is not None
    assert torch.equal(values.grad, expected)


def test_rows_that_nobody_put_are_zero_and_get_no_gradient() -> None:
    values = torch.tensor([-1.5, float("-inf"), 2.0], requires_grad=True)
    put = scatter_rows(values, ROWS, 7)
    assert put.tolist() == [0.0, float("-inf"), 0.0, 0.0, -1.5, 0.0, 2.0]
    put.backward(torch.arange(7.0))
    assert values.grad is not None
    assert values.grad.tolist() == [4.0, 1.0, 6.0]


def test_taking_and_putting_has_the_right_derivatives() -> None:
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def squares(values: torch.Tensor) -> torch.Tensor:
        return scatter_rows(gather_rows(values, ROWS[:2]).square(), ROWS[:2], 6)

    assert torch.autograd.gradcheck(squares, (values,))
