"""All ranks as a grid: those of a row divide each layer among themselves, those of a column divide the data.

    rank 0   rank 1        with tensor_parallel 2: 0 and 1 have the two halves of each layer and the same samples,
    rank 2   rank 3        0 and 2 have the same half and other samples

Owns the process groups of rows and columns. Ranks of a row should be on one machine, so they follow one another.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from rollgraph.distributed.world import World
from rollgraph.sharding.collectives import watch_others


@dataclass(frozen=True)
class RankGrid:
    """Where one rank is: among all, among those that divide the data, and among those that divide layers, if any do."""

    world: World
    data: World
    tensor: World | None = None


def make_grid(world: World, tensor_parallel: int) -> RankGrid:
    """Make the process groups. All ranks call this together, once for each attempt; without division it makes none."""
    if tensor_parallel == 1:
        return RankGrid(world, world)
    if world.size % tensor_parallel:
        raise ValueError(f"{world.size} ranks cannot form groups of {tensor_parallel} that divide each layer")
    liveness = world.liveness or watch_others(world)  # of all ranks, who save together: a group would make its own
    everyone = replace(world, liveness=liveness)
    rows = world.size // tensor_parallel
    row, column = divmod(world.rank, tensor_parallel)
    ranks = list(range(world.size))
    make = partial(_make_group, timeout=liveness.timeout)
    in_rows = [make(ranks[i * tensor_parallel : (i + 1) * tensor_parallel]) for i in range(rows)]
    in_columns = [make(ranks[i::tensor_parallel]) for i in range(tensor_parallel)]
    data = replace(everyone, rank=row, size=rows, group=in_columns[column])
    tensor = replace(everyone, rank=column, size=tensor_parallel, group=in_rows[row])
    if world.liveness is None:
        weakref.finalize(tensor, liveness.close)
    return RankGrid(everyone, data, tensor)


def _make_group(ranks: list[int], timeout: float) -> Any:
    """A group that this rank may not be in: all ranks make all groups, in the same order."""
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout))
