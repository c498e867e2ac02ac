"""REINFORCE++ (Hu et al., 2025, arXiv 2501.03262): advantages are normalized over the whole batch.

A = (R - mean(batch)) / std(batch) over all sampled tokens, R = r - kl_coef x KL; loss = mean over tokens of
-min(ratio A, clip(ratio) A). With `group_baseline`, R - mean(group) is normalized (the paper's "w/ baseline").

We differ from the paper in this:
1. The paper subtracts from the reward of token t the KL of the tokens from t on. We subtract the KL of the whole sample
   from each of its tokens, so all tokens of a sample have the same advantage.
2. `kl_coef` is 0 by default, so there is no KL penalty and no reference policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import centered, per_group, whitened
from rollgraph.rl.algorithms.base import PolicyGradient
from rollgraph.rl.algorithms.batch import token_mean
from rollgraph.types import Rollout


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(PolicyGradient):
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    group_baseline: bool = False

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        values = rewards
        if self.group_baseline:
            values = per_group(rollouts, rewards, centered)
        return whitened(values, [sum(rollout.sampled) for rollout in rollouts])

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)
