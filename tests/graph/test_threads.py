"""Threads that share a graph get their own results, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    GraphPool,
    make_graphed_callables,
)
from rollgraph.graph.errors import MemoryInUse
from tests.graph.comparisons import doubles
from tests.graph.refusals import BOTH, graph


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads that start together; raise the first exception of any of them."""
    barrier, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


def powers(x: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(5):
        x = x @ x
    return x, x > 0


@BOTH
def test_threads_that_replay_one_graph_get_their_own_results_or_an_error(
    backend: str, device: torch.device, how: str
) -> None:
    right, wrong = [], []

    def work(index: int) -> None:
        x = torch.eye(64, dtype=torch.float64, device=device) * (1 + index / 10)
        with torch.no_grad():
            expected = powers(x)[0]
            for _ in range(25):
                try:
                    y, positive = graphed(x)
                except MemoryInUse:
                    continue
                same = torch.equal(y, expected) and torch.equal(positive, expected > 0)
                (right if same else wrong).append(index)
                del y, positive

    with torch.no_grad():
        graphed = graph(how, powers, torch.eye(64, dtype=torch.float64), backend=backend)
    in_threads(4, work)
    assert right
    assert wrong == []


@BOTH
def test_threads_that_take_turns_and_keep_clones_get_correct_results(
    backend: str, device: torch.device, how: str
) -> None:
    turn, right = threading.Lock(), []

    def work(index: int) -> None:
        x = torch.eye(64, dtype=torch.float64, device=device) * (1 + index / 10)
        with torch.no_grad():
            expected = powers(x)[0]
            for _ in range(10):
                with turn:
                    y = graphed(x)[0].clone()
                right.append(torch.equal(y, expected))

    with torch.no_grad():
        graphed = graph(how, powers, torch.eye(64, dtype=torch.float64), backend=backend)
    in_threads(3, work)
    assert right == [True] * 30


@BOTH
def test_an_output_that_another_thread_refers_to_is_not_overwritten(
    backend: str, device: torch.device, how: str
) -> None:
    pool = GraphPool()
    with torch.no_grad():
        double, triple = (graph(how, lambda x, n=n: x * n, torch.zeros(3), pool=pool, backend=backend) for n in (2, 3))
        ones = torch.ones(3)
        kept = double(ones)
    results: list[list[float]] = []

    @torch.no_grad()
    def work(index: int) -> None:
        results.append(double(ones).tolist())
        results.append(triple(ones).tolist())

    with pytest.raises(MemoryInUse, match="used by two threads"):
        in_threads(1, work)
    assert kept.tolist() == [2.0] * 3
    del kept
    in_threads(1, work)
    assert results == [[2.0] * 3, [3.0] * 3]


def test_training_one_graph_in_two_threads_is_refused_or_correct(backend: str, device: torch.device) -> None:
    module = nn.Linear(3, 3).double()
    make_graphed_callables(module, (doubles(2, 3, grad=True),), backend=backend)
    held = module(doubles(2, 3))
    held.sum().backward()

    def train(index: int) -> None:
        module(torch.ones(2, 3, dtype=torch.float64, device=device)).sum().backward()

    with pytest.raises(MemoryInUse, match="used by two threads"):
        in_threads(1, train)
    del held
    module.zero_grad()
    in_threads(1, train)
    assert torch.equal(module.weight.grad, torch.full((3, 3), 2.0, dtype=torch.float64))
