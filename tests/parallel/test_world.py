"""World: which process this is, as the environment describes it."""

from __future__ import annotations

import pytest
import torch

from rollgraph.parallel.ranks.world import SharedGPU, World, check_exclusive_gpu, local_device


def test_current_reads_the_environment_of_torchrun() -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert World.current({}) == World(0, 1, device)
    assert World.current({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == World(1, 4, device)
    assert World.current({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).local_rank == 1


def test_a_rank_outside_of_the_world_size_is_refused() -> None:
    with pytest.raises(ValueError, match="RANK=4"):
        World.current({"RANK": "4", "WORLD_SIZE": "4"})


def test_ranks_share_gpus_in_turn_and_only_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [local_device(local_rank) for local_rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    check_exclusive_gpu(1)
    with pytest.raises(SharedGPU, match=r"3 ranks or more .* with 2 GPUs: .* or set ranks\.backend: gloo"):
        check_exclusive_gpu(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_exclusive_gpu(2)  # on CPUs
