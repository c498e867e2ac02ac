"""The interface of an algorithm: all that the rest of rollgraph knows about one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from rollgraph.rl.losses import TokenStreams
from rollgraph.types import Batch, Rollout

Source = Literal["policy", "demonstrations", "pairs"]


class Algorithm(Protocol):
    """Decides what is learned from rollouts, and how. It has no state beyond its settings."""

    @property
    def source(self) -> Source:
        """Where rollouts come from: sampled by the policy, or written, one or two of them for each row of the data.

        Pairs have been scored under the policy before `make_batch`; the one with the higher reward is preferred.
        """

    @property
    def needs_rewards(self) -> bool:
        """Whether sampled rollouts must have rewards."""

    @property
    def needs_reference(self) -> bool:
        """Whether rollouts must have `reference_logprobs` before `make_batch`."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `loss` must get the entropy."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether samples must get `old_logprobs` before training."""

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Whether the rollouts of one prompt are worth training on; if not, others are sampled in their place."""

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """Turn the rollouts of all ranks into samples with advantages and weights, deterministically."""

    def loss(self, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a microbatch's tokens and its metrics, both as sums; runs inside a captured graph."""


class UnrewardedAlgorithm(Algorithm, Protocol):
    """An algorithm that needs no rewards."""

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Metrics of validation in place of rewards, from rollouts that have the policy's log-probabilities.

        By `loss`, if it is among them, the best checkpoints are kept.
        """
