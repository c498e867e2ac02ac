"""Which process this is and which device it owns: one value that is passed around, never a global."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.distributed.liveness import Liveness


@dataclass(frozen=True)
class World:
    """One process among `size`, with its device, e.g. World(rank=1, size=4, device="cuda:1").

    `group` is its process group; None means the default group of torch.distributed. `liveness` knows which other ranks
    are alive; if it is None, the first user that communicates with them creates one. `local_rank` counts the processes
    of one machine.
    """

    rank: int
    size: int
    device: str
    group: Any = None
    liveness: Liveness | None = None
    local_rank: int = 0

    @classmethod
    def current(cls, environ: Mapping[str, str] = os.environ) -> World:
        """This process as `torchrun` describes it in the environment; without `torchrun`, the only process."""
        import torch

        rank = int(environ.get("RANK", 0))
        size = int(environ.get("WORLD_SIZE", 1))
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not within WORLD_SIZE={size}")
        local_rank = int(environ.get("LOCAL_RANK", 0))
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
        return cls(rank, size, device, local_rank=local_rank)
