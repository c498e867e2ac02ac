"""Decides how a run starts: from the beginning, from a checkpoint, or not at all because it is finished.

The folder of the run is scanned once, and one pure function decides. `begin.py` carries the decision out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollgraph.config import Config
from rollgraph.errors import UserError
from rollgraph.rl.data import DataError, PromptData
from rollgraph.rl.demonstrations import WrittenData
from rollgraph.run.checkpoints import Saved, find_complete
from rollgraph.run.config_changes import DEMONSTRATION_ORDER, allows_other_data
from rollgraph.sharding import CheckpointError
from rollgraph.sharding.manifest import read_states
from rollgraph.sharding.peer_choice import Version

REPORT = "graphs.json"  # the last file that a run writes
MODEL = "model"  # the exported model, beside it
DEMONSTRATIONS = "demonstrations"  # in the state of a checkpoint: how far a warm start has come in its data
WARM_START = "warm_start"  # the checkpoints of a warm start, until the run has one of its own


class CannotResume(UserError, CheckpointError):
    """What the folder of a run holds does not go with what is asked for, or has been changed."""


@dataclass(frozen=True)
class RunFolder:
    """What the folder of a run holds. The contents of checkpoints have not been verified."""

    path: Path
    checkpoints: Sequence[Saved] = ()  # by step
    broken: Mapping[Path, CheckpointError] = field(default_factory=dict)
    has_model: bool = False
    has_report: bool = False
    warm_start: Sequence[Saved] = ()  # checkpoints of the warm start, if the run has none of its own

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"


@dataclass(frozen=True)
class Fresh:
    """Begin with step 0."""


@dataclass(frozen=True)
class Resume:
    """Go on after the newest checkpoint that turns out to be whole."""

    newest: Saved
    folder: RunFolder


@dataclass(frozen=True)
class ResumeWarmStart:
    """Go on inside the warm start, or right after it."""

    newest: Saved
    folder: RunFolder


@dataclass(frozen=True)
class Finished:
    """All steps were taken, and everything is on disk."""

    newest: Saved


@dataclass(frozen=True)
class FromPeers:
    """Go on after a step whose state the ranks hold in their memory."""

    version: Version
    newest: Saved | None  # on the disk, and older


Start = Fresh | Resume | ResumeWarmStart | Finished | FromPeers


def scan_folder(output: str | Path) -> RunFolder:
    path = Path(output)
    broken: dict[Path, CheckpointError] = {}
    found: Sequence[Saved] = ()
    if (path / "checkpoints").is_dir():
        found = find_complete(path / "checkpoints", on_broken=broken.__setitem__)
    warm_start: Sequence[Saved] = ()
    if not found and not broken and (path / WARM_START).is_dir():
        warm_start = find_complete(path / WARM_START, on_broken=broken.__setitem__)
    return RunFolder(path, found, broken, (path / MODEL).exists(), (path / REPORT).exists(), warm_start)


def decide_start(folder: RunFolder, *, resume: Literal["auto", "never", "must"], steps: int, exports: bool) -> Start:
    """Raise CheckpointError if `resume` forbids what the folder holds, or if none of its checkpoints can be read."""
    place = folder.checkpoint_folder
    if resume == "never" and (folder.checkpoints or folder.broken or folder.warm_start):
        raise CannotResume(f"resume: never, but {place} has checkpoints: choose another output")
    if folder.warm_start:
        return ResumeWarmStart(folder.warm_start[-1], folder)
    if folder.broken and not folder.checkpoints:
        raise none_whole(place, folder.broken.values())
    if not folder.checkpoints:
        if resume == "must":
            raise CannotResume(f"resume: must, but {place} has no whole checkpoint")
        return Fresh()
    newest = folder.checkpoints[-1]
    everything_written = folder.has_report and (folder.has_model or not exports)
    if newest.step + 1 >= steps and everything_written:
        return Finished(newest)
    return Resume(newest, folder)


def find_start(config: Config, attempt: int = 0) -> Start:
    """How a run starts. An `attempt` after the first goes on with what those before it have saved, in any case."""
    start = decide_start(
        scan_folder(config.output),
        resume=config.resume if attempt == 0 else "auto",
        steps=config.steps,
        exports=config.checkpoint.export_at_end,
    )
    if isinstance(start, ResumeWarmStart) and config.warm_start is None:
        path = start.newest.path
        raise CannotResume(f"{path} is of a warm start, but warm_start is null: choose another output")
    return start


def check_data(saved: Saved, config: Config, data: PromptData, warm_start: WrittenData | None) -> None:
    """Raise DataError if a checkpoint was made with other data, unless that may change."""
    try:
        state = read_states(saved.path)[0]
    except CheckpointError:
        return  # an older checkpoint may be whole; that is known once they are verified
    try:
        keys = "data.train, seed and data.shuffle"
        if not allows_other_data(config):
            data.check_state(state["data"])
        demonstrations_may_change = allows_other_data(config, DEMONSTRATION_ORDER)
        if warm_start is not None and DEMONSTRATIONS in state and not demonstrations_may_change:
            keys = "warm_start.data and seed"
            warm_start.prompts.check_state(state[DEMONSTRATIONS])
    except DataError as error:
        raise DataError(f"{keys} do not match {saved.path}: {error}; choose another output") from None


def none_whole(folder: Path, problems: Iterable[object]) -> CannotResume:
    """There are checkpoints and none can be read. Starting over would overwrite what somebody may still repair."""
    listed = "; ".join(map(str, problems))
    return CannotResume(
        f"{folder} has no whole checkpoint; nothing was changed there. Choose another output, or move these away: "
        f"{listed}"
    )
