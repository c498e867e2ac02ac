"""REINFORCE++ (Hu et al., 2025, arXiv 2501.03262): advantages are normalized over the whole batch.

A = (R - mean(batch)) / std(batch) over all sampled tokens, R = r - kl_coef x KL; loss = mean over tokens of the
clipped surrogate. With `group_baseline`, R - mean(group) is normalized (the paper's "w/ baseline"). This is simplified:
the paper subtracts from a token's R the KL of the tokens from there on, and this the KL of the whole sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import centred, per_group, whitened
from rollgraph.rl.algorithms.policy_gradient import PolicyGradient
from rollgraph.rl.algorithms.weights import token_mean
from rollgraph.types import Rollout


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(PolicyGradient):
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    group_baseline: bool = False

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        values = rewards
        if self.group_baseline:
            values = per_group(rollouts, rewards, centred)
        return whitened(values, [sum(rollout.sampled) for rollout in rollouts])

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)
