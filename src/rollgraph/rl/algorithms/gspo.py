"""GSPO (Zheng et al., 2025, arXiv 2507.18071): GRPO with one ratio for a whole sequence.

s = (policy(sample) / old(sample))^(1/length); loss = mean over samples of -min(s A, clip(s) A). Such ratios are much
closer to 1 than those of single tokens, hence the narrow clips.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.losses import Term, TokenStreams, clipped_surrogate, sequence_ratio


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def policy_term(self, streams: TokenStreams) -> Term:
        ratio = sequence_ratio(streams)
        return clipped_surrogate(ratio, streams.advantages, self.clip_low, self.clip_high, self.dual_clip)
