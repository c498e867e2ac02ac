"""Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): GRPO without its two biases.

A = r - mean(group); loss = mean over samples of the sum over tokens of -min(ratio A, clip(ratio) A) / max_tokens.
Prompts with a small standard deviation and short samples then count no more than others.

We differ from the paper in this:
1. The paper's formula has no divisor; we divide by the constant `max_tokens`, as the code in the paper does. This only
   scales the loss.
2. The KL term and `normalize_std` of our GRPO remain available. Both are off by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.base import check_setting
from rollgraph.rl.algorithms.batch import sequence_sums
from rollgraph.rl.algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    max_tokens: int  # length of the longest possible completion
    normalize_std: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("max_tokens", self.max_tokens > 0, self.max_tokens, "1 or more")

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return sequence_sums(lengths, self.max_tokens)
