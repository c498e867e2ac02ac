"""The arguments of reward functions, with TRL's names: columns of the data, completions, and ways to log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from rollgraph.types import Rollout

ChatForm = Literal["messages", "text"]
STATE, LOG_EXTRA, LOG_METRIC = "trainer_state", "log_extra", "log_metric"
# All other arguments are columns of the data.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids", STATE, LOG_EXTRA, LOG_METRIC)


@dataclass(frozen=True)
class TrainerState:
    """The progress of the run; the argument `trainer_state`. Its fields are a subset of those of TRL's state."""

    global_step: int = 0  # finished steps: 0 during the first step, 1 in the validation after it
    max_steps: int = 0  # steps of the whole run
    epoch: float = 0.0  # passes over the training data so far, including the prompts of this step


@dataclass(frozen=True)
class RewardBatch:
    """The arguments of one call for some rollouts.

    >>> RewardBatch({"completions": ["4", "5"], "answer": ["4", "4"]}, TrainerState(global_step=3))
    """

    lists: Mapping[str, list[Any]]  # by argument name; one entry for each rollout
    state: TrainerState

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], chat: ChatForm, state: TrainerState) -> Self:
        lists: dict[str, list[Any]] = {}
        for name in dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns):
            lists[name] = [rollout.prompt.columns.get(name) for rollout in rollouts]
        lists["prompts"] = [_prompt(rollout, chat) for rollout in rollouts]
        lists["completions"] = [_completion(rollout, chat) for rollout in rollouts]
        lists["completion_ids"] = [_sampled_tokens(rollout) for rollout in rollouts]
        return cls(lists, state)

    def __len__(self) -> int:
        return len(self.lists["completions"])

    def select(self, names: Iterable[str]) -> Self:
        """A batch with only these arguments. `names` must include `completions`, which every function takes."""
        return replace(self, lists={name: self.lists[name] for name in names if name in self.lists})

    def split(self) -> Iterator[Self]:
        """One batch for each rollout."""
        for i in range(len(self)):
            yield replace(self, lists={name: [values[i]] for name, values in self.lists.items()})


class RewardLog:
    """What a function logs during a call: metrics, and values for each rollout."""

    def __init__(self, count: int) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: list[dict[str, Any]] = [{} for _ in range(count)]  # by column, for each rollout

    def log_metric(self, name: str, value: float) -> None:
        """The argument `log_metric`. A step reports the mean over all calls."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, ...): expected a finite number, got {value!r}")
        self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """The argument `log_extra`: adds a column to `samples.jsonl`."""
        values = list(values)
        if len(values) != len(self.extra):
            raise ValueError(f"log_extra({column!r}, ...): {len(values)} values for {len(self.extra)} completions")
        for entry, value in zip(self.extra, values, strict=True):
            entry[str(column)] = json.loads(json.dumps(value, default=str))  # JSON types, for files and other ranks

    def add(self, following: RewardLog) -> None:
        """Append the log of the next rollouts."""
        self.metrics += following.metrics
        self.extra += following.extra

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
