"""The world: which process this is and which device it owns, as one value that is passed, never global."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.distributed.liveness import Liveness


@dataclass(frozen=True)
class World:
    """One process among `size`, with its device, e.g. World(rank=1, size=4, device="cuda:1").

    `group` is the process group it talks in; None is the default group of torch.distributed. `liveness` knows which
    of the others are there; None leaves it to who talks to them to make one.
    """

    rank: int
    size: int
    device: str
    group: Any = None
    liveness: Liveness | None = None

    @classmethod
    def current(cls, environ: Mapping[str, str] = os.environ) -> World:
        """This process as `torchrun` describes it, or the only one there is."""
        import torch

        rank, size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not within WORLD_SIZE={size}")
        if not torch.cuda.is_available():
            return cls(rank, size, "cpu")
        return cls(rank, size, f"cuda:{environ.get('LOCAL_RANK', 0)}")
