"""DPO (Rafailov et al., 2023, arXiv 2305.18290): learns from pairs of completions, of which one is preferred.

L = -log sigmoid(beta x d), d = log(policy / reference) of the chosen completion minus that of the rejected one. With
`label_smoothing`, this share of the pairs counts as the other way round (cDPO). `ipo` (Azar et al., 2023, arXiv
2310.12036) is (d - 1 / (2 beta))^2, where the logarithms are means over tokens, as in TRL.

The gradient of L is dL/dd times the gradient of d, which is a sum over tokens. The policy's scores right before the
update give dL/dd, and it becomes the advantage of each token. So the two completions of a pair may be in any
microbatches on any ranks, and a step has one update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.batches import build_batch, describe_written, trained_tokens
from rollgraph.rl.algorithms.settings import check, check_types
from rollgraph.rl.losses import Term, TokenStreams, weighted_sums, without_weightless
from rollgraph.types import Batch, Rollout

LOSS_TYPES = ("sigmoid", "ipo")


@dataclass(frozen=True)
class Comparison:
    """A pair: the two numbers that are compared, the loss, and its derivative by their difference."""

    chosen: float  # log(policy / reference), the sum over tokens or, for ipo, their mean
    rejected: float
    loss: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class DPO:
    beta: float = 0.1  # how close the policy stays to the reference
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    source = "pairs"
    needs_rewards = False
    needs_reference = True
    needs_entropy = False
    needs_old_logprobs = False

    def __post_init__(self) -> None:
        check_types(self)
        check("beta", 0 < self.beta < math.inf, self.beta, "a number above 0")
        check("label_smoothing", 0 <= self.label_smoothing < 0.5, self.label_smoothing, "a number from 0 to below 0.5")
        check("loss_type", self.loss_type in LOSS_TYPES, self.loss_type, " or ".join(LOSS_TYPES))
        smooth = self.loss_type == "sigmoid" or not self.label_smoothing
        check("label_smoothing", smooth, self.label_smoothing, "0 with loss_type ipo")

    def keeps(self, group: Sequence[Rollout]) -> bool:
        return True

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """Rollouts must have been scored under the policy, as it is now, and under the reference."""
        if minibatches != 1:
            raise ValueError("dpo has one update per step: its advantages hold for the policy that was scored")
        pairs = find_pairs(rollouts)
        advantages = [0.0] * len(rollouts)
        for chosen, rejected in pairs:
            slope = self.compare(rollouts[chosen], rollouts[rejected]).slope
            advantages[chosen] = -slope * self._share(rollouts[chosen])
            advantages[rejected] = slope * self._share(rollouts[rejected])

        def weigh(lengths: Sequence[int]) -> list[float]:
            return [1 / len(pairs)] * len(lengths)

        trained = [trained_tokens(rollout) for rollout in rollouts]
        metrics = {**describe_written(rollouts), **self.examine(rollouts)}
        return build_batch(rollouts, trained, advantages, weigh, minibatches=1, seed=seed, metrics=metrics)

    def loss(self, streams: TokenStreams) -> Term:
        """A sum with the gradient of L; `examine` has the value of L."""
        s = without_weightless(streams)
        return weighted_sums(-s.advantages * s.logprobs, s.weights, {})

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The loss of pairs that were scored, and what TRL reports of them."""
        found = [self.compare(rollouts[chosen], rollouts[rejected]) for chosen, rejected in find_pairs(rollouts)]
        chosen = math.fsum(pair.chosen for pair in found) / len(found)
        rejected = math.fsum(pair.rejected for pair in found) / len(found)
        return {
            "loss": math.fsum(pair.loss for pair in found) / len(found),
            "rewards/chosen": self.beta * chosen,
            "rewards/rejected": self.beta * rejected,
            "rewards/margins": self.beta * (chosen - rejected),
            "rewards/accuracies": sum(pair.chosen > pair.rejected for pair in found) / len(found),
        }

    def compare(self, chosen: Rollout, rejected: Rollout) -> Comparison:
        good = log_ratio(chosen) * self._share(chosen)
        bad = log_ratio(rejected) * self._share(rejected)
        difference = good - bad
        if self.loss_type == "ipo":
            distance = difference - 1 / (2 * self.beta)
            return Comparison(good, bad, distance**2, 2 * distance)
        right, wrong = 1 - self.label_smoothing, self.label_smoothing
        scaled = self.beta * difference
        loss = right * softplus(-scaled) + wrong * softplus(scaled)
        slope = self.beta * (wrong * sigmoid(scaled) - right * sigmoid(-scaled))
        return Comparison(good, bad, loss, slope)

    def _share(self, rollout: Rollout) -> float:
        """How much one token counts in the number that is compared."""
        return 1 / sum(rollout.sampled) if self.loss_type == "ipo" else 1.0


def find_pairs(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """The indices of the chosen and the rejected completion of each pair: a group of two, told apart by rewards."""
    groups: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(index)
    pairs = []
    for group in groups.values():
        rejected, *rest = sorted(group, key=lambda index: rollouts[index].reward)
        if len(rest) != 1 or rollouts[rejected].reward == rollouts[rest[0]].reward:
            identity = rollouts[rejected].prompt.id
            raise ValueError(f"prompt {identity} needs two completions, one with a higher reward than the other")
        pairs.append((rest[0], rejected))
    return pairs


def log_ratio(rollout: Rollout) -> float:
    """log(policy / reference) of a completion; tokens that are not trained on have 0 and 0."""
    if rollout.reference_logprobs is None:
        raise ValueError("dpo needs rollouts that were scored by the reference policy")
    pairs = zip(rollout.logprobs, rollout.reference_logprobs, strict=True)
    return math.fsum(policy - reference for policy, reference in pairs)


def sigmoid(x: float) -> float:
    return math.exp(-softplus(-x))


def softplus(x: float) -> float:
    """log(1 + exp(x)), which is -log(sigmoid(-x))."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
