"""Functions as operators of PyTorch: those that add to a tensor, and those that return one."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture
from rollgraph.model.operators import operator, sum_operator


@sum_operator
def add_first_row(total: Tensor, rows: Tensor) -> None:
    total.numpy()[:] += rows.numpy()[0]  # a write that PyTorch does not see


def test_a_capture_sees_the_sum_and_rolls_back_its_warm_up() -> None:
    total = torch.full((3,), 7.0)

    def step(rows: Tensor) -> None:
        add_first_row(total, rows)

    graph = capture(step, (torch.ones(2, 3),), pool=GraphPool())
    assert total.tolist() == [7.0, 7.0, 7.0]
    graph(torch.full((2, 3), 2.0))
    graph(torch.full((2, 3), 3.0))
    assert total.tolist() == [12.0, 12.0, 12.0]


def test_autograd_notices_the_write() -> None:
    total = torch.zeros(3)
    before = total._version
    add_first_row(total, torch.ones(1, 3))
    assert total._version > before


def shape_of_two(x: Tensor, factor: int) -> Tensor:
    return x.new_empty(2, *x.shape)


@operator(shaped=shape_of_two)
def multiplied_twice(x: Tensor, factor: int) -> Tensor:
    return torch.from_numpy(x.numpy() * factor).expand(2, -1).contiguous()


def test_a_tape_records_an_opaque_operator() -> None:
    graph = capture(lambda x: multiplied_twice(x, 3) + 1, (torch.zeros(2),), pool=GraphPool())
    assert graph(torch.tensor([1.0, 2.0])).tolist() == [[4.0, 7.0], [4.0, 7.0]]
    assert graph(torch.tensor([5.0, 0.0])).tolist() == [[16.0, 1.0], [16.0, 1.0]]


def test_an_operator_on_meta_tensors_returns_their_shape() -> None:
    result = multiplied_twice(torch.empty(5, device="meta"), 3)
    assert result.is_meta
    assert result.shape == (2, 5)


EXCHANGE = """
import sys, torch
from rollgraph.model.tensor_parallel import TensorParallelGroup

group = TensorParallelGroup(0, 2, lambda x: torch.stack((x, 2 * x)), lambda rows: rows)
x = torch.tensor([1.0, 2.0], requires_grad=True)
group.all_reduce(group.copy_to_ranks(x)).sum().backward()
print(group.all_reduce_no_grad(x.detach()).tolist(), x.grad.tolist(), "torch._dynamo" in sys.modules)
"""


def test_tensor_parallel_ranks_do_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", EXCHANGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[3.0, 6.0] [3.0, 3.0] False"
