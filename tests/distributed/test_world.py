"""World: which process this is, as the environment describes it."""

from __future__ import annotations

import pytest
import torch

from rollgraph.distributed.world import World


def test_current_reads_the_environment_of_torchrun() -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert World.current({}) == World(0, 1, device)
    assert World.current({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == World(1, 4, device)
    assert World.current({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).local_rank == 1


def test_a_rank_outside_of_the_world_size_is_refused() -> None:
    with pytest.raises(ValueError, match="RANK=4"):
        World.current({"RANK": "4", "WORLD_SIZE": "4"})
