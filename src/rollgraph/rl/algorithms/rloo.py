"""RLOO (Ahmadian et al., 2024, arXiv 2402.14740): REINFORCE with a leave-one-out baseline.

A = r - mean of the group's other rewards; loss = mean over samples of the sum over tokens of -min(ratio A,
clip(ratio) A). The paper takes one step per batch, for which this has the gradient of -A log p(sample), and puts KL in
the reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import leave_one_out, per_group
from rollgraph.rl.algorithms.policy_gradient import PolicyGradient
from rollgraph.rl.algorithms.weights import sequence_sums
from rollgraph.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    kl_estimator: str = "k1"
    kl_in: str = "reward"

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        sizes = Counter(rollout.group for rollout in rollouts)
        alone = [rollout.prompt.id for rollout in rollouts if sizes[rollout.group] == 1]
        if alone:
            raise ValueError(f"rloo compares the samples of a prompt, but prompt {alone[0]} has one; sample 2 or more")
        return super().make_batch(rollouts, minibatches=minibatches, seed=seed)

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        return per_group(rollouts, rewards, leave_one_out)  # 0 if all others failed

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return sequence_sums(lengths)
