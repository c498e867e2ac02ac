"""DAPO (Yu et al., 2025, arXiv 2503.14476): GRPO that clips higher, weights all tokens equally and samples dynamically.

A = (r + overlong - mean(group)) / std(group); loss = mean over all tokens of -min(ratio A, clip(ratio, 0.8, 1.28) A);
groups in which all rewards are equal are left out. overlong = 0 up to max_tokens - overlong_buffer, then falls to -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.algorithms.settings import check
from rollgraph.rl.algorithms.weights import token_mean
from rollgraph.types import Rollout


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    clip_high: float = 0.28
    dynamic_sampling: bool = True
    max_tokens: int | None = None  # length of the longest possible completion; required by overlong_buffer
    overlong_buffer: int | None = None  # how many tokens before max_tokens the penalty begins; none: no penalty

    def __post_init__(self) -> None:
        super().__post_init__()
        buffer = self.overlong_buffer
        fits = buffer is None or 0 < buffer <= (self.max_tokens or 0)
        check("overlong_buffer", fits, buffer, f"1 to max_tokens={self.max_tokens}")

    def shaped_reward(self, rollout: Rollout) -> float:
        reward = super().shaped_reward(rollout)
        if self.max_tokens is None or self.overlong_buffer is None:
            return reward
        return reward + overlong_punishment(len(rollout.tokens), self.max_tokens, self.overlong_buffer)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)


def overlong_punishment(length: int, max_tokens: int, buffer: int) -> float:
    """0 where the buffer begins, -1 from max_tokens on, linear in between."""
    return -min(1.0, max(0, length - (max_tokens - buffer)) / buffer)
