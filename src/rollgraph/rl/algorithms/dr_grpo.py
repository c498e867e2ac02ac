"""Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): GRPO without its two biases.

A = r - mean(group); loss = mean over samples of the sum over tokens / max_tokens, so that neither hard prompts nor
short samples count more than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.algorithms.settings import check
from rollgraph.rl.algorithms.weights import sequence_sums


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    max_tokens: int  # length of the longest possible completion
    normalize_std: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("max_tokens", self.max_tokens > 0, self.max_tokens, "1 or more")

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return sequence_sums(lengths, self.max_tokens)
