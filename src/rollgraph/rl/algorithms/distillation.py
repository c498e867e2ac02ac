"""On-policy distillation: the policy samples, and a teacher says of each token how likely it would have been.

A token's advantage is log p(teacher) - log p(policy), as sampled: the expected sum over a completion is minus the
reverse KL, KL(policy || teacher). With `reward_coef`, grpo's advantage times that factor is added to each of them. The
loss is the mean over all tokens of the clipped surrogate. The teacher takes the place of the reference policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import normalized, per_group
from rollgraph.rl.algorithms.policy_gradient import PolicyGradient
from rollgraph.rl.algorithms.settings import check
from rollgraph.rl.algorithms.weights import token_mean
from rollgraph.types import Batch, Rollout, Sample

OF_REWARDS = ("reward", "shaped_reward", "advantage")  # beginnings of names of metrics


@dataclass(frozen=True, kw_only=True)
class Distillation(PolicyGradient):
    reward_coef: float = 0.0  # weight of rewards; 0: none are needed

    def __post_init__(self) -> None:
        super().__post_init__()
        check("reward_coef", 0 <= self.reward_coef < math.inf, self.reward_coef, "a number that is not negative")
        check("kl_coef", self.kl_coef == 0, self.kl_coef, "0: the teacher is all that the policy is compared with")
        rewarded = self.needs_rewards or not self.dynamic_sampling
        check("dynamic_sampling", rewarded, self.dynamic_sampling, "false without reward_coef")

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
            sample.advantages = add_teacher(sample)
        metrics = batch.metrics
        if not any(rollout.rewards for rollout in rollouts):  # what is said of rewards would be about zeros
            metrics = {name: value for name, value in metrics.items() if not name.startswith(OF_REWARDS)}
        return Batch(batch.minibatches, {**metrics, **self.examine(rollouts)})

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The mean over sampled tokens of log p(policy) - log p(teacher), an estimate of the reverse KL of a token."""
        differences: list[float] = []
        for rollout in rollouts:
            taught = teacher_logprobs(rollout)
            streams = zip(rollout.sampled, rollout.logprobs, taught, strict=True)
            differences += [policy - teacher for sampled, policy, teacher in streams if sampled]
        return {"teacher/kl": math.fsum(differences) / max(1, len(differences))}


def add_teacher(sample: Sample) -> list[float]:
    """The advantages of a sample's tokens with what the teacher says of them."""
    assert sample.logprobs is not None
    streams = zip(sample.advantages, sample.weights, sample.logprobs, teacher_logprobs(sample), strict=True)
    return [advantage + teacher - policy if weight else 0.0 for advantage, weight, policy, teacher in streams]


def teacher_logprobs(scored: Rollout | Sample) -> Sequence[float]:
    if scored.reference_logprobs is None:
        raise ValueError("distillation needs rollouts that were scored by the teacher before make_batch")
    return scored.reference_logprobs
