"""GRPO (Shao et al., 2024, arXiv 2402.03300): advantages are rewards normalized within the group of a prompt.

A = (r - mean(group)) / std(group); loss = mean over samples of the mean over tokens of -min(ratio A, clip(ratio) A),
plus kl_coef x k3.

We differ from the paper in this:
1. There is no KL term by default (`kl_coef` = 0), so no reference policy is loaded. The paper uses 0.04.
2. The standard deviation divides by n - 1, and 1e-6 is added to it. The paper does not say which one it means.
3. A rollout that failed does not belong to its group: neither the mean nor the standard deviation sees it.
4. The mean over samples is taken over a minibatch, and counts only samples with tokens to train on.

A built-in algorithm is a file like this one and a line in `config/names.py`. An algorithm of yours needs only its
import path in `algorithm.name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.advantages import centered, normalized, per_group
from rollgraph.rl.algorithms.base import PolicyGradient
from rollgraph.rl.algorithms.batch import sequence_means
from rollgraph.types import Rollout


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    normalize_std: bool = True  # divide by the group's standard deviation

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        compare = normalized if self.normalize_std else centered
        return per_group(rollouts, rewards, compare)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return sequence_means(lengths)
