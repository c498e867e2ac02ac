"""The ranks that divide each layer with this one, as the shards of its parameters see them.

A parameter of this rank is a piece of a whole one, or the same on all of these ranks. Then one of them counts it: in
the norm of all gradients, and in a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from torch import Tensor

from rollgraph.distributed.pieces import ParameterPiece
from rollgraph.distributed.world import World
from rollgraph.sharding.bucket_plan import BucketPlan
from rollgraph.sharding.collectives import Collectives


class TensorPeers:
    """This rank among its peers. `pieces` says by name which piece of each parameter it has."""

    def __init__(self, world: World, collectives: Collectives, pieces: Mapping[str, ParameterPiece]) -> None:
        self.rank = world.rank
        self.size = world.size
        self.collectives = collectives
        self.pieces = pieces

    def sum(self, value: Tensor, what: str) -> Tensor:
        """The sum of a scalar over the peers, in their order."""
        return self.collectives.sum(value, what)

    def send_from_first(self, text: str) -> None:
        """Give a text to the peers, each of which calls `take_from_first`. The first of them does this."""
        self.collectives.all_gather_text(text, counts=False)

    def take_from_first(self) -> str:
        """The text that the first of the peers sends. Other groups may send more or fewer of them."""
        return self.collectives.all_gather_text("", counts=False)[0]

    def exchange_columns(self, texts: list[str]) -> list[str]:
        """From the texts of the ranks that have the same pieces as this one, those of all ranks, in their order."""
        columns = [json.loads(column) for column in self.collectives.all_gather_text(json.dumps(texts))]
        return [text for row in zip(*columns, strict=True) for text in row]

    def saves(self, name: str) -> bool:
        """Whether this rank writes its piece of a parameter to checkpoints."""
        return any(self.pieces[name].counted)

    def counted_spans(self, plan: BucketPlan, rank: int) -> Iterator[tuple[int, int]]:
        """The elements of a shard of a bucket that no other peer counts."""
        first = rank * plan.shard_numel
        for slot, start, end in plan.owned(rank):
            offset = first - slot.start  # from a place in the shard to one in the parameter
            for low, high in self.pieces[slot.parameter.name].counted_spans():
                begin = max(start, low - offset)
                stop = min(end, high - offset)
                if begin < stop:
                    yield begin, stop
