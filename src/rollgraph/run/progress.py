"""How far a run has come: everything a checkpoint holds besides weights and optimizer state.

Knows neither the loop nor the checkpoint files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config, to_dict
from rollgraph.rl.data import DataError, PromptData
from rollgraph.run.config_changes import allows_other_data
from rollgraph.sharding.manifest import FileRecord
from rollgraph.types import Rollout

Group = list[Rollout]  # the rollouts of one prompt


@dataclass(frozen=True)
class StepEnd:
    """A finished step, and which weights belong to it."""

    step: int
    updates: int  # made by the optimizer so far; after another one, the weights no longer belong to this step
    data: dict[str, Any]
    surplus: list[Group]


class RunProgress:
    """Changes as a run takes its steps; `state()` is what a checkpoint saves of it."""

    def __init__(self, config: Config, data: PromptData, fingerprints: Mapping[str, str]) -> None:
        self._config = config
        self._data = data
        self._fingerprints = dict(fingerprints)
        self.taken = 0  # steps of the run that are finished, by this process or before it
        self.surplus: list[Group] = []  # groups that were sampled and not used yet
        self.reference_files: list[FileRecord] = []  # on rank 0: checksums of the files that hold the reference policy
        self.base_files: list[FileRecord] = []  # on rank 0: the same for a base model that the run keeps
        self.end: StepEnd | None = None  # of the last step that this process took
        self.save_failed = False

    def finish_step(self, step: int, updates: int) -> None:
        self.taken = step + 1
        self.end = StepEnd(step, updates, self._data.state(), self.surplus)

    def state(self) -> dict[str, Any]:
        """The end of the last step, as JSON can hold it."""
        assert self.end is not None
        return {
            "data": self.end.data,
            "surplus": [[rollout.to_dict() for rollout in group] for group in self.end.surplus],
            "config": to_dict(self._config),
            "fingerprints": self._fingerprints,
            "reference": self.reference_files,
            "base": self.base_files,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        restore_position(self._data, state["data"], may_change=allows_other_data(self._config))
        self.surplus = [[Rollout.from_dict(entry) for entry in group] for group in state["surplus"]]


def restore_position(data: PromptData, state: Mapping[str, Any], *, may_change: bool) -> None:
    """Go on where the state of the data was taken. Other data, if it may change, begins with its first prompt."""
    try:
        data.load_state(state)
    except DataError:
        if not may_change:
            raise
        data.load_state({**data.state(), "cursor": 0})
