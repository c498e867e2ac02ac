"""The records of a training step: a `Prompt` becomes `Rollout`s, and these become `Sample`s of a `Batch`.

All values are plain Python, with one list entry per token; the policy worker builds tensors from them. Shapes:
P = tokens of the prompt, T = tokens after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ENVIRONMENT = "environment"  # the environment's key in `Rollout.rewards` and `Rollout.failures`


@dataclass(frozen=True)
class Prompt:
    """A prompt to complete.

    >>> Prompt(id=7, tokens=(48, 55, 43), text="07+", columns={"answer": "42"})
    """

    id: int  # index of its row in the data, the same in every epoch
    tokens: tuple[int, ...]  # [P]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)  # the other columns of the row, for reward functions
    messages: list[Mapping[str, Any]] | None = None  # the chat, if the row has one or the environment needs one
    repeat: int = 0  # earlier occurrences of the same row in this step, on any rank


class Span(NamedTuple):
    """A turn or a reply in a rollout: its tokens [start, end).

    >>> Span(start=0, end=12, kind="turn", text="<calc>6*7</calc>")
    """

    start: int
    end: int
    kind: str  # "turn": written by the policy; "reply": by the environment
    text: str
    reward: float = 0.0  # of a turn, if the environment gives rewards


@dataclass
class Rollout:
    """A completion of a prompt, and its reward.

    >>> Rollout(
    ...     prompt=Prompt(id=7, tokens=(48, 55, 43), text="07+"),
    ...     tokens=[52, 50, 256],
    ...     sampled=[True, True, True],
    ...     logprobs=[-0.1, -1.5, -0.02],
    ...     text="42",
    ...     reward=1.0,
    ...     rewards={"exact": 1.0},
    ... )

    Where an environment inserted a token, `sampled` is False, its log-probability is 0, and the policy is not trained
    on it. A multi-turn environment also fills in `spans`. A chat environment also fills in `messages`, and `text` is
    the text of the last turn.
    """

    prompt: Prompt
    tokens: list[int]  # [T]
    sampled: list[bool]  # [T]; False: inserted by an environment
    logprobs: list[float]  # [T]; under the distribution the tokens were sampled from
    text: str = ""
    finish_reason: str = "stop"  # "stop", "length", "abort" or "error"
    reward: float = 0.0  # the total, weighted
    rewards: dict[str, float] = field(default_factory=dict)  # by reward function, before weighting
    reference_logprobs: list[float] | None = None  # [T]; under the reference policy, if the algorithm needs it
    group: int = 0  # rollouts of the same prompt in the same step have the same group
    spans: list[Span] = field(default_factory=list)  # turns and replies in order; empty: a single turn
    messages: list[dict[str, Any]] = field(default_factory=list)  # the messages after those of the prompt
    extra: dict[str, Any] = field(default_factory=dict)  # values that reward functions logged about it, by column
    failures: dict[str, str] = field(default_factory=dict)  # error messages, by reward function or ENVIRONMENT

    def to_dict(self) -> dict[str, Any]:
        """The rollout as JSON values, for a checkpoint or for other ranks."""
        prompt = {**vars(self.prompt), "tokens": list(self.prompt.tokens), "columns": dict(self.prompt.columns)}
        return {**vars(self), "prompt": prompt}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Rollout:
        prompt_fields = dict(entry["prompt"])
        prompt_fields["tokens"] = tuple(prompt_fields["tokens"])
        spans = [Span(*span) for span in entry["spans"]]
        return cls(**{**entry, "prompt": Prompt(**prompt_fields), "spans": spans})


@dataclass
class Sample:
    """A sequence to train on: `prompt`, then `tokens` with their per-token streams.

    >>> Sample(
    ...     prompt=(48, 55, 43),
    ...     tokens=[52, 50, 256],
    ...     advantages=[0.7, 0.7, 0.7],
    ...     weights=[0.01, 0.01, 0.01],
    ...     logprobs=[-0.1, -1.5, -0.02],
    ...     rollout=0,
    ... )

    The algorithm sets `advantages` and `weights`. The loss of a minibatch is the sum of weight x loss over its tokens,
    independent of how they are split into microbatches and ranks. A token with weight 0 is not trained on.
    """

    prompt: Sequence[int]  # [P]
    tokens: Sequence[int]  # [T]
    advantages: Sequence[float]  # [T]
    weights: Sequence[float]  # [T]
    logprobs: Sequence[float] | None  # [T], from the rollout; None: no policy sampled these tokens
    old_logprobs: Sequence[float] | None = None  # [T], of the policy before this batch; None: use `logprobs`
    reference_logprobs: Sequence[float] | None = None  # [T], of the reference policy
    rollout: int | None = None  # index of its rollout in the step


@dataclass
class Batch:
    """The data of one call of `PolicyWorker.train`: minibatches in order, one optimizer step each.

    >>> Batch(minibatches=[[sample, another_sample]], metrics={"reward": 0.5})
    """

    minibatches: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)  # the algorithm's metrics of the rollouts

    @property
    def samples(self) -> list[Sample]:
        return [sample for minibatch in self.minibatches for sample in minibatch]
