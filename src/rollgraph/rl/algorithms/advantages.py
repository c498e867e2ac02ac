"""Advantages: how a reward compares with others. Plain functions on numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollgraph.types import Rollout

EPSILON = 1e-6  # added to a standard deviation before it divides


def per_group(
    rollouts: Sequence[Rollout], rewards: Sequence[float], function: Callable[[list[float]], list[float]]
) -> list[float]:
    """Apply `function` to the rewards of each group separately; the results are in the order of the rollouts."""
    places: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        places.setdefault(rollout.group, []).append(place)
    advantages = [0.0] * len(rollouts)
    for group in places.values():
        values = function([rewards[place] for place in group])
        for place, value in zip(group, values, strict=True):
            advantages[place] = value
    return advantages


def centred(rewards: Sequence[float]) -> list[float]:
    """reward - mean; exactly 0 if all rewards are equal, as with a single one."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def normalized(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / standard deviation of the sample."""
    differences = centred(rewards)
    variance = math.fsum(d * d for d in differences) / max(1, len(rewards) - 1)
    return [d / (math.sqrt(variance) + EPSILON) for d in differences]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the other rewards."""
    others = max(1, len(rewards) - 1)
    return [d * len(rewards) / others for d in centred(rewards)]


def whitened(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """(value - mean) / standard deviation, with value i counted `counts[i]` times."""
    total = sum(counts)
    if not total or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(v * n for v, n in zip(values, counts, strict=True)) / total
    variance = math.fsum((v - mean) ** 2 * n for v, n in zip(values, counts, strict=True)) / total
    return [(v - mean) / (math.sqrt(variance) + EPSILON) for v in values]
