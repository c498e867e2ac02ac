"""From rollouts to a batch: loss masks, token weights and minibatches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence, Sized
from itertools import pairwise

from rollgraph.errors import InvalidInput, name_function
from rollgraph.types import Batch, Rollout, Sample

# -- token weights ---------------------------------------------------------------------------------
# `lengths` counts the tokens of each sequence that are trained on. The result is the weight of one token in each
# sequence. A sequence without such tokens has weight 0 and does not count as a sequence.


def sequence_means(lengths: Sequence[int]) -> list[float]:
    """Weights for the mean over sequences of the mean over tokens."""
    count = _nonempty_count(lengths)
    return [1 / (count * length) if length else 0.0 for length in lengths]


def sequence_sums(lengths: Sequence[int], divisor: int = 1) -> list[float]:
    """Weights for the mean over sequences of the sum over tokens / divisor."""
    count = _nonempty_count(lengths)
    return [1 / (count * divisor) if length else 0.0 for length in lengths]


def token_mean(lengths: Sequence[int]) -> list[float]:
    """Weights for the mean over all tokens."""
    total = sum(lengths)
    return [1 / total if length else 0.0 for length in lengths]


def _nonempty_count(lengths: Sequence[int]) -> int:
    return sum(1 for length in lengths if length)


# -- batches ---------------------------------------------------------------------------------------

FAILED = frozenset({"error", "abort"})  # such a rollout says nothing about the policy


def rollout_failed(rollout: Rollout) -> bool:
    return rollout.finish_reason in FAILED


def has_equal_rewards(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group are all equal, ignoring rollouts that failed."""
    return len({rollout.reward for rollout in group if not rollout_failed(rollout)}) <= 1


def loss_mask(rollout: Rollout, mask_truncated: bool = False) -> list[bool]:
    """True for each token to train on: the sampled ones, unless the rollout failed or is masked as truncated."""
    if not len(rollout.tokens) == len(rollout.sampled) == len(rollout.logprobs):
        raise ValueError(
            f"a rollout of prompt {rollout.prompt.id} has {len(rollout.tokens)} tokens, "
            f"but {len(rollout.sampled)} entries in `sampled` and {len(rollout.logprobs)} in `logprobs`"
        )
    truncated = rollout.finish_reason == "length"
    if rollout_failed(rollout) or (mask_truncated and truncated):
        return [False] * len(rollout.tokens)
    return rollout.sampled


def check_length(function: Callable[..., object], values: Sequence[float], count: int, noun: str) -> None:
    """Raise unless `function`, which a user may have written, returned `count` values."""
    returned_count = len(values) if isinstance(values, Sized) else f"a {type(values).__name__}, not"
    if returned_count != count:
        raise InvalidInput(f"returned {returned_count} numbers for {count} {noun}", location=name_function(function))


def split_minibatches(count: int, minibatches: int, seed: int) -> list[list[int]]:
    """The indices 0..count-1, shuffled by `seed`, in `minibatches` lists whose lengths differ by at most one."""
    if not 1 <= minibatches <= count:
        raise ValueError(f"{count} samples do not fill {minibatches} minibatches")
    order = list(range(count))
    random.Random(seed).shuffle(order)
    bounds = [count * part // minibatches for part in range(minibatches + 1)]
    return [order[start:stop] for start, stop in pairwise(bounds)]


def build_batch(
    rollouts: Sequence[Rollout],
    loss_masks: Sequence[list[bool]],
    advantages: Sequence[float],
    token_weights: Callable[[Sequence[int]], list[float]],
    *,
    minibatches: int,
    seed: int,
    metrics: Mapping[str, float],
    has_logprobs: bool = True,
) -> Batch:
    """Make minibatches of samples. `token_weights` maps the lengths of a minibatch's sequences to token weights.

    Without `has_logprobs`, no policy sampled these tokens: they have no log-probabilities to compare with training's.
    """

    def make_sample(i: int, weight: float) -> Sample:
        rollout = rollouts[i]
        return Sample(
            prompt=rollout.prompt.tokens,
            tokens=rollout.tokens,
            advantages=[advantages[i] if is_trained else 0.0 for is_trained in loss_masks[i]],
            weights=[weight if is_trained else 0.0 for is_trained in loss_masks[i]],
            logprobs=rollout.logprobs if has_logprobs else None,
            reference_logprobs=rollout.reference_logprobs,
            rollout=i,
        )

    minibatch_samples = []
    for indices in split_minibatches(len(rollouts), minibatches, seed):
        weights = token_weights([sum(loss_masks[i]) for i in indices])
        check_length(token_weights, weights, len(indices), "sequences")
        minibatch_samples.append([make_sample(i, weight) for i, weight in zip(indices, weights, strict=True)])
    return Batch(minibatch_samples, dict(metrics))


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of rollouts for any algorithm. Rollouts that failed do not count in those of rewards."""
    usable = [rollout for rollout in rollouts if not rollout_failed(rollout)]
    rewards = [rollout.reward for rollout in usable]
    mean = _mean(rewards)
    metrics = {
        "reward": mean,
        "reward/std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
    }
    by_function: dict[str, list[float]] = {}  # a function may return None for a rollout
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
    metrics["failures/rollouts"] = _mean([rollout_failed(rollout) for rollout in rollouts])
    return metrics


def offline_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of completions from the data, which were not sampled."""
    trained = float(sum(sum(rollout.sampled) for rollout in rollouts))
    return {"tokens/trained": trained, "length/mean": _mean([len(rollout.tokens) for rollout in rollouts])}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
