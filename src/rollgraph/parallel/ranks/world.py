"""Which rank this process is and which device it uses: one value that is passed around, never a global."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.errors import UserError
from rollgraph.parallel.ranks.liveness import Liveness


class SharedGPU(UserError):
    """Ranks would share a GPU, which NCCL does not support."""


@dataclass(frozen=True)
class World:
    """One process among `size`, with its device, e.g. World(rank=1, size=4, device="cuda:1").

    `group` is its process group; None means the default group of torch.distributed. `liveness` knows which other ranks
    are alive; if it is None, the first user that communicates creates one. `local_rank` counts the processes of one
    machine. `attempt` counts from 0 how often all ranks were started for the same run. If `staged`, collectives pass
    through host memory, as they have to where ranks share a GPU.

    A world may describe all ranks or one group of them: see `RankGrid`, whose `data` and `tensor` are worlds, too.
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
        """This process as the variables of `torchrun` describe it; without them, a single process."""
        rank = int(environ.get("RANK", 0))
        size = int(environ.get("WORLD_SIZE", 1))
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not within WORLD_SIZE={size}")
        local_rank = int(environ.get("LOCAL_RANK", 0))
        return cls(rank, size, local_device(local_rank), local_rank=local_rank)

    def data_parallel_world(self, tensor_parallel: int) -> World:
        """This rank and the number of ranks along the data parallel dimension.

        It only says which rank has which samples. The process groups are made in `parallel/tensor/peers.py`.
        """
        return replace(self, rank=self.rank // tensor_parallel, size=self.size // tensor_parallel)

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Tell the other ranks the phase of this one, for the report if it is lost."""
        if self.liveness is None:
            yield
            return
        before = self.liveness.phase
        self.liveness.enter_phase(phase)
        yield  # not in a `finally`: after an exception, the report should name the phase that raised it
        self.liveness.enter_phase(before)


def local_device(local_rank: int) -> str:
    """The device of a process: its GPU, if there are GPUs. If there are fewer GPUs than processes, these share them."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def check_exclusive_gpu(local_rank: int) -> None:
    """Raise if this process would share its GPU with another process of this machine."""
    import torch

    count = torch.cuda.device_count()
    if local_rank >= count > 0:
        raise SharedGPU(
            f"{local_rank + 1} ranks or more were started on a machine with {count} GPU{'s'[: count > 1]}: start one "
            "for each GPU, or set ranks.backend: gloo, which lets ranks share a GPU and is slow"
        )
