"""From rollouts to a batch: which tokens are trained on, which minibatch they go to, how much they count."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rollgraph.types import Batch, Rollout, Sample

FAILED = frozenset({"error", "abort"})  # such a rollout says nothing about the policy


def did_not_fail(rollout: Rollout) -> bool:
    return rollout.finish_reason not in FAILED


def trained_tokens(rollout: Rollout, mask_truncated: bool = False) -> list[bool]:
    """What the policy sampled, unless the rollout failed or, if so wished, was cut off."""
    if not len(rollout.tokens) == len(rollout.sampled) == len(rollout.logprobs):
        raise ValueError(
            f"a rollout of prompt {rollout.prompt.id} has {len(rollout.tokens)} tokens, "
            f"but {len(rollout.sampled)} entries in `sampled` and {len(rollout.logprobs)} in `logprobs`"
        )
    masked = not did_not_fail(rollout) or (mask_truncated and rollout.finish_reason == "length")
    return [False] * len(rollout.tokens) if masked else rollout.sampled


def split(count: int, minibatches: int, seed: int) -> list[list[int]]:
    """0..count-1, shuffled by `seed`, in parts that differ in size by one at most."""
    if not 1 <= minibatches <= count:
        raise ValueError(f"{count} samples do not make {minibatches} minibatches")
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
) -> Batch:
    """Samples in minibatches; `weigh` gives a token's weight for each sequence of one minibatch, from their lengths."""

    def sample(i: int, weight: float) -> Sample:
        rollout = rollouts[i]
        return Sample(
            prompt=rollout.prompt.tokens,
            tokens=rollout.tokens,
            advantages=[advantages[i] if on else 0.0 for on in trained[i]],
            weights=[weight if on else 0.0 for on in trained[i]],
            logprobs=rollout.logprobs,
            reference_logprobs=rollout.reference_logprobs,
            rollout=i,
        )

    parts = []
    for part in split(len(rollouts), minibatches, seed):
        weights = weigh([sum(trained[i]) for i in part])
        parts.append([sample(i, weight) for i, weight in zip(part, weights, strict=True)])
    return Batch(parts, dict(metrics))


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What there is to say of rollouts whatever the algorithm; rewards are those of rollouts that did not fail."""
    alive = [rollout for rollout in rollouts if did_not_fail(rollout)]
    rewards = [rollout.reward for rollout in alive]
    mean = _mean(rewards)
    names = dict.fromkeys(name for rollout in alive for name in rollout.rewards)
    parts = {name: _mean([r.rewards[name] for r in alive if name in r.rewards]) for name in names}  # of who has one
    return {
        "reward": mean,
        "reward_std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
        **{f"reward/{name}": value for name, value in parts.items()},
        "length": _mean([len(rollout.tokens) for rollout in rollouts]),
        "truncated": _mean([rollout.finish_reason == "length" for rollout in rollouts]),
        "failed": _mean([not did_not_fail(rollout) for rollout in rollouts]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
