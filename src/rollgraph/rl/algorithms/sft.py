"""SFT: imitates demonstrations. loss = mean over the assistant's tokens of a minibatch of -log p(token)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.batch import build_batch, loss_mask, offline_metrics, token_mean
from rollgraph.rl.losses import LossAndMetrics, TokenStreams, weighted_sums, zero_unweighted
from rollgraph.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class SFT:
    source = "demonstrations"
    needs_rewards = False
    needs_reference = False
    needs_entropy = False
    needs_old_logprobs = False

    def keeps(self, group: Sequence[Rollout]) -> bool:
        return True

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        loss_masks = [loss_mask(rollout) for rollout in rollouts]
        advantages = [1.0] * len(rollouts)
        metrics = offline_metrics(rollouts)
        return build_batch(
            rollouts,
            loss_masks,
            advantages,
            token_mean,
            minibatches=minibatches,
            seed=seed,
            metrics=metrics,
            has_logprobs=False,
        )

    def loss(self, streams: TokenStreams) -> LossAndMetrics:
        s = zero_unweighted(streams)
        return weighted_sums(-s.logprobs, s.weights, {})

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The loss of rollouts that the policy has scored, and its perplexity exp(loss)."""
        count = sum(sum(rollout.sampled) for rollout in rollouts)
        total = math.fsum(logprob for rollout in rollouts for logprob in rollout.logprobs)  # 0 where not sampled
        loss = -total / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # e^710 is too large for a float
