"""RLOO (Ahmadian et al., 2024, arXiv 2402.14740): REINFORCE with a leave-one-out baseline.

A = r - mean of the group's other rewards; loss = mean over samples of the sum over tokens of
-min(ratio A, clip(ratio) A).

We differ from the paper in this:
1. We clip the ratio of each token, so that a batch can be used for several updates. The paper takes one update per
   batch; all ratios are 1 there, and our loss has the gradient of -A log p(sample), as the paper's.
2. `kl_coef` is 0 by default. With a KL penalty, it is subtracted from the reward, as in the paper (`kl_in` = "reward").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import leave_one_out, per_group
from rollgraph.rl.algorithms.base import PolicyGradient
from rollgraph.rl.algorithms.batch import sequence_sums
from rollgraph.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    kl_estimator: str = "k1"
    kl_in: str = "reward"

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        group_sizes = Counter(rollout.group for rollout in rollouts)
        lone_prompts = [rollout.prompt.id for rollout in rollouts if group_sizes[rollout.group] == 1]
        if lone_prompts:
            raise ValueError(
                f"rloo compares the samples of a prompt, but prompt {lone_prompts[0]} has one; sample 2 or more"
            )
        return super().make_batch(rollouts, minibatches=minibatches, seed=seed)

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        return per_group(rollouts, rewards, leave_one_out)  # 0 if all others failed

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return sequence_sums(lengths)
