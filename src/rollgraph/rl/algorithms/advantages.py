"""Advantages: rewards compared within a group, or over a batch, for whole rollouts or for each turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rollgraph.rl.algorithms.batch import rollout_failed
from rollgraph.types import Batch, Rollout, Span

EPSILON = 1e-6  # added to a standard deviation before dividing by it


def per_group(
    rollouts: Sequence[Rollout], rewards: Sequence[float], function: Callable[[list[float]], list[float]]
) -> list[float]:
    """Apply `function` to the rewards of each group separately; returns advantages in the order of the rollouts."""
    groups: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(index)
    advantages = [0.0] * len(rollouts)
    for indices in groups.values():
        values = function([rewards[index] for index in indices])
        for index, value in zip(indices, values, strict=True):
            advantages[index] = value
    return advantages


def centered(rewards: Sequence[float]) -> list[float]:
    """reward - mean; exactly 0 if all rewards are equal, or if there is only one."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def normalized(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / sample standard deviation (n - 1)."""
    differences = centered(rewards)
    variance = math.fsum(d * d for d in differences) / max(1, len(rewards) - 1)
    return [d / (math.sqrt(variance) + EPSILON) for d in differences]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the other rewards."""
    other_count = max(1, len(rewards) - 1)
    return [d * len(rewards) / other_count for d in centered(rewards)]


def whitened(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """(value - mean) / standard deviation, with value i counted `counts[i]` times."""
    total = sum(counts)
    if not total or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(v * n for v, n in zip(values, counts, strict=True)) / total
    variance = math.fsum((v - mean) ** 2 * n for v, n in zip(values, counts, strict=True)) / total
    return [(v - mean) / (math.sqrt(variance) + EPSILON) for v in values]


# -- advantages of turns (reward_to_go) ------------------------------------------------------------
# The return of turn t is the whole reward of the rollout minus the rewards of earlier turns, which turn t could not
# change. Rewards of the whole rollout, from reward functions or KL, count as earned at its end. The algorithm computes
# advantages from the returns of turn t as from rewards, among the rollouts that have a turn t. With one turn per
# rollout, this changes nothing.

AdvantageFunction = Callable[[Sequence[Rollout], Sequence[float]], list[float]]


def turns_of(rollout: Rollout) -> list[Span]:
    """The spans that the policy wrote. A rollout without spans is one turn."""
    turns = [span for span in rollout.spans if span.kind == "turn"]
    return turns or [Span(0, len(rollout.tokens), "turn", rollout.text)]


def turn_rewards_differ(group: Sequence[Rollout]) -> bool:
    usable = [rollout for rollout in group if not rollout_failed(rollout)]
    return len({tuple(span.reward for span in turns_of(rollout)) for rollout in usable}) > 1


def turn_returns(rollout: Rollout, reward: float) -> list[float]:
    """The return of each turn: `reward`, which includes the rewards of turns, minus those of earlier turns.

    >>> turn_returns(rollout, 1.75)  # with the rewards 0.5, 0 and 0.25 for its turns
    [1.75, 1.25, 1.25]
    """
    returns = []
    for turn in turns_of(rollout):
        returns.append(reward)
        reward -= turn.reward
    return returns


def set_turn_advantages(
    batch: Batch, rollouts: Sequence[Rollout], rewards: Mapping[int, float], compute_advantages: AdvantageFunction
) -> None:
    """Compute advantages for each turn, and give every token of a turn the same one.

    The first turns of all rollouts are compared with each other, then the second turns, and so on. The value of a turn
    is the reward from that turn on. `rewards` has the rewards of rollouts that did not fail, by index; tokens of failed
    rollouts get 0.
    """
    returns = {index: turn_returns(rollouts[index], reward) for index, reward in rewards.items()}
    token_advantages: dict[int, list[float]] = {
        index: [0.0] * len(rollout.tokens) for index, rollout in enumerate(rollouts)
    }
    for turn_index in range(max(map(len, returns.values()), default=0)):
        indices = [index for index, returns_of_rollout in returns.items() if len(returns_of_rollout) > turn_index]
        values = compute_advantages(
            [rollouts[index] for index in indices], [returns[index][turn_index] for index in indices]
        )
        for index, value in zip(indices, values, strict=True):
            turn = turns_of(rollouts[index])[turn_index]
            token_advantages[index][turn.start : turn.end] = [value] * (turn.end - turn.start)
    for sample in batch.samples:
        assert sample.rollout is not None, "`build_batch` sets it"
        values = token_advantages[sample.rollout]
        sample.advantages = [value if weight else 0.0 for value, weight in zip(values, sample.weights, strict=True)]
