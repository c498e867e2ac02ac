"""Which process this is and which device it owns: one value that is passed around, never a global."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.distributed.liveness import Liveness
from rollgraph.errors import UserError


class SharedGPU(UserError):
    """Ranks would share a GPU, where NCCL cannot connect them."""


@dataclass(frozen=True)
class World:
    """One process among `size`, with its device, e.g. World(rank=1, size=4, device="cuda:1").

    `group` is its process group; None means the default group of torch.distributed. `liveness` knows which other ranks
    are alive; if it is None, the first user that communicates with them creates one. `local_rank` counts the processes
    of one machine. `attempt` counts from 0 how often all ranks were started for the same run. If it is `staged`, ranks
    exchange tensors of their device through host memory, as they have to where they share a GPU.
    """

    rank: int
    size: int
    device: str
    group: Any = None
    liveness: Liveness | None = None
    local_rank: int = 0
    attempt: int = 0
    staged: bool = False

    @classmethod
    def current(cls, environ: Mapping[str, str] = os.environ) -> World:
        """This process as `torchrun` describes it in the environment; without `torchrun`, the only process."""
        rank = int(environ.get("RANK", 0))
        size = int(environ.get("WORLD_SIZE", 1))
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not within WORLD_SIZE={size}")
        local_rank = int(environ.get("LOCAL_RANK", 0))
        return cls(rank, size, own_device(local_rank), local_rank=local_rank)

    def sharing_data(self, tensor_parallel: int) -> World:
        """This rank among those that divide the data, where each so many ranks have the same samples.

        It says who has which data. It is no process group: `sharding/rank_grid.py` makes those.
        """
        return replace(self, rank=self.rank // tensor_parallel, size=self.size // tensor_parallel)

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Tell the other ranks what this one is doing, should it be lost meanwhile."""
        if self.liveness is None:
            yield
            return
        before = self.liveness.phase
        self.liveness.enter_phase(phase)
        yield  # not in a `finally`: after an exception, the phase it came from is the one to name
        self.liveness.enter_phase(before)


def own_device(local_rank: int) -> str:
    """The GPU of a process, if there are GPUs. Where there are fewer than processes, these share them in turn."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def check_own_gpu(local_rank: int) -> None:
    """Raise if another process of this machine has the same GPU as this one, and it may not."""
    import torch

    count = torch.cuda.device_count()
    if local_rank >= count > 0:
        raise SharedGPU(
            f"{local_rank + 1} ranks or more were started on a machine with {count} GPU{'s'[: count > 1]}: start one "
            "for each GPU, or set ranks.backend: gloo, which lets ranks share a GPU and is slow"
        )
