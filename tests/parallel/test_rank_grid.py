"""Rows and columns of ranks: who is in which group, and who is named if a rank is lost in an exchange."""

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


def test_without_division_there_is_one_row_for_each_rank() -> None:
    world = World(1, 4, "cpu")
    grid = make_grid(world, 1)
    assert grid.data is grid.world is world
    assert grid.tensor is None


def test_ranks_must_fill_the_grid() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot form tensor parallel groups of 2"):
        make_grid(World(0, 3, "cpu"), 2)


def test_groups_have_the_same_data() -> None:
    shares = [World(rank, 6, "cpu").data_parallel_world(3) for rank in range(6)]
    assert [(world.rank, world.size) for world in shares] == [(0, 2)] * 3 + [(1, 2)] * 3


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
def test_four_ranks_are_two_rows_of_two(tmp_path: Path) -> None:
    found = run_world(4, tmp_path, meet)
    assert [result["places"] for result in found] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert [result["row"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    spread = [result["spread"] for result in found]
    assert spread[:2] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    assert spread[2:] == [[[20, 21], [30, 31]], [[22, 23], [32, 33]]]
    assert [result["column"] for result in found] == [["0", "2"], ["1", "3"], ["0", "2"], ["1", "3"]]
    assert all(result["all"] == ["from 0", "from 1", "from 2", "from 3"] for result in found)
    assert all(all(result["kinds"]) for result in found)


def lose_the_last(alone: World) -> str:
    together = Collectives(alone, timeout=60)
    world = replace(alone, liveness=together.liveness)
    grid = make_grid(world, 2)
    assert grid.tensor is not None
    rows = Collectives(grid.tensor)
    rows.all_gather_in_layer(torch.zeros(3))
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            rows.all_gather_in_layer(torch.zeros(3))
            together.sum(torch.zeros(()))  # the other row meets the one that lost a rank
    except CommunicationError as error:
        return str(error)


@pytest.mark.multi
@pytest.mark.slow
def test_a_rank_that_is_lost_in_an_exchange_is_named_by_all(tmp_path: Path) -> None:
    found = run_world_with_a_loss(4, tmp_path, lose_the_last)
    assert found.keys() == {0, 1, 2}
    for rank, message in found.items():
        assert message.startswith(f"rank {rank}: "), message
        assert "rank 3" in message
    assert "a tensor parallel collective failed" in found[2]
