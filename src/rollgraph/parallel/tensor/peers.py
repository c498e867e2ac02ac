"""The grid of data and tensor parallel ranks, and this rank's tensor parallel group."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import BucketPlan
from rollgraph.parallel.data.collectives import Collectives, make_liveness
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.pieces import TensorParallelShard

# -- the grid --------------------------------------------------------------------------------------
# rank 0   rank 1        with tensor_parallel 2: 0 and 1 have the two halves of each layer and the same samples,
#     rank 2   rank 3        0 and 2 have the same half and different samples
#
# A row is a tensor parallel group, a column a data parallel group. Owns their process groups. The ranks of a row should
# be on one machine, so they are consecutive.


@dataclass(frozen=True)
class RankGrid:
    """One rank in the grid: among all ranks, in its data parallel group, and in its tensor parallel group, if any."""

    world: World
    data: World
    tensor: World | None = None


def make_grid(world: World, tensor_parallel: int) -> RankGrid:
    """Create the process groups; none without tensor parallelism. All ranks call this together, once per attempt."""
    if tensor_parallel == 1:
        return RankGrid(world, world)
    if world.size % tensor_parallel:
        raise ValueError(f"{world.size} ranks cannot form tensor parallel groups of {tensor_parallel}")
    liveness = world.liveness or make_liveness(world)  # one for all ranks, who save together
    all_ranks = replace(world, liveness=liveness)
    rows = world.size // tensor_parallel
    row, column = divmod(world.rank, tensor_parallel)
    ranks = list(range(world.size))
    make = partial(_make_group, timeout=liveness.timeout)
    row_groups = [make(ranks[i * tensor_parallel : (i + 1) * tensor_parallel]) for i in range(rows)]
    column_groups = [make(ranks[i::tensor_parallel]) for i in range(tensor_parallel)]
    data = replace(all_ranks, rank=row, size=rows, group=column_groups[column])
    tensor = replace(all_ranks, rank=column, size=tensor_parallel, group=row_groups[row])
    if world.liveness is None:
        weakref.finalize(tensor, liveness.close)
    return RankGrid(all_ranks, data, tensor)


def _make_group(ranks: list[int], timeout: float) -> Any:
    """A group, possibly without this rank: all ranks create all groups, in the same order."""
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout))


# -- peers -----------------------------------------------------------------------------------------
# A parameter of this rank is a tensor parallel shard of the full one, or replicated on all ranks of the group. Then one
# of them counts it, in the gradient norm and in a checkpoint.


class TensorPeers:
    """This rank in its tensor parallel group. `shards` has this rank's shard of each parameter, by name."""

    def __init__(self, world: World, collectives: Collectives, shards: Mapping[str, TensorParallelShard]) -> None:
        self.rank = world.rank
        self.size = world.size
        self.collectives = collectives
        self.shards = shards

    def sum(self, value: Tensor, what: str) -> Tensor:
        """The sum of a scalar over the ranks of the group, in their order."""
        return self.collectives.sum(value, what)

    def broadcast_text(self, text: str) -> None:
        """Send a text to the peers, each of which calls `receive_text`. The first rank of the group calls this."""
        self.collectives.all_gather_text(text, counts_as_progress=False)

    def receive_text(self) -> str:
        """The text that the first rank of the group sends. Other groups may send more or fewer texts."""
        return self.collectives.all_gather_text("", counts_as_progress=False)[0]

    def exchange_columns(self, texts: list[str]) -> list[str]:
        """The texts of all ranks, in their order, from those of the ranks that have the same shards as this one."""
        columns = [json.loads(column) for column in self.collectives.all_gather_text(json.dumps(texts))]
        return [text for row in zip(*columns, strict=True) for text in row]

    def saves(self, name: str) -> bool:
        """Whether this rank writes its shard of a parameter to checkpoints."""
        return any(self.shards[name].counted)

    def counted_spans(self, plan: BucketPlan, rank: int) -> Iterator[tuple[int, int]]:
        """Spans of elements, in a data parallel shard of a bucket, that this rank counts and no peer does."""
        first = rank * plan.shard_numel
        for slot, start, end in plan.owned(rank):
            offset = first - slot.start  # from an index in the bucket's shard to one in the parameter
            for low, high in self.shards[slot.parameter.name].counted_spans():
                begin = max(start, low - offset)
                stop = min(end, high - offset)
                if begin < stop:
                    yield begin, stop
