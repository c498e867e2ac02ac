"""What a reward function is called with: the lists, the state of the run, and two functions that log.

Owns the names of these arguments, which are TRL's, and whether a chat is given as messages or as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from rollgraph.types import Rollout

ChatForm = Literal["messages", "text"]
STATE, LOG_EXTRA, LOG_METRIC = "trainer_state", "log_extra", "log_metric"
GIVEN = ("prompts", "completions", "completion_ids", STATE, LOG_EXTRA, LOG_METRIC)  # beside the columns


@dataclass(frozen=True)
class TrainerState:
    """How far the run is; the argument `trainer_state`. The names are those of TRL's state, which has more of them."""

    global_step: int = 0  # finished steps: 0 in the first one, and one more in the validation that follows a step
    max_steps: int = 0  # steps of the whole run
    epoch: float = 0.0  # passes over the training data so far, the prompts of this step included


@dataclass(frozen=True)
class RewardBatch:
    """Some rollouts as the arguments of a call."""

    lists: Mapping[str, list[Any]]  # by argument, one entry for each rollout
    state: TrainerState

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], chat: ChatForm, state: TrainerState) -> Self:
        lists: dict[str, list[Any]] = {}
        for name in dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns):
            lists[name] = [rollout.prompt.columns.get(name) for rollout in rollouts]
        lists["prompts"] = [_prompt(rollout, chat) for rollout in rollouts]
        lists["completions"] = [_completion(rollout, chat) for rollout in rollouts]
        lists["completion_ids"] = [_sampled_tokens(rollout) for rollout in rollouts]
        return cls(lists, state)

    def __len__(self) -> int:
        return len(self.lists["completions"])

    def restricted(self, names: Iterable[str]) -> Self:
        """Only these arguments, and `completions`, which every function takes."""
        return replace(self, lists={name: self.lists[name] for name in names if name in self.lists})

    def split(self) -> Iterator[Self]:
        """Each rollout as a batch of its own."""
        for i in range(len(self)):
            yield replace(self, lists={name: [values[i]] for name, values in self.lists.items()})


class RewardLog:
    """What functions log during a call: metrics, and values for each rollout."""

    def __init__(self, count: int) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: list[dict[str, Any]] = [{} for _ in range(count)]  # by column, for each rollout

    def log_metric(self, name: str, value: float) -> None:
        """The argument `log_metric`; the metric of a step is the mean over all calls."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, ...): expected a finite number, got {value!r}")
        self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """The argument `log_extra`: a column of the samples that are written down."""
        values = list(values)
        if len(values) != len(self.extra):
            raise ValueError(f"log_extra({column!r}, ...): {len(values)} values for {len(self.extra)} completions")
        for entry, value in zip(self.extra, values, strict=True):
            entry[str(column)] = json.loads(json.dumps(value, default=str))  # what a file and other ranks can hold

    def add(self, other: RewardLog) -> None:
        """Append the log of the rollouts that follow."""
        self.metrics += other.metrics
        self.extra += other.extra

    def to_text(self) -> str:
        return json.dumps([self.metrics, self.extra]) if self.metrics or any(self.extra) else ""

    @classmethod
    def from_text(cls, text: str, count: int) -> RewardLog:
        log = cls(count)
        if text:
            log.metrics, log.extra = json.loads(text)
        return log


def _prompt(rollout: Rollout, chat: ChatForm) -> Any:
    messages = rollout.prompt.messages
    return rollout.prompt.text if messages is None or chat == "text" else messages


def _completion(rollout: Rollout, chat: ChatForm) -> Any:
    if rollout.prompt.messages is None or chat == "text":
        return rollout.text
    return rollout.messages or [{"role": "assistant", "content": rollout.text}]


def _sampled_tokens(rollout: Rollout) -> list[int]:
    return [token for token, sampled in zip(rollout.tokens, rollout.sampled, strict=True) if sampled]
