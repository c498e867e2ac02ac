"""The records that travel through a step: prompts become rollouts, rollouts become a batch.

Plain Python numbers, one list entry for each token. Tensors are made by the worker, where graphs need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A problem to be solved.

    >>> Prompt(id=7, tokens=(48, 55, 43), text="07+", columns={"answer": "42"})
    """

    id: int  # its line in the data, the same in every epoch
    tokens: tuple[int, ...]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)  # all other fields of the line, for rewards


@dataclass
class Rollout:
    """One sample: what followed a prompt, and what it is worth.

    All lists have one entry for each of `tokens`. Where an environment put a token there (`sampled` is False) the
    policy is not trained on it, and its log-probabilities are 0.
    """

    prompt: Prompt
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]  # under the distribution they were drawn from
    text: str = ""
    finish_reason: str = "stop"  # "stop", "length", "abort" or "error"
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # of each reward function, before weights
    reference_logprobs: list[float] | None = None  # under the reference policy, where KL needs it
    group: int = 0  # rollouts of the same prompt in the same step have the same group

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it: for a checkpoint, and for other ranks."""
        prompt = {**vars(self.prompt), "tokens": list(self.prompt.tokens), "columns": dict(self.prompt.columns)}
        return {**vars(self), "prompt": prompt}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Rollout:
        prompt = entry["prompt"]
        return cls(**{**entry, "prompt": Prompt(**{**prompt, "tokens": tuple(prompt["tokens"])})})


@dataclass
class Sample:
    """A sequence to train on: streams with one entry for each of `tokens`, which follow `prompt`.

    An algorithm says by `advantages` how much each token is to be encouraged and by `weights` how much it counts:
    the loss of a minibatch is the sum of weight x loss over its tokens, whatever microbatches or ranks they fall into.
    A token with weight 0 is not trained on.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    advantages: Sequence[float]
    weights: Sequence[float]
    logprobs: Sequence[float]  # of the rollout
    old_logprobs: Sequence[float] | None = None  # of the policy before this batch; None: the rollout's
    reference_logprobs: Sequence[float] | None = None
    rollout: int | None = None  # which of the rollouts it was made of


@dataclass
class Batch:
    """What one call of `train` learns from: minibatches in order, each of which is one optimizer step."""

    minibatches: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)  # what the algorithm has to say about the rollouts

    @property
    def samples(self) -> list[Sample]:
        return [sample for minibatch in self.minibatches for sample in minibatch]
