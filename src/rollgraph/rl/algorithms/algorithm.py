"""What an algorithm is to the rest of rollgraph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rollgraph.rl.losses import TokenStreams
from rollgraph.types import Batch, Rollout


class Algorithm(Protocol):
    """Decides what is learned from rollouts, and how. It has no state: all it knows are its settings."""

    @property
    def needs_reference(self) -> bool:
        """Rollouts must have `reference_logprobs` before `make_batch`."""

    @property
    def needs_entropy(self) -> bool:
        """`loss` must get the entropy."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Samples must get `old_logprobs` before training."""

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Whether the rollouts of one prompt are worth training on. Others are sampled instead where not."""

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """The rollouts of all ranks, as samples with advantages and weights; the same for the same arguments."""

    def loss(self, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a microbatch's tokens and metrics, both of which add up; runs inside a captured graph."""
