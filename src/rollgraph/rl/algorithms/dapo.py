"""DAPO (Yu et al., 2025, arXiv 2503.14476): GRPO that clips higher, weights all tokens equally and samples dynamically.

A = (r + overlong - mean(group)) / std(group); loss = mean over all tokens of -min(ratio A, clip(ratio, 0.8, 1.28) A).
overlong = 0 up to max_tokens - overlong_buffer tokens, then falls linearly to -1 at max_tokens.

We differ from the paper in this:
1. Dynamic sampling drops a group if all its rewards are equal. The paper drops it if all answers are right or all are
   wrong, which is the same for rewards with two values. We decide before the length penalty is added.
2. The mean over tokens is taken over a minibatch. The paper's formula takes it over the samples of one prompt.
3. The length penalty is off until `max_tokens` and `overlong_buffer` are set.
4. The standard deviation divides by n - 1, as in `grpo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.base import check_setting
from rollgraph.rl.algorithms.batch import token_mean
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.types import Rollout


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    clip_high: float = 0.28
    dynamic_sampling: bool = True
    max_tokens: int | None = None  # length of the longest possible completion; required by overlong_buffer
    overlong_buffer: int | None = None  # the penalty begins this many tokens before max_tokens; None: no penalty

    def __post_init__(self) -> None:
        super().__post_init__()
        buffer = self.overlong_buffer
        is_valid = buffer is None or 0 < buffer <= (self.max_tokens or 0)
        check_setting("overlong_buffer", is_valid, buffer, f"1 to max_tokens={self.max_tokens}")

    def shaped_reward(self, rollout: Rollout) -> float:
        reward = super().shaped_reward(rollout)
        if self.max_tokens is None or self.overlong_buffer is None:
            return reward
        return reward + overlong_punishment(len(rollout.tokens), self.max_tokens, self.overlong_buffer)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)


def overlong_punishment(length: int, max_tokens: int, buffer: int) -> float:
    """0 up to the beginning of the buffer, -1 from max_tokens on, linear in between."""
    return -min(1.0, max(0, length - (max_tokens - buffer)) / buffer)
