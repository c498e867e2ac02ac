"""The progress of a run: everything that a checkpoint holds besides weights and optimizer state.

Knows neither the training loop nor the checkpoint files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.checkpoint.changes import allows_other_data
from rollgraph.checkpoint.format import FileRecord
from rollgraph.config import Config, to_dict
from rollgraph.inputs.sampled_data import PROMPT_TOKENS
from rollgraph.model.arithmetic import ARITHMETIC
from rollgraph.rl.data.prompts import PromptData
from rollgraph.rl.data.rows import DataError
from rollgraph.types import Rollout

Group = list[Rollout]  # the rollouts of one prompt in one step


@dataclass(frozen=True)
class StepEnd:
    """The end of a finished step, and which weights belong to it."""

    step: int
    updates: int  # optimizer updates so far; after another one, the weights no longer belong to this step
    data: dict[str, Any]
    surplus_groups: list[Group]


class RunProgress:
    """The progress of a run, updated after each step. `state()` returns what a checkpoint saves."""

    def __init__(
        self, config: Config, data: PromptData, fingerprints: Mapping[str, str], prompt_tokens: int | None = None
    ) -> None:
        self._config = config
        self._data = data
        self._fingerprints = dict(fingerprints)
        self._prompt_tokens = prompt_tokens  # measured from the data
        self.finished_steps = 0  # steps of the run, including those before this process started
        self.surplus_groups: list[Group] = []  # groups that were sampled but not trained on yet
        self.reference_files: list[FileRecord] = []  # on rank 0: checksums of the reference policy's files
        self.base_files: list[FileRecord] = []  # on rank 0: checksums of the base model's files, if the run keeps it
        self.end: StepEnd | None = None  # of this process's last step
        self.save_failed = False

    def finish_step(self, step: int, updates: int) -> None:
        self.finished_steps = step + 1
        self.end = StepEnd(step, updates, self._data.state(), self.surplus_groups)

    def state(self) -> dict[str, Any]:
        """The end of the last step, as JSON values."""
        assert self.end is not None
        return {
            "data": self.end.data,
            "surplus": [[rollout.to_dict() for rollout in group] for group in self.end.surplus_groups],
            "config": to_dict(self._config),
            "fingerprints": self._fingerprints,
            "arithmetic": dict(ARITHMETIC),
            PROMPT_TOKENS: self._prompt_tokens,
            "reference": self.reference_files,
            "base": self.base_files,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        restore_position(self._data, state["data"], may_change=allows_other_data(self._config))
        self.surplus_groups = [[Rollout.from_dict(entry) for entry in group] for group in state["surplus"]]


def restore_position(data: PromptData, state: Mapping[str, Any], *, may_change: bool) -> None:
    """Continue where `state` was taken. Changed data, if changes are allowed, starts at its first prompt."""
    try:
        data.load_state(state)
    except DataError:
        if not may_change:
            raise
        data.load_state({**data.state(), "cursor": 0})
