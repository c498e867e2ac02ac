"""SFT: the rollouts are demonstrations. loss = mean over all tokens of -log p(token)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.batches import build_batch, describe, trained_tokens
from rollgraph.rl.algorithms.weights import token_mean
from rollgraph.rl.losses import Term, TokenStreams, weighted_sums, without_weightless
from rollgraph.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class SFT:
    needs_reference = False
    needs_entropy = False
    needs_old_logprobs = False

    def keeps(self, group: Sequence[Rollout]) -> bool:
        return True

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        trained = [trained_tokens(rollout) for rollout in rollouts]
        advantages = [1.0] * len(rollouts)
        metrics = describe(rollouts)
        return build_batch(
            rollouts, trained, advantages, token_mean, minibatches=minibatches, seed=seed, metrics=metrics
        )

    def loss(self, streams: TokenStreams) -> Term:
        s = without_weightless(streams)
        return weighted_sums(-s.logprobs, s.weights, {})
