"""The piece of a parameter that a rank holds, where ranks divide the layers of a model among themselves.

A value that models, shards and checkpoints agree on. Knows neither of them, and touches no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]  # from where to where


@dataclass(frozen=True)
class ParameterPiece:
    """Ranges of a parameter along one axis, one after the other: ((0, 2), (4, 6)) along axis 0 has rows 0, 1, 4 and 5.

    `counted` says of each range whether this rank counts it: several ranks may hold the same one, and one of them does.
    """

    whole: tuple[int, ...]  # the shape of the parameter
    axis: int
    ranges: tuple[Range, ...]
    counted: tuple[bool, ...]

    @classmethod
    def of_all(cls, whole: Sequence[int], counted: bool = True) -> ParameterPiece:
        """The whole parameter."""
        shape = tuple(whole) or (1,)
        return cls(shape, 0, ((0, shape[0]),), (counted,))

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.whole[self.axis]),)

    @property
    def shape(self) -> tuple[int, ...]:
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.whole[: self.axis], length, *self.whole[self.axis + 1 :])

    def counted_spans(self) -> list[Range]:
        """What this rank counts, in elements of the flattened piece. There is one span for ranges side by side."""
        if all(self.counted):
            return [(0, math.prod(self.shape))]
        if not any(self.counted):
            return []
        if self.axis != 0:
            raise ValueError("ranks can share some ranges of a parameter along its first axis alone")
        row = math.prod(self.whole[1:])
        spans: list[Range] = []
        end = 0
        for (start, stop), counted in zip(self.ranges, self.counted, strict=True):
            begin, end = end, end + (stop - start) * row
            if counted:
                spans.append((begin, end))
        return spans

    def to_json(self) -> list[Any]:
        """For the manifest of a checkpoint."""
        return [list(self.whole), self.axis, [list(span) for span in self.ranges]]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> ParameterPiece:
        whole, axis, ranges = content
        return cls(tuple(whole), axis, tuple((start, stop) for start, stop in ranges), (True,) * len(ranges))

    def holds_same(self, other: ParameterPiece) -> bool:
        """Whether two ranks hold the same elements."""
        return (self.whole, self.axis, self.ranges) == (other.whole, other.axis, other.ranges)
