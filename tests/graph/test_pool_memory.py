"""Memory of a pool besides its recordings: allocations that graphs overwrite, and memory that captures do not save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import CaptureError, GraphPool, capture
from rollgraph.graph.pool import pool_segments
from rollgraph.graph.state.transaction import Transaction


def test_a_capture_leaves_unsaved_memory_as_warm_up_left_it(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    unsaved, saved = torch.zeros(4), torch.zeros(4)
    pool.leave_unsaved(unsaved[1:])  # all of its storage

    def count() -> None:
        unsaved.add_(1)
        saved.add_(1)

    graph = capture(count, pool=pool, backend=backend, warmup=2)
    assert not saved.any()
    assert unsaved[0] >= 2
    before = unsaved[0].item()
    graph()
    assert (unsaved[0].item(), saved[0].item()) == (before + 1, 1)


def test_unsaved_memory_is_not_copied(backend: str, device: torch.device) -> None:
    large = torch.zeros(1000)
    pool = GraphPool()
    pool.leave_unsaved(large)
    with Transaction(unsaved=pool.arena.unsaved) as transaction, transaction.undo_log.run():
        large.add_(1)
    assert not list(transaction.undo_log.saved())


def test_allocated_memory_serves_graphs_that_are_captured_later(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    pool.reserve(1 << 22, device)
    x = torch.arange(6.0)
    first = capture(lambda: (x * 2).sum(), pool=pool, backend=backend)
    cache = pool.allocate((3, 6), torch.float32, device)
    assert not cache.any()
    row = torch.zeros((), dtype=torch.long)

    def write() -> None:
        cache.index_copy_(0, row[None], (x + row)[None])

    second = capture(write, pool=pool, backend=backend)
    for number in range(3):
        row.fill_(number)
        second()
    assert torch.equal(cache, x + torch.arange(3.0)[:, None])
    assert first() == 30
    pool.reset()
    assert not pool.arena.allocations
    assert not pool.arena.unsaved


def test_warm_up_in_the_pool_refuses_a_function_that_keeps_tensors(backend: str, device: torch.device) -> None:
    kept: list[Tensor] = []

    def lazy(x: Tensor) -> Tensor:
        if not kept:
            kept.append(x.new_ones(5))
        return x + kept[0]

    with pytest.raises(CaptureError, match="20 bytes that 'lazy' made in warm-up are still in use"):
        capture(lazy, (torch.zeros(5),), backend=backend, warmup_in_pool=True)
    graph = capture(lazy, (torch.zeros(5),), backend=backend, warmup_in_pool=True)  # the state is there now
    assert torch.equal(graph(torch.ones(5)), torch.full((5,), 2.0))


def test_warm_up_in_the_pool_refuses_a_function_that_makes_gradients(backend: str, device: torch.device) -> None:
    weight = torch.ones(3, requires_grad=True)

    def backward(x: Tensor) -> None:
        (weight * x).sum().backward()

    with pytest.raises(CaptureError, match="warmup_in_pool=False"):
        capture(backward, (torch.ones(3),), backend=backend, warmup_in_pool=True)
    assert weight.grad is None


# -- on a GPU --------------------------------------------------------------------------------------

SIDE = 2048  # a matrix of 16 MiB


def deep(x: Tensor) -> Tensor:
    """Needs about ten matrices at once."""
    products = [x @ x]
    for _ in range(9):
        products.append(products[-1] @ x)
    return torch.stack(products).sum()


def inside(tensor: Tensor, pool: GraphPool) -> bool:
    return any(start <= tensor.data_ptr() < start + size for start, size in pool_segments(pool.arena))


@pytest.mark.gpu
def test_allocations_reuse_memory_that_earlier_captures_left_free() -> None:
    device = torch.device("cuda:0")
    x = torch.randn(SIDE, SIDE, device=device) / SIDE
    matrix = x.nbytes
    pool = GraphPool()
    pool.reserve(8 * matrix, device)
    graph = capture(deep, (x,), pool=pool, warmup_in_pool=True)
    before = pool.memory_bytes()
    expected = graph(x).clone()
    tensors = [pool.allocate((SIDE, SIDE), torch.float32, device) for _ in range(8)]
    assert pool.memory_bytes() == before
    assert all(inside(tensor, pool) for tensor in tensors)
    for tensor in tensors:
        tensor.fill_(torch.nan)
    assert torch.equal(graph(x), expected)  # it writes before it reads
    assert any(not tensor.isnan().all() for tensor in tensors)  # and it did write there
    for tensor in tensors:
        tensor.fill_(3)
    later = capture(deep, (x,), pool=pool, warmup_in_pool=True)
    assert torch.equal(later(x), expected)
    assert all(bool((tensor == 3).all()) for tensor in tensors)  # a later graph has its memory elsewhere
    address = tensors[0].data_ptr()
    del tensors, tensor
    assert capture(deep, (x,), pool=pool, warmup_in_pool=True)(x) == expected
    assert pool.arena.allocations[0].data_ptr() == address  # the pool holds them


@pytest.mark.gpu
def test_warm_up_in_the_pool_needs_no_memory_beside_the_recording() -> None:
    device = torch.device("cuda:0")
    x = torch.randn(SIDE, SIDE, device=device) / SIDE
    peaks: dict[bool, int] = {}
    for in_pool in (False, True):
        torch.cuda.empty_cache()
        pool = GraphPool()
        capture(deep, (x,), pool=pool, warmup_in_pool=in_pool)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_reserved()
        capture(deep, (x,), pool=pool, warmup_in_pool=in_pool)  # again, in a pool that is large enough
        peaks[in_pool] = torch.cuda.max_memory_reserved() - start
        pool.reset()
    assert 4 * peaks[True] < 8 * x.nbytes < peaks[False]


@pytest.mark.gpu
def test_a_pool_that_is_reset_returns_its_memory() -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool: Any = GraphPool()
    pool.reserve(64 << 20, device)
    tensor = pool.allocate((16 << 20,), torch.uint8, device)
    assert torch.cuda.memory_reserved() >= before + (64 << 20)
    del tensor
    pool.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    pool.reserve(64 << 20, device)
    del pool  # without a reset
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
