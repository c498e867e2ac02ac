"""Functions that add to a tensor, as operations of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture
from rollgraph.model.sum_operators import sum_operator


@sum_operator
def add_first_row(total: Tensor, rows: Tensor) -> None:
    total.numpy()[:] += rows.numpy()[0]  # which PyTorch does not see


def test_a_capture_sees_the_sum_and_takes_back_what_warm_up_adds() -> None:
    total = torch.full((3,), 7.0)

    def step(rows: Tensor) -> None:
        add_first_row(total, rows)

    graph = capture(step, (torch.ones(2, 3),), pool=GraphPool())
    assert total.tolist() == [7.0, 7.0, 7.0]
    graph(torch.full((2, 3), 2.0))
    graph(torch.full((2, 3), 3.0))
    assert total.tolist() == [12.0, 12.0, 12.0]


def test_autograd_hears_of_the_write() -> None:
    total = torch.zeros(3)
    before = total._version
    add_first_row(total, torch.ones(1, 3))
    assert total._version > before
