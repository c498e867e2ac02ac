"""Ranks of a tensor group as threads of one process, which is quick to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from rollgraph.model.tensor_parallel import TensorParallelGroup

Result = TypeVar("Result")
_PATIENCE = 60.0  # seconds until a rank that another one does not meet gives up


class _Meeting:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, mine: Tensor) -> Tensor:
        self._given[rank] = mine
        self._barrier.wait(_PATIENCE)
        gathered = torch.stack(self._given)
        self._barrier.wait(_PATIENCE)
        return gathered

    def give_up(self) -> None:
        self._barrier.abort()


def run_group(size: int, function: Callable[[TensorParallelGroup], Result]) -> list[Result]:
    """What `function(group)` returns on each rank."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        group = TensorParallelGroup(
            rank, size, lambda mine: meeting.exchange(rank, mine), lambda rows: meeting.exchange(rank, rows)[:, rank]
        )
        try:
            return function(group)
        except BaseException:
            meeting.give_up()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def mirrored_group() -> TensorParallelGroup:
    """A group of two whose other rank is imagined: it has half of what this one has."""
    return TensorParallelGroup(0, 2, lambda mine: torch.stack((mine, mine * 0.5)), lambda rows: rows)
