"""CISPO (MiniMax, 2025, arXiv 2506.13585): clips the ratio, but keeps the gradient of its token.

A = (r - mean(group)) / std(group); loss = mean over all tokens of -stop_gradient(clip(ratio)) A log p(token). As in
the paper, there is no lower clip by default. The paper does not state its upper clip; 1 + clip_high = 5 is common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.errors import InvalidInput
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.algorithms.weights import token_mean
from rollgraph.rl.losses import Term, TokenStreams, clipped_importance, token_ratio


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

    def policy_term(self, streams: TokenStreams) -> Term:
        ratio = token_ratio(streams)
        return clipped_importance(streams.logprobs, ratio, streams.advantages, self.clip_low, self.clip_high)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_mean(lengths)
