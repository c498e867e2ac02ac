"""GSPO (Zheng et al., 2025, arXiv 2507.18071): GRPO with one ratio for a whole sequence.

s = (policy(sample) / old(sample))^(1/length); loss = mean over samples of -min(s A, clip(s) A). Such ratios are much
closer to 1 than those of single tokens, hence the narrow clips, which are the paper's.

We differ from the paper in this:
1. The loss is a sum over tokens: each token of a sample has the ratio s and the weight 1 / length. Value and gradient
   are those of the paper's sum over samples.
2. Only sampled tokens count for s and for the length; tokens that an environment inserted do not.
3. With `reward_to_go`, the turns of a sample have different advantages but share s. The paper has one advantage.
4. The standard deviation divides by n - 1, as in `grpo.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.losses import LossAndMetrics, TokenStreams, clipped_surrogate, sequence_ratio


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def policy_term(self, streams: TokenStreams) -> LossAndMetrics:
        ratio = sequence_ratio(streams)
        return clipped_surrogate(ratio, streams.advantages, self.clip_low, self.clip_high, self.dual_clip)
