"""From rollouts to a batch: which tokens are trained on, which minibatch they go to, and how much they count."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rollgraph.types import Batch, Rollout, Sample

FAILED = frozenset({"error", "abort"})  # such a rollout says nothing about the policy


def has_failed(rollout: Rollout) -> bool:
    return rollout.finish_reason in FAILED


def is_constant(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group are all equal; those of rollouts that failed do not count."""
    return len({rollout.reward for rollout in group if not has_failed(rollout)}) <= 1


def trained_tokens(rollout: Rollout, mask_truncated: bool = False) -> list[bool]:
    """The tokens that the policy sampled; none if the rollout failed or, with `mask_truncated`, was cut off."""
    if not len(rollout.tokens) == len(rollout.sampled) == len(rollout.logprobs):
        raise ValueError(
            f"a rollout of prompt {rollout.prompt.id} has {len(rollout.tokens)} tokens, "
            f"but {len(rollout.sampled)} entries in `sampled` and {len(rollout.logprobs)} in `logprobs`"
        )
    truncated = rollout.finish_reason == "length"
    if has_failed(rollout) or (mask_truncated and truncated):
        return [False] * len(rollout.tokens)
    return rollout.sampled


def split(count: int, minibatches: int, seed: int) -> list[list[int]]:
    """The indices 0..count-1, shuffled by `seed`, in parts whose sizes differ by at most one."""
    if not 1 <= minibatches <= count:
        raise ValueError(f"{count} samples do not fill {minibatches} minibatches")
    order = list(range(count))
    random.Random(seed).shuffle(order)
    bounds = [count * part // minibatches for part in range(minibatches + 1)]
    return [order[start:stop] for start, stop in pairwise(bounds)]


def build_batch(
    rollouts: Sequence[Rollout],
    trained: Sequence[list[bool]],
    advantages: Sequence[float],
    weigh: Callable[[Sequence[int]], list[float]],
    *,
    minibatches: int,
    seed: int,
    metrics: Mapping[str, float],
    drawn: bool = True,
) -> Batch:
    """Make minibatches of samples; `weigh` turns the lengths of a minibatch's sequences into token weights.

    Tokens that were not `drawn` by a policy have no log-probability to compare with that of training.
    """

    def sample(i: int, weight: float) -> Sample:
        rollout = rollouts[i]
        return Sample(
            prompt=rollout.prompt.tokens,
            tokens=rollout.tokens,
            advantages=[advantages[i] if on else 0.0 for on in trained[i]],
            weights=[weight if on else 0.0 for on in trained[i]],
            logprobs=rollout.logprobs if drawn else None,
            reference_logprobs=rollout.reference_logprobs,
            rollout=i,
        )

    parts = []
    for part in split(len(rollouts), minibatches, seed):
        weights = weigh([sum(trained[i]) for i in part])
        parts.append([sample(i, weight) for i, weight in zip(part, weights, strict=True)])
    return Batch(parts, dict(metrics))


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of rollouts for any algorithm; rewards are those of rollouts that did not fail."""
    usable = [rollout for rollout in rollouts if not has_failed(rollout)]
    rewards = [rollout.reward for rollout in usable]
    mean = _mean(rewards)
    metrics = {
        "reward": mean,
        "reward/std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
    }
    by_function: dict[str, list[float]] = {}  # a function need not have a reward for every rollout
    for rollout in usable:
        for name, value in rollout.rewards.items():
            by_function.setdefault(name, []).append(value)
    for name, values in by_function.items():
        metrics[f"rewards/{name}"] = _mean(values)
    lengths = [len(rollout.tokens) for rollout in rollouts]
    metrics["length/mean"] = _mean(lengths)
    metrics["length/min"] = float(min(lengths, default=0))
    metrics["length/max"] = float(max(lengths, default=0))
    metrics["length/truncated"] = _mean([rollout.finish_reason == "length" for rollout in rollouts])
    metrics["failures/rollouts"] = _mean([has_failed(rollout) for rollout in rollouts])
    return metrics


def describe_written(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of completions that were not sampled."""
    trained = float(sum(sum(rollout.sampled) for rollout in rollouts))
    return {"tokens/trained": trained, "length/mean": _mean([len(rollout.tokens) for rollout in rollouts])}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
