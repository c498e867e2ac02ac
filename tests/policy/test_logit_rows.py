"""Logit rows are gathered and scattered without arithmetic, in forward and backward."""

from __future__ import annotations

import torch

from rollgraph.policy.score_graphs import gather_rows, scatter_rows

ROWS = torch.tensor([4, 1, 6])


def test_the_gradient_of_gathered_rows_goes_only_to_them() -> None:
    values = torch.randn(7, 3, requires_grad=True)
    d_gathered = torch.randn(3, 3)
    gathered = gather_rows(values, ROWS)
    assert torch.equal(gathered, values[ROWS])
    gathered.backward(d_gathered)
    expected = torch.zeros(7, 3)
    expected[ROWS] = d_gathered
    assert values.grad is not None
    assert torch.equal(values.grad, expected)


def test_scatter_leaves_other_rows_zero_and_without_gradient() -> None:
    values = torch.tensor([-1.5, float("-inf"), 2.0], requires_grad=True)
    scattered = scatter_rows(values, ROWS, 7)
    assert scattered.tolist() == [0.0, float("-inf"), 0.0, 0.0, -1.5, 0.0, 2.0]
    scattered.backward(torch.arange(7.0))
    assert values.grad is not None
    assert values.grad.tolist() == [4.0, 1.0, 6.0]


def test_gather_and_scatter_have_the_right_derivatives() -> None:
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def squares(values: torch.Tensor) -> torch.Tensor:
        return scatter_rows(gather_rows(values, ROWS[:2]).square(), ROWS[:2], 6)

    assert torch.autograd.gradcheck(squares, (values,))
