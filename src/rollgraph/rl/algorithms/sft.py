"""SFT: imitates demonstrations. loss = mean over the assistant's tokens of -log p(token)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgraph.rl.algorithms.batches import build_batch, describe_written, trained_tokens
from rollgraph.rl.algorithms.weights import token_mean
from rollgraph.rl.losses import Term, TokenStreams, weighted_sums, without_weightless
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
        trained = [trained_tokens(rollout) for rollout in rollouts]
        advantages = [1.0] * len(rollouts)
        metrics = describe_written(rollouts)
        return build_batch(
            rollouts, trained, advantages, token_mean, minibatches=minibatches, seed=seed, metrics=metrics, drawn=False
        )

    def loss(self, streams: TokenStreams) -> Term:
        s = without_weightless(streams)
        return weighted_sums(-s.logprobs, s.weights, {})

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The loss of rollouts that the policy has scored, and exp(loss)."""
        count = sum(sum(rollout.sampled) for rollout in rollouts)
        total = math.fsum(logprob for rollout in rollouts for logprob in rollout.logprobs)  # 0 where not sampled
        loss = -total / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # e^710 is too large for a float
