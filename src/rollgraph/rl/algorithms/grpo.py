"""GRPO (Shao et al., 2024, arXiv 2402.03300).

A = (r - mean(group)) / std(group); loss = mean over samples of the mean over tokens of -min(ratio A, clip(ratio) A),
plus kl_coef x k3. The paper uses kl_coef = 0.04.

A built-in algorithm is a file like this one and a line in `config/algorithm_names.py`; one of your own needs only its
import path in `algorithm.name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import centred, normalized, per_group
from rollgraph.rl.algorithms.policy_gradient import PolicyGradient
from rollgraph.rl.algorithms.weights import sequence_means
from rollgraph.types import Rollout


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    normalize_std: bool = True  # divide by the group's standard deviation

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        compare = normalized if self.normalize_std else centred
        return per_group(rollouts, rewards, compare)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return sequence_means(lengths)
