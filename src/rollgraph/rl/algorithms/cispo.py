"""CISPO (MiniMax, 2025, arXiv 2506.13585): clips the ratio, but keeps the gradient of every token.

A = (r - mean(group)) / std(group); loss = mean over all tokens of -stop_gradient(clip(ratio)) A log p(token). As in
the paper, there is no lower clip by default (`clip_low` = 1).

We differ from the paper in this:
1. The paper does not state its upper clip. Ours is 1 + clip_high = 5, which is common.
2. The mean over tokens is taken over a minibatch. The paper's formula takes it over the samples of one prompt.
3. The standard deviation divides by n - 1, as in `grpo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.errors import InvalidInput
from rollgraph.rl.algorithms.batch import token_mean
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.losses import LossAndMetrics, TokenStreams, clipped_importance, token_ratio


@dataclass(frozen=True, kw_only=True)
class CISPO(GRPO):
    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None:
            raise InvalidInput(
                "cispo clips every ratio by clip_high, whatever the sign of the advantage", argument="dual_clip"
            )

    def policy_term(self, streams: TokenStreams) -> LossAndMetrics:
        ratio = token_ratio(streams)
        return clipped_importance(streams.logprobs, ratio, streams.advantages, self.clip_low, self.clip_high)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)
