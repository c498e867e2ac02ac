"""Ranks of a tensor parallel group as threads of one process, which start quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from rollgraph.model.tensor_parallel import TensorParallelGroup

Result = TypeVar("Result")
_PATIENCE = 60.0  # seconds that a rank waits for the others


class _Meeting:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        self._tensors[rank] = tensor
        self._barrier.wait(_PATIENCE)
        gathered = torch.stack(self._tensors)
        self._barrier.wait(_PATIENCE)
        return gathered

    def give_up(self) -> None:
        self._barrier.abort()


def run_group(size: int, function: Callable[[TensorParallelGroup], Result]) -> list[Result]:
    """The results of `function(group)`, one for each rank."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        group = TensorParallelGroup(
            rank,
            size,
            lambda tensor: meeting.exchange(rank, tensor),
            lambda rows: meeting.exchange(rank, rows)[:, rank],
        )
        try:
            return function(group)
        except BaseException:
            meeting.give_up()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def mirrored_group() -> TensorParallelGroup:
    """A group of two with an imaginary second rank, whose tensors are half of the first rank's."""
    return TensorParallelGroup(0, 2, lambda tensor: torch.stack((tensor, tensor * 0.5)), lambda rows: rows)
