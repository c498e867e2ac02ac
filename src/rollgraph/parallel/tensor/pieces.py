"""The tensor parallel shard of a parameter that a rank holds.

A value that models, data parallel sharding and checkpoints share. Knows none of them, and touches no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class TensorParallelShard:
    """Ranges of a parameter along one axis, concatenated: ((0, 2), (4, 6)) along axis 0 has rows 0, 1, 4 and 5.

    Several ranks may hold the same range, for example that of a key/value head. One of them counts it, in the gradient
    norm and in checkpoints: `counted` says for each range whether it is this rank.
    """

    full_shape: tuple[int, ...]  # the shape of the unsharded parameter
    axis: int
    ranges: tuple[Range, ...]
    counted: tuple[bool, ...]

    @classmethod
    def full(cls, full_shape: Sequence[int], counted: bool = True) -> TensorParallelShard:
        """The full parameter, as on every rank if it is replicated."""
        shape = tuple(full_shape) or (1,)
        return cls(shape, 0, ((0, shape[0]),), (counted,))

    @property
    def is_full(self) -> bool:
        return self.ranges == ((0, self.full_shape[self.axis]),)

    @property
    def shape(self) -> tuple[int, ...]:
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.full_shape[: self.axis], length, *self.full_shape[self.axis + 1 :])

    def counted_spans(self) -> list[Range]:
        """The spans that this rank counts, in elements of the flattened shard. A shard counted entirely is one span."""
        if all(self.counted):
            return [(0, math.prod(self.shape))]
        if not any(self.counted):
            return []
        if self.axis != 0:
            raise ValueError("ranks can share some ranges of a parameter only along its first axis")
        row = math.prod(self.full_shape[1:])
        spans: list[Range] = []
        end = 0
        for (start, stop), counted in zip(self.ranges, self.counted, strict=True):
            begin, end = end, end + (stop - start) * row
            if counted:
                spans.append((begin, end))
        return spans

    def to_json(self) -> list[Any]:
        """For the manifest of a checkpoint."""
        return [list(self.full_shape), self.axis, [list(span) for span in self.ranges]]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> TensorParallelShard:
        full_shape, axis, ranges = content
        return cls(tuple(full_shape), axis, tuple((start, stop) for start, stop in ranges), (True,) * len(ranges))

    def holds_same(self, shard: TensorParallelShard) -> bool:
        """Whether two ranks hold the same elements."""
        return (self.full_shape, self.axis, self.ranges) == (shard.full_shape, shard.axis, shard.ranges)
