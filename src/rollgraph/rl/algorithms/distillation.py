"""On-policy distillation: the policy samples, and a teacher scores each sampled token.

A = log p(teacher) - log p(policy) of each sampled token, plus reward_coef x GRPO's advantage of the sample; loss = mean
over all tokens of -min(ratio A, clip(ratio) A). The teacher is scored in the slot of the reference policy.

The nearest paper is GKD (Agarwal et al., 2023, arXiv 2306.13649). We differ from it in this:
1. GKD minimizes a divergence between the two distributions over the whole vocabulary. We use the log-probabilities of
   the sampled tokens alone; over a completion, the expectation of the sum of log p(teacher) - log p(policy) is minus
   the reverse KL, KL(policy || teacher).
2. GKD can also learn from a fixed dataset and with other divergences. We always sample, and have the reverse KL alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import normalized, per_group
from rollgraph.rl.algorithms.base import PolicyGradient, check_setting
from rollgraph.rl.algorithms.batch import token_mean
from rollgraph.types import Batch, Rollout, Sample

REWARD_METRIC_PREFIXES = ("reward", "shaped_reward", "advantage")


@dataclass(frozen=True, kw_only=True)
class Distillation(PolicyGradient):
    reward_coef: float = 0.0  # weight of rewards; 0: none are needed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(
            "reward_coef", 0 <= self.reward_coef < math.inf, self.reward_coef, "a number that is not negative"
        )
        check_setting(
            "kl_coef", self.kl_coef == 0, self.kl_coef, "0: the teacher takes the place of the reference policy"
        )
        is_valid = self.needs_rewards or not self.dynamic_sampling
        check_setting("dynamic_sampling", is_valid, self.dynamic_sampling, "false without reward_coef")

    @property
    def needs_rewards(self) -> bool:
        return self.reward_coef != 0

    @property
    def needs_reference(self) -> bool:
        return True

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        return [self.reward_coef * value for value in per_group(rollouts, rewards, normalized)]

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        batch = super().make_batch(rollouts, minibatches=minibatches, seed=seed)
        for sample in batch.samples:
            sample.advantages = teacher_advantages(sample)
        metrics = batch.metrics
        if not any(rollout.rewards for rollout in rollouts):  # metrics of rewards would all be 0
            metrics = {name: value for name, value in metrics.items() if not name.startswith(REWARD_METRIC_PREFIXES)}
        return Batch(batch.minibatches, {**metrics, **self.examine(rollouts)})

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The mean over sampled tokens of log p(policy) - log p(teacher), an estimate of the reverse KL of a token."""
        differences: list[float] = []
        for rollout in rollouts:
            teacher_stream = teacher_logprobs(rollout)
            streams = zip(rollout.sampled, rollout.logprobs, teacher_stream, strict=True)
            differences += [policy - teacher for sampled, policy, teacher in streams if sampled]
        return {"teacher/kl": math.fsum(differences) / max(1, len(differences))}


def teacher_advantages(sample: Sample) -> list[float]:
    """The advantages of a sample's tokens plus log p(teacher) - log p(policy)."""
    assert sample.logprobs is not None
    streams = zip(sample.advantages, sample.weights, sample.logprobs, teacher_logprobs(sample), strict=True)
    return [advantage + teacher - policy if weight else 0.0 for advantage, weight, policy, teacher in streams]


def teacher_logprobs(scored: Rollout | Sample) -> Sequence[float]:
    if scored.reference_logprobs is None:
        raise ValueError("distillation needs rollouts that were scored by the teacher before make_batch")
    return scored.reference_logprobs
