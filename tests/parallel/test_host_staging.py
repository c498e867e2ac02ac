"""Staged collectives have the results of direct ones, whatever happens to their tensors meanwhile.

A CPU makes the same copies as a GPU, so most of these tests need no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.parallel.data.collectives import Collectives, HostStaging
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers, make_grid
from rollgraph.policy.score_graphs import resolve_backend
from tests.parallel.worlds import run_world

ENTRIES = 1 << 20  # of a shard: large enough that a copy takes a while
ROUNDS = 20


def on_device(world: World, device: str, staged: bool) -> World:
    if device != "cpu":
        torch.cuda.set_device(device)
    return replace(world, device=device, staged=staged)


def run_all_collectives(alone: World, device: str, staged: bool) -> dict[str, Any]:
    """The result of each collective."""
    world = on_device(alone, device, staged)
    results: dict[str, Any] = {}
    mine = torch.arange(6.0, device=device) + 10 * world.rank
    for reduction in ("library", "ordered"):
        collectives = Collectives(world, reduction)  # type: ignore[arg-type]
        full = torch.zeros(6, device=device)
        shard = full[3 * world.rank : 3 * world.rank + 3]
        shard.copy_(mine[:3])
        collectives.gather(full, shard, "gather").complete()
        results[f"gather {reduction}"] = full.tolist()
        for accumulate in (False, True):
            total = torch.full((3,), 0.5, device=device)
            thirds = (mine.cpu() / 3).to(device)  # a GPU multiplies by 1/3 instead, which rounds differently
            collectives.reduce(thirds, total, "reduce", accumulate=accumulate).complete()
            results[f"reduce {reduction} {accumulate}"] = total.tolist()
        results[f"sum {reduction}"] = collectives.sum(mine[1]).item()
        results[f"texts {reduction}"] = collectives.all_gather_text("é" * world.rank)
    grid = make_grid(replace(world, liveness=collectives.liveness), 2)
    assert grid.tensor is not None
    row = Collectives(grid.tensor)
    assert row.staged == staged
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        rows = mine.view(2, 3).to(dtype)
        results[f"inside {dtype}"] = row.all_gather_in_layer(rows).tolist(), row.all_to_all_in_layer(rows).tolist()
    return results


@pytest.mark.multi
def test_staged_collectives_equal_direct_ones(tmp_path: Path) -> None:
    staged = run_world(2, tmp_path, run_all_collectives, "cpu", True)
    assert isinstance(staged[0], dict), staged[0]
    assert staged == run_world(2, tmp_path, run_all_collectives, "cpu", False)


@pytest.mark.multi
@pytest.mark.gpu
def test_staged_collectives_on_one_gpu_equal_those_on_cpus(tmp_path: Path) -> None:
    staged = run_world(2, tmp_path, run_all_collectives, "cuda:0", True, method="spawn")
    assert isinstance(staged[0], dict), staged[0]
    assert staged == run_world(2, tmp_path, run_all_collectives, "cpu", False)


def busy(device: str) -> Tensor:
    """Work that keeps a GPU busy for a while."""
    size = 64 if device == "cpu" else 4096
    product = torch.ones(size, size, device=device)
    for _ in range(20):
        product = product @ product / size
    return product


def overlap(alone: World, device: str) -> list[str]:
    """The wrong results of many gathers and reductions with other work between their starts and waits."""
    world = on_device(alone, device, True)
    collectives = Collectives(world, "ordered")
    peer = 1 - world.rank
    full = torch.zeros(2 * ENTRIES, device=device)
    shard = full[world.rank * ENTRIES :][:ENTRIES]
    gradients = torch.zeros(2 * ENTRIES, device=device)
    total = torch.zeros(ENTRIES, device=device)
    wrong: list[str] = []

    def check(what: str, tensor: Tensor, value: float) -> None:
        lowest, highest = tensor.min().item(), tensor.max().item()
        if not lowest == highest == value:
            wrong.append(f"{what}: {lowest} to {highest} instead of {value}")

    for number in range(ROUNDS):
        product = busy(device)
        shard.copy_(product.view(-1)[:1] * (100 * number + world.rank))  # after all of the work
        gather = collectives.gather(full, shard, f"gather {number}")
        gradients.copy_(product.view(-1)[:1] * (number + world.rank))
        reduction = collectives.reduce(gradients, total, f"reduce {number}")
        check(f"round {number}: before the wait", full[peer * ENTRIES :][:ENTRIES], max(0, 100 * (number - 1) + peer))
        gather.complete()
        gathered = full.clone()
        full[peer * ENTRIES :][:ENTRIES] = float(100 * number + peer)
        reduction.complete()
        gradients.zero_()
        check(f"round {number}: gathered", gathered[peer * ENTRIES :][:ENTRIES], 100 * number + peer)
        check(f"round {number}: own", gathered[world.rank * ENTRIES :][:ENTRIES], 100 * number + world.rank)
        check(f"round {number}: reduced", total, 2 * number + 1)
    return wrong


@pytest.mark.multi
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_work_between_start_and_wait_changes_nothing(device: str, tmp_path: Path) -> None:
    method = "forkserver" if device == "cpu" else "spawn"
    assert run_world(2, tmp_path, overlap, device, method=method) == [[], []]


def exchange_captured(alone: World) -> str:
    collectives = Collectives(on_device(alone, "cuda:0", True))
    mine = torch.ones(4, device="cuda:0")
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        collectives.all_gather_in_layer(mine)
    collectives.all_gather_text("all are here")  # before any of them leaves
    return str(raised.value)


@pytest.mark.multi
@pytest.mark.gpu
def test_a_cuda_graph_refuses_a_staged_collective(tmp_path: Path) -> None:
    for message in run_world(2, tmp_path, exchange_captured, method="spawn"):
        assert "a CUDA graph cannot contain an exchange through host memory" in message


def refuse_graphs(alone: World) -> list[str]:
    together = Collectives(alone)
    results = []
    for staged in (True, False):
        world = replace(on_device(alone, "cpu", staged), liveness=together.liveness)
        peers = TensorPeers(world, Collectives(world), {})
        for name in ("cuda", "eager"):
            try:
                results.append(resolve_backend(name, world, peers))  # type: ignore[arg-type]
            except ValueError as error:
                results.append(str(error))
    together.all_gather_text("all are here")  # before any of them leaves
    return results


@pytest.mark.multi
def test_cuda_graphs_around_staged_collectives_are_refused(tmp_path: Path) -> None:
    for refused, *others in run_world(2, tmp_path, refuse_graphs):
        assert refused.endswith("which no CUDA graph can contain: use backend='eager'")
        assert others == ["eager", "cuda", "eager"]


def test_a_staged_tensor_is_a_copy() -> None:
    tensor, output = torch.arange(4.0), torch.zeros(8)
    staging = HostStaging(output, tensor)
    tensor.zero_()
    assert staging.input.tolist() == [0, 1, 2, 3]
    staging.output.fill_(7)
    assert not output.any()
    staging.copy_back()
    assert output.tolist() == [7] * 8
