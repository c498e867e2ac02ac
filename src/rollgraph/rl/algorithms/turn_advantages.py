"""Advantages turn by turn, from the rewards that an environment gave for each turn.

The return of turn t is what the rollout earned from t on: its whole reward minus the rewards of earlier turns, which
turn t could not change. Rewards for the rollout as a whole, of reward functions or for KL, are earned at its end. The
returns of turn t are compared like rewards, by the algorithm's own rule, among the rollouts that have a turn t. If all
rollouts have one turn, this is what the algorithm does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollgraph.rl.algorithms.batches import has_failed
from rollgraph.types import Batch, Rollout, Span

Advantages = Callable[[Sequence[Rollout], Sequence[float]], list[float]]


def turns_of(rollout: Rollout) -> list[Span]:
    """The parts that the policy wrote; a rollout without spans is one turn."""
    turns = [span for span in rollout.spans if span.kind == "turn"]
    return turns or [Span(0, len(rollout.tokens), "turn", rollout.text)]


def rewards_differ_by_turn(group: Sequence[Rollout]) -> bool:
    usable = [rollout for rollout in group if not has_failed(rollout)]
    return len({tuple(span.reward for span in turns_of(rollout)) for rollout in usable}) > 1


def returns_by_turn(rollout: Rollout, reward: float) -> list[float]:
    """What is earned from each turn on, of a reward that includes those of turns."""
    returns = []
    for turn in turns_of(rollout):
        returns.append(reward)
        reward -= turn.reward
    return returns


def set_advantages_by_turn(
    batch: Batch, rollouts: Sequence[Rollout], rewards: Mapping[int, float], compare: Advantages
) -> None:
    """Replace the advantages of all samples. `rewards` are those of rollouts that did not fail, by index."""
    returns = {index: returns_by_turn(rollouts[index], reward) for index, reward in rewards.items()}
    found: dict[int, list[float]] = {index: [0.0] * len(rollout.tokens) for index, rollout in enumerate(rollouts)}
    for number in range(max(map(len, returns.values()), default=0)):
        present = [index for index, each in returns.items() if len(each) > number]
        values = compare([rollouts[index] for index in present], [returns[index][number] for index in present])
        for index, value in zip(present, values, strict=True):
            turn = turns_of(rollouts[index])[number]
            found[index][turn.start : turn.end] = [value] * (turn.end - turn.start)
    for sample in batch.samples:
        assert sample.rollout is not None, "a sample of `build_batch` is of a rollout"
        values = found[sample.rollout]
        sample.advantages = [value if weight else 0.0 for value, weight in zip(values, sample.weights, strict=True)]
