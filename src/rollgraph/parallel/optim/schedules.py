"""Learning rate schedules: a factor of the learning rate for each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant() -> Schedule:
    return lambda step: 1.0


def linear(total: int, floor: float = 0.0) -> Schedule:
    """Linear decay from 1 to `floor` in `total` steps."""
    return lambda step: max(floor, 1.0 - (1.0 - floor) * min(step, total) / total)


def cosine(total: int, floor: float = 0.0) -> Schedule:
    """Cosine decay from 1 to `floor` in `total` steps."""
    return lambda step: floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(step, total) / total))


def warm_up(steps: int, then: Schedule) -> Schedule:
    """Linear warm-up from 0 in `steps` steps to the first value of the schedule `then`, which starts after it."""

    def schedule(step: int) -> float:
        if step < steps:
            return (step + 1) / (steps + 1) * then(0)
        return then(step - steps)

    return schedule
