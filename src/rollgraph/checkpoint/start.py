"""How a run starts: fresh, from a checkpoint, from copies in the memory of other ranks, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollgraph.checkpoint.changes import DEMONSTRATION_ORDER, allows_other_data
from rollgraph.checkpoint.format import CheckpointError, read_states
from rollgraph.checkpoint.keep import SavedCheckpoint, find_checkpoints
from rollgraph.checkpoint.peer_choice import Holding, Version, choose_distance, choose_recovery, plan_transfers
from rollgraph.checkpoint.peer_exchange import PeerCopies, distribute_copies
from rollgraph.config import Config
from rollgraph.errors import UserError
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.data.demonstrations import OfflineData
from rollgraph.rl.data.prompts import PromptData
from rollgraph.rl.data.rows import DataError

# -- fresh or from a checkpoint --------------------------------------------------------------------
# The folder of the run is scanned once, and one pure function decides.

REPORT = "graphs.json"  # the last file of a run
MODEL = "model"  # the exported model
DEMONSTRATIONS = "demonstrations"  # the key, in a checkpoint's state, of a warm start's position in its data
WARM_START = "warm_start"  # the folder with the checkpoints of a warm start, until the run has checkpoints


class CannotResume(UserError, CheckpointError):
    """The contents of a run's folder contradict the configuration, or are damaged."""


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run's folder. Checkpoints have not been verified."""

    path: Path
    checkpoints: Sequence[SavedCheckpoint] = ()  # by step
    broken: Mapping[Path, CheckpointError] = field(default_factory=dict)
    has_model: bool = False
    has_report: bool = False
    warm_start: Sequence[SavedCheckpoint] = ()  # checkpoints of the warm start, if the run has none

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"


@dataclass(frozen=True)
class Fresh:
    """Start with step 0."""


@dataclass(frozen=True)
class Resume:
    """Continue after the newest intact checkpoint."""

    newest: SavedCheckpoint
    folder: RunFolder


@dataclass(frozen=True)
class ResumeWarmStart:
    """Continue in the warm start, or right after it."""

    newest: SavedCheckpoint
    folder: RunFolder


@dataclass(frozen=True)
class Finished:
    """All steps were taken and everything is on disk, or more steps were taken than configured."""

    newest: SavedCheckpoint


@dataclass(frozen=True)
class FromPeers:
    """Continue after a step whose state the ranks have in memory."""

    version: Version
    newest: SavedCheckpoint | None  # on disk, and not newer


Start = Fresh | Resume | ResumeWarmStart | Finished | FromPeers


def scan_folder(output: str | Path) -> RunFolder:
    path = Path(output)
    broken: dict[Path, CheckpointError] = {}
    checkpoints: Sequence[SavedCheckpoint] = ()
    if (path / "checkpoints").is_dir():
        checkpoints = find_checkpoints(path / "checkpoints", on_broken=broken.__setitem__)
    warm_start: Sequence[SavedCheckpoint] = ()
    if not checkpoints and not broken and (path / WARM_START).is_dir():
        warm_start = find_checkpoints(path / WARM_START, on_broken=broken.__setitem__)
    return RunFolder(path, checkpoints, broken, (path / MODEL).exists(), (path / REPORT).exists(), warm_start)


def decide_start(folder: RunFolder, *, resume: Literal["auto", "never", "must"], steps: int, exports: bool) -> Start:
    """How a run with this folder starts. Raises if `resume` forbids it, or if none of its checkpoints can be read."""
    path = folder.checkpoint_folder
    if resume == "never" and (folder.checkpoints or folder.broken or folder.warm_start):
        raise CannotResume(f"resume: never, but {path} has checkpoints: choose another output")
    if folder.warm_start:
        return ResumeWarmStart(folder.warm_start[-1], folder)
    if folder.broken and not folder.checkpoints:
        raise no_intact_checkpoint(path, folder.broken.values())
    if not folder.checkpoints:
        if resume == "must":
            raise CannotResume(f"resume: must, but {path} has no whole checkpoint")
        return Fresh()
    newest = folder.checkpoints[-1]
    everything_written = folder.has_report and (folder.has_model or not exports)
    steps_taken = newest.step + 1
    if steps_taken > steps or (steps_taken == steps and everything_written):
        return Finished(newest)
    return Resume(newest, folder)


def find_start(config: Config, attempt: int = 0) -> Start:
    """How a run starts. An `attempt` after the first always continues from what earlier attempts have saved."""
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


def check_data(saved: SavedCheckpoint, config: Config, data: PromptData, warm_start: OfflineData | None) -> None:
    """Raise DataError if a checkpoint was saved with other data, unless that may change."""
    try:
        state = read_states(saved.path)[0]
    except CheckpointError:
        return  # an older checkpoint may be intact; we learn that when they are verified
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


def no_intact_checkpoint(folder: Path, problems: Iterable[object]) -> CannotResume:
    """The error when no checkpoint can be read. A fresh start would overwrite checkpoints that may be repairable."""
    listed = "; ".join(map(str, problems))
    return CannotResume(
        f"{folder} has no whole checkpoint; nothing was changed there. Choose another output, or move these away: "
        f"{listed}"
    )


# -- from the memory of other ranks ----------------------------------------------------------------
# `checkpoint/peer_choice.py` decides which state can be restored, from the copies that each rank reports.


def prefer_peers(start: Start, copies: PeerCopies, world: World) -> Start:
    """Start from copies in memory, if they are complete and no older than the checkpoint on disk. All ranks call this.

    Afterwards each rank and its neighbour have a copy of the rank's part.
    """
    assert world.liveness is not None, "a single rank has no neighbour"
    collectives = Collectives(world)
    copies.prepare(world.size)
    own_holdings = [(holding.owner, holding.version.attempt, holding.version.step) for holding in copies.holdings()]
    on_disk = start.newest.step if isinstance(start, Resume | Finished) else -1
    finished = isinstance(start, Finished)
    own_report = json.dumps([own_holdings, on_disk, finished, world.liveness.node])
    all_holdings, steps_on_disk, finishes, nodes = zip(
        *map(json.loads, collectives.all_gather_text(own_report)), strict=True
    )
    holdings = {}
    for rank, entries in enumerate(all_holdings):
        holdings[rank] = [Holding(owner, Version(attempt, step)) for owner, attempt, step in entries]
    recovery = choose_recovery(world.size, holdings)
    if recovery is None or finishes[0] or recovery.version.step < steps_on_disk[0]:  # rank 0 decides for all
        return start
    transfers = plan_transfers(recovery, holdings, choose_distance(nodes))
    with world.in_phase("bring back state"):
        distribute_copies(copies, recovery.version, transfers, collectives, world.device)
    return FromPeers(recovery.version, None if isinstance(start, Fresh | FromPeers) else start.newest)
