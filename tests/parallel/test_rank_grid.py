"""The grid of tensor parallel groups (rows) and data parallel groups (columns), and lost ranks in it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.parallel.data.collectives import Collectives, CommunicationError
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers, make_grid
from tests.parallel.worlds import run_world, run_world_with_a_loss


def test_without_tensor_parallelism_all_ranks_are_data_parallel() -> None:
    world = World(1, 4, "cpu")
    grid = make_grid(world, 1)
    assert grid.data is grid.world is world
    assert grid.tensor is None


def test_ranks_must_fill_the_grid() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot form tensor parallel groups of 2"):
        make_grid(World(0, 3, "cpu"), 2)


def test_ranks_of_a_tensor_parallel_group_have_the_same_data() -> None:
    worlds = [World(rank, 6, "cpu").data_parallel_world(3) for rank in range(6)]
    assert [(world.rank, world.size) for world in worlds] == [(0, 2)] * 3 + [(1, 2)] * 3


def meet(world: World) -> dict[str, Any]:
    grid = make_grid(world, 2)
    assert grid.tensor is not None
    rows, columns = Collectives(grid.tensor), Collectives(grid.data)
    peers = TensorPeers(grid.tensor, rows, {})
    mine = torch.full((2, 3), float(world.rank))
    return {
        "places": (grid.data.rank, grid.data.size, grid.tensor.rank, grid.tensor.size),
        "row": rows.all_gather_in_layer(mine)[:, 0, 0].tolist(),
        "spread": rows.all_to_all_in_layer(10 * world.rank + torch.arange(4).view(2, 2)).tolist(),
        "column": columns.all_gather_text(str(world.rank)),
        "all": peers.exchange_columns(columns.all_gather_text(f"from {world.rank}")),
        "kinds": [rows.all_gather_in_layer(mine.to(dtype)).dtype is dtype for dtype in (torch.bfloat16, torch.int32)],
    }


@pytest.mark.multi
@pytest.mark.slow
def test_four_ranks_form_two_rows_of_two(tmp_path: Path) -> None:
    results = run_world(4, tmp_path, meet)
    assert [result["places"] for result in results] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert [result["row"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    spread = [result["spread"] for result in results]
    assert spread[:2] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    assert spread[2:] == [[[20, 21], [30, 31]], [[22, 23], [32, 33]]]
    assert [result["column"] for result in results] == [["0", "2"], ["1", "3"], ["0", "2"], ["1", "3"]]
    assert all(result["all"] == ["from 0", "from 1", "from 2", "from 3"] for result in results)
    assert all(all(result["kinds"]) for result in results)


def lose_rank_3(alone: World) -> str:
    all_ranks = Collectives(alone, timeout=60)
    world = replace(alone, liveness=all_ranks.liveness)
    grid = make_grid(world, 2)
    assert grid.tensor is not None
    rows = Collectives(grid.tensor)
    rows.all_gather_in_layer(torch.zeros(3))
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            rows.all_gather_in_layer(torch.zeros(3))
            all_ranks.sum(torch.zeros(()))  # the other row waits for the one that lost a rank
    except CommunicationError as error:
        return str(error)


@pytest.mark.multi
@pytest.mark.slow
def test_a_rank_lost_in_a_tensor_parallel_collective_is_named_by_all(tmp_path: Path) -> None:
    messages = run_world_with_a_loss(4, tmp_path, lose_rank_3)
    assert messages.keys() == {0, 1, 2}
    for rank, message in messages.items():
        assert message.startswith(f"rank {rank}: "), message
        assert "rank 3" in message
    assert "a tensor parallel collective failed" in messages[2]
