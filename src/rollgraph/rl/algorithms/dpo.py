"""DPO (Rafailov et al., 2023, arXiv 2305.18290): learns from pairs of completions, a chosen and a rejected one.

L = -log sigmoid(beta x d), d = log(policy / reference) of the chosen completion minus that of the rejected one.

We differ from the paper in this:
1. We do not differentiate L. Its gradient is dL/dd times the gradient of d, which is a sum over tokens. Scores of the
   policy right before the update give dL/dd, and this becomes the advantage of each token. So the two completions of a
   pair may be in different microbatches and on different ranks. It also means one update per step.
2. With `label_smoothing`, we assume that this share of the pairs is labelled the wrong way round (cDPO).
3. `loss_type` = "ipo" is the loss (d - 1 / (2 beta))^2 of Azar et al. (2023, arXiv 2310.12036), but with means over
   tokens in d, as in TRL; that paper has sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.base import check_setting, check_types
from rollgraph.rl.algorithms.batch import build_batch, loss_mask, offline_metrics
from rollgraph.rl.losses import LossAndMetrics, TokenStreams, weighted_sums, zero_unweighted
from rollgraph.types import Batch, Rollout

LOSS_TYPES = ("sigmoid", "ipo")


@dataclass(frozen=True)
class Comparison:
    """A pair's log-ratios, its loss, and the derivative of the loss with respect to chosen - rejected."""

    chosen: float  # log(policy / reference), the sum over tokens or, for ipo, their mean
    rejected: float
    loss: float
    derivative: float


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
        check_setting("beta", 0 < self.beta < math.inf, self.beta, "a number above 0")
        check_setting(
            "label_smoothing", 0 <= self.label_smoothing < 0.5, self.label_smoothing, "a number from 0 to below 0.5"
        )
        check_setting("loss_type", self.loss_type in LOSS_TYPES, self.loss_type, " or ".join(LOSS_TYPES))
        is_valid = self.loss_type == "sigmoid" or not self.label_smoothing
        check_setting("label_smoothing", is_valid, self.label_smoothing, "0 with loss_type ipo")

    def keeps(self, group: Sequence[Rollout]) -> bool:
        return True

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """Rollouts must have been scored by the current policy and by the reference."""
        if minibatches != 1:
            raise ValueError("dpo has one update per step: its advantages hold for the policy that was scored")
        pairs = find_pairs(rollouts)
        advantages = [0.0] * len(rollouts)
        for chosen, rejected in pairs:
            derivative = self.compare(rollouts[chosen], rollouts[rejected]).derivative
            advantages[chosen] = -derivative * self._token_factor(rollouts[chosen])
            advantages[rejected] = derivative * self._token_factor(rollouts[rejected])

        def token_weights(lengths: Sequence[int]) -> list[float]:
            return [1 / len(pairs)] * len(lengths)

        loss_masks = [loss_mask(rollout) for rollout in rollouts]
        metrics = {**offline_metrics(rollouts), **self.examine(rollouts)}
        return build_batch(rollouts, loss_masks, advantages, token_weights, minibatches=1, seed=seed, metrics=metrics)

    def loss(self, streams: TokenStreams) -> LossAndMetrics:
        """A sum with the gradient of L but not its value, which `examine` reports."""
        s = zero_unweighted(streams)
        return weighted_sums(-s.advantages * s.logprobs, s.weights, {})

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The loss of scored pairs, and the metrics that TRL reports for them."""
        comparisons = [self.compare(rollouts[chosen], rollouts[rejected]) for chosen, rejected in find_pairs(rollouts)]
        chosen = math.fsum(comparison.chosen for comparison in comparisons) / len(comparisons)
        rejected = math.fsum(comparison.rejected for comparison in comparisons) / len(comparisons)
        return {
            "loss": math.fsum(comparison.loss for comparison in comparisons) / len(comparisons),
            "rewards/chosen": self.beta * chosen,
            "rewards/rejected": self.beta * rejected,
            "rewards/margins": self.beta * (chosen - rejected),
            "rewards/accuracies": sum(comparison.chosen > comparison.rejected for comparison in comparisons)
            / len(comparisons),
        }

    def compare(self, chosen: Rollout, rejected: Rollout) -> Comparison:
        chosen_log_ratio = log_ratio(chosen) * self._token_factor(chosen)
        rejected_log_ratio = log_ratio(rejected) * self._token_factor(rejected)
        difference = chosen_log_ratio - rejected_log_ratio
        if self.loss_type == "ipo":
            distance = difference - 1 / (2 * self.beta)
            return Comparison(chosen_log_ratio, rejected_log_ratio, distance**2, 2 * distance)
        positive_weight, negative_weight = 1 - self.label_smoothing, self.label_smoothing
        scaled = self.beta * difference
        loss = positive_weight * softplus(-scaled) + negative_weight * softplus(scaled)
        derivative = self.beta * (negative_weight * sigmoid(scaled) - positive_weight * sigmoid(-scaled))
        return Comparison(chosen_log_ratio, rejected_log_ratio, loss, derivative)

    def _token_factor(self, rollout: Rollout) -> float:
        """The weight of one token in the log-ratio: 1 for a sum over tokens, 1 / length for a mean."""
        return 1 / sum(rollout.sampled) if self.loss_type == "ipo" else 1.0


def find_pairs(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """The indices (chosen, rejected) of each pair. A pair is a group of two; the higher reward marks the chosen one."""
    groups: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(index)
    pairs = []
    for group in groups.values():
        rejected, *preferred = sorted(group, key=lambda index: rollouts[index].reward)
        if len(preferred) != 1 or rollouts[rejected].reward == rollouts[preferred[0]].reward:
            prompt_id = rollouts[rejected].prompt.id
            raise ValueError(f"prompt {prompt_id} needs two completions, one with a higher reward than the other")
        pairs.append((preferred[0], rejected))
    return pairs


def log_ratio(rollout: Rollout) -> float:
    """log(policy / reference) of a completion. Both log-probabilities of a token that is not trained on are 0."""
    if rollout.reference_logprobs is None:
        raise ValueError("dpo needs rollouts that were scored by the reference policy")
    pairs = zip(rollout.logprobs, rollout.reference_logprobs, strict=True)
    return math.fsum(policy - reference for policy, reference in pairs)


def sigmoid(x: float) -> float:
    return math.exp(-softplus(-x))


def softplus(x: float) -> float:
    """log(1 + exp(x)), which is -log(sigmoid(-x))."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
