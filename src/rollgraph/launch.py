"""Several processes: joining the others that `torchrun` started, and leaving them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollgraph.world import World


@contextmanager
def joined(world: World) -> Iterator[World]:
    """Inside, the ranks of the world can talk: gloo between CPUs, NCCL between GPUs."""
    if world.size == 1:
        yield world
        return
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    torch.distributed.init_process_group("nccl" if world.device.startswith("cuda") else "gloo")
    try:
        yield world
    finally:
        torch.distributed.destroy_process_group()
