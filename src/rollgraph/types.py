"""The records that pass through a step: prompts become rollouts, and rollouts become a batch.

They hold plain Python numbers, one list entry per token. The worker makes tensors of them where graphs need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ENVIRONMENT = "environment"  # the name, among rewards and failures, of what an environment gave or could not give


@dataclass(frozen=True)
class Prompt:
    """A problem to be solved.

    >>> Prompt(id=7, tokens=(48, 55, 43), text="07+", columns={"answer": "42"})
    """

    id: int  # index of its row in the data, the same in every epoch
    tokens: tuple[int, ...]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)  # all other fields of the row, for reward functions
    messages: list[Mapping[str, Any]] | None = None  # the chat, if the row has one or the environment needs one
    repeat: int = 0  # how often its row came before it in the same step, on any rank


class Span(NamedTuple):
    """A part of a rollout's tokens, from `start` up to but not including `end`."""

    start: int
    end: int
    kind: str  # "turn": the policy wrote it; "reply": the environment did
    text: str
    reward: float = 0.0  # of a turn, if the environment gives rewards


@dataclass
class Rollout:
    """One sample: what followed a prompt, and its reward.

    All lists have one entry for each of `tokens`. Where an environment inserted a token (`sampled` is False), the
    policy is not trained on it and its log-probability is 0.

    An environment of several turns also says where each turn and each reply is (`spans`). One of messages says what
    they are as `messages`, and its `text` is that of the last turn.
    """

    prompt: Prompt
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]  # under the distribution the tokens were drawn from
    text: str = ""
    finish_reason: str = "stop"  # "stop", "length", "abort" or "error"
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # by reward function, before weighting
    reference_logprobs: list[float] | None = None  # under the reference policy, if KL needs it
    group: int = 0  # rollouts of the same prompt in the same step have the same group
    spans: list[Span] = field(default_factory=list)  # turns and replies in order; empty: all of it is one turn
    messages: list[dict[str, Any]] = field(default_factory=list)  # that followed those of the prompt
    extra: dict[str, Any] = field(default_factory=dict)  # what reward functions logged about it, by column
    failures: dict[str, str] = field(default_factory=dict)  # what went wrong with it: by reward, or ENVIRONMENT

    def to_dict(self) -> dict[str, Any]:
        """The rollout as JSON can hold it, for a checkpoint or for other ranks."""
        prompt = {**vars(self.prompt), "tokens": list(self.prompt.tokens), "columns": dict(self.prompt.columns)}
        return {**vars(self), "prompt": prompt}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Rollout:
        fields_of_prompt = dict(entry["prompt"])
        fields_of_prompt["tokens"] = tuple(fields_of_prompt["tokens"])
        spans = [Span(*span) for span in entry["spans"]]
        return cls(**{**entry, "prompt": Prompt(**fields_of_prompt), "spans": spans})


@dataclass
class Sample:
    """A sequence to train on; each stream has one entry for each of `tokens`, which follow `prompt`.

    The algorithm sets `advantages`, how strongly each token is encouraged, and `weights`, how much it counts: the loss
    of a minibatch is the sum of weight x loss over its tokens, however they are spread over microbatches and ranks. A
    token with weight 0 is not trained on.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    advantages: Sequence[float]
    weights: Sequence[float]
    logprobs: Sequence[float] | None  # from the rollout; None: no policy drew these tokens
    old_logprobs: Sequence[float] | None = None  # of the policy before this batch; None: use the rollout's
    reference_logprobs: Sequence[float] | None = None
    rollout: int | None = None  # index of the rollout it was made from


@dataclass
class Batch:
    """What one call of `train` learns from: minibatches in order, one optimizer step each."""

    minibatches: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)  # what the algorithm reports about the rollouts

    @property
    def samples(self) -> list[Sample]:
        return [sample for minibatch in self.minibatches for sample in minibatch]
