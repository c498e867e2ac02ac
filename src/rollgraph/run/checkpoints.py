"""The checkpoints of a run: when one is whole, which are kept, and saving beside training.

Owns the folder of a run: its names, its clearing and its pruning. What a checkpoint is made of, and that it appears
whole or not at all, is `sharding/checkpoint_writer.py`; what its `state` means is its caller's.

    step_00000100/                          a checkpoint; nothing but a rename makes or unmakes this name
    step_00000100.1f2e3d4c-7.incomplete/    being written, by the run 1f2e3d4c
    step_00000100.1f2e3d4c-7.deleted/       being deleted
    run_1f2e3d4c.lock                       locked while that run lives, so that nobody clears away what it writes
    run_1f2e3d4c.new                        the same, until it is locked

Names that differ from these are somebody else's, and are never touched. Who only reads changes nothing at all.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollgraph.sharding import CheckpointError, ShardedAdamW, ShardedModel, checkpoint_loader, checkpoint_writer
from rollgraph.sharding.manifest import read_manifest, verify
from rollgraph.sharding.shard_snapshot import ShardSnapshot, take_snapshot

_COMPLETE = re.compile(r"step_\d{8,}")
_LEFT_OVER = re.compile(r"step_\d{8,}\.([0-9a-f]{8})-\d+\.(incomplete|deleted)")
_LOCK = re.compile(r"run_([0-9a-f]{8})\.(lock|new)")


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint, e.g. Saved(100, Path("run/step_00000100"), score=0.7)."""

    step: int
    path: Path
    score: float | None
    due: bool = True  # else it was saved for its score alone


def choose_kept(saved: Sequence[Saved], keep_last: int, keep_best: int) -> set[Saved]:
    """The newest that were due, and those with the highest scores; of equal scores the newer."""
    newest = sorted((one for one in saved if one.due), key=lambda one: one.step, reverse=True)[:keep_last]
    return {*newest, *_by_score(saved)[:keep_best]}


def _by_score(saved: Iterable[Saved]) -> list[Saved]:
    scored = [(one.score, one.step, one) for one in saved if one.score is not None]
    return [one for *_, one in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def find_complete(
    folder: Path, without: Container[Path] = (), on_broken: Callable[[Path, CheckpointError], None] | None = None
) -> list[Saved]:
    """The checkpoints of a folder that have all their files, by step. What is in the files is not read."""
    found = []
    try:
        paths = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and path not in without]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for path in paths:
        try:
            found.append(_read_saved(path))
        except CheckpointError as error:
            if on_broken is not None and path.exists():  # else it was deleted while it was read
                on_broken(path, error)
    return sorted(found, key=lambda saved: saved.step)


def none_whole(folder: Path, problems: Iterable[str]) -> CheckpointError:
    """There are checkpoints, and none can be read: whoever began anew would write over what may be mended."""
    return CheckpointError(
        f"{folder} has no whole checkpoint, and nothing was changed there: give another output, or move these away: "
        + "; ".join(problems)
    )


class Checkpoints:
    """The checkpoints of a run, in `folder`, which all ranks see.

    All ranks make it, save and load together. `problems` says what was passed over or not written, and why; it is for
    people, who have not seen those of `unread()` yet. Ranks wait for each other for `timeout` seconds, by default those
    of the model's collectives. Without `writes` there is no `save`, and the folder, which has to be there, may be
    read-only.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: ShardedModel,
        optimizer: ShardedAdamW,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        asynchronous: bool = True,
        timeout: float | None = None,
        writes: bool = True,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last={keep_last}, keep_best={keep_best}: the newest one is always kept")
        self.folder = Path(folder)
        self.problems: list[str] = []
        self._told = 0  # of the problems
        self._model, self._optimizer, self._world = model, optimizer, model.world
        self._keep = (keep_last, keep_best)
        self._timeout = model.collectives.timeout if timeout is None else timeout
        self.broken: dict[Path, str] = {}  # those that were passed over, and why
        self._saves = 0
        self._memory: ShardSnapshot | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous and writes else None
        self._running: Future[None] | None = None
        self._being_saved: Saved | None = None
        self._lock: IO[str] | None = None
        self._run = ""  # the name of this run, where it writes
        if writes:
            self._run = model.collectives.all_gather_text(self._begin() if self._world.rank == 0 else "")[0]
            if not re.fullmatch("[0-9a-f]{8}", self._run):
                raise CheckpointError(self._run)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], score: float | None = None, *, due: bool = True) -> None:
        """Save what is now. Asynchronously, this waits for the copies, not for the disk; that the save before it failed
        becomes one of the `problems`. `state` is JSON (tuples become lists), of each rank its own. A score of NaN is
        none. What is not `due` is kept for its score alone.
        """
        if not self._run:
            raise CheckpointError(f"{self.folder} was opened for reading alone")
        self.settle()
        state = _plain(state, "state")
        target = self.folder / f"step_{step:08d}"
        if any(saved.path == target for saved in self.complete()):
            raise CheckpointError(f"{target} exists already")
        self._saves += 1
        self._memory = snapshot = take_snapshot(self._model, self._optimizer, self._memory)
        about = {"step": step, "score": None if score is None or math.isnan(score) else float(score), "due": due}
        self._being_saved = Saved(step, target, about["score"], due)
        if self._writer is None:
            try:
                self._write(snapshot, target, state, about)
            finally:
                self._being_saved = None
        else:
            self._running = self._writer.submit(self._write, snapshot, target, state, about)

    def wait(self) -> None:
        """Until the last save is on the disk, for all ranks; raises what it raised, once."""
        if self._running is not None:
            concurrent.futures.wait([self._running])  # where Ctrl-C ends this, it is still to be waited for
        running, self._running = self._running, None
        self._being_saved = None
        if running is not None:
            running.result()

    def settle(self) -> None:
        """Wait; that the last save failed becomes one of the `problems`. There may be room for the next one."""
        try:
            self.wait()
        except Exception as error:
            self._note(str(error))

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            if self._lock is not None:
                with suppress(OSError):
                    self._lock_file(self._run).unlink()
                self._lock.close()
                self._lock = None

    def _write(self, snapshot: ShardSnapshot, target: Path, state: Any, about: Mapping[str, Any]) -> None:
        first = self._world.rank == 0
        if first and target.is_dir():  # a broken one, or save() had refused
            self._delete(target)
        temporary = self._beside(target, "incomplete")
        checkpoint_writer.write(
            snapshot,
            temporary,
            target,
            state=state,
            about=about,
            timeout=self._timeout,
            liveness=self._model.collectives.liveness,
        )
        self.broken.pop(target, None)
        self._prune(target)

    def clear_surplus(self, loaded: Saved) -> None:
        """Delete what a run that was killed after a save had still to delete. It is for after a load: of those that
        stay, one is known to be whole by then."""
        self._prune(loaded.path)

    def _prune(self, newest: Path) -> None:
        if self._world.rank != 0:
            return
        saved = self.complete()
        kept = choose_kept(saved, *self._keep)
        for one in saved:
            if one not in kept and one.path != newest:
                self._delete(one.path)

    def _delete(self, path: Path) -> None:
        try:
            checkpoint_writer.discard(path, self._beside(path, "deleted"))
        except OSError as error:  # no reason to end a run
            self._note(f"{path} could not be deleted: {error}")

    def _beside(self, path: Path, what: str) -> Path:
        return path.with_name(f"{path.name}.{self._run}-{self._saves}.{what}")

    # -- what there is -----------------------------------------------------------------------------

    def complete(self) -> list[Saved]:
        """Those that have all their files, by step. What is in the files is not read."""
        return find_complete(self.folder, self.broken, self._distrust)

    def has(self, step: int) -> bool:
        """Whether the end of this step is saved, or being saved."""
        being = self._being_saved
        return (being is not None and being.step == step) or any(saved.step == step for saved in self.complete())

    def latest(self) -> Saved | None:
        """The newest of which every byte is as it was written. Newer ones that are not are in `problems`."""
        return self._first_sound(reversed(self.complete()))

    def best(self) -> Saved | None:
        """The same, for the highest score."""
        return self._first_sound(_by_score(self.complete()))

    def is_best(self, score: float | None) -> bool:
        """Whether a checkpoint with this score would be kept for it; not where as many are as good."""
        if score is None or math.isnan(score):
            return False
        scores = {one.step: one.score for one in (*self.complete(), *filter(None, [self._being_saved]))}
        return sum(other is not None and other >= score for other in scores.values()) < self._keep[1]

    def unread(self) -> list[str]:
        """The problems that came up since the last call."""
        found, self._told = self.problems[self._told :], len(self.problems)
        return found

    def _first_sound(self, candidates: Iterable[Saved]) -> Saved | None:
        for saved in candidates:
            try:
                verify(saved.path)
            except CheckpointError as error:
                self._distrust(saved.path, error)
            else:
                return saved
        return None

    def _distrust(self, path: Path, error: CheckpointError) -> None:
        if path.exists():  # else it was deleted while it was read
            self.broken[path] = str(error)
            self._note(f"{path} is passed over: {error}")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- loading -----------------------------------------------------------------------------------

    def load(self, saved: Saved) -> dict[str, Any]:
        """Put a checkpoint into the memory of the model and the optimizer; gives the state that this rank saved.

        With another number of ranks than saved it, that is the state of rank 0.
        """
        states = checkpoint_loader.load(saved.path, self._model, self._optimizer)
        state: dict[str, Any] = states[self._world.rank if len(states) == self._world.size else 0]
        return state

    # -- the folder --------------------------------------------------------------------------------

    def _begin(self) -> str:
        """Take the folder for a new run, and clear away what dead ones left; gives the run's name, or what is wrong."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            run = self._take_name()
            self._clear()
        except OSError as error:
            return f"{self.folder} cannot be used: {error}"
        return run

    def _take_name(self) -> str:
        while True:
            run = uuid.uuid4().hex[:8]
            new = self.folder / f"run_{run}.new"
            self._lock = new.open("x")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # the kernel lets go when the process ends, however it ends
            except OSError as error:
                self._note(f"{self.folder} knows no locks, so what is left over there stays: {error}")
            try:
                new.rename(self._lock_file(run))  # it is locked from the first moment it has its name
                return run
            except FileNotFoundError:  # another run took it for a left-over, before it was locked
                self._lock.close()

    def _lock_file(self, run: str) -> Path:
        return self.folder / f"run_{run}.lock"

    def _clear(self) -> None:
        # First the folders and then the locks: who has a folder by now has had a lock before.
        folders = [(path, match[1]) for path in self.folder.iterdir() if (match := _LEFT_OVER.fullmatch(path.name))]
        locks = [(path, match[1]) for path in self.folder.iterdir() if (match := _LOCK.fullmatch(path.name))]
        alive = {run for lock, run in locks if not _remove_dead(lock)}
        for path, run in folders:
            if run not in alive:
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    self._note(f"{path} is left over and could not be deleted")


def _remove_dead(lock: Path) -> bool:
    """Remove a lock that nobody holds. It is an empty file, never a link: what else has its name is not a lock."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:  # we cannot know
        return False
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink(missing_ok=True)
    except OSError:  # it is held, or we cannot know
        return False
    finally:
        os.close(handle)
    return True


def _read_saved(path: Path) -> Saved:
    manifest, step = read_manifest(path), int(path.name.removeprefix("step_"))
    if manifest.get("step") != step:
        raise CheckpointError(f"{path} was saved as step {manifest.get('step')}")
    return Saved(step, path, manifest.get("score"), manifest.get("due", True))


def _plain(value: Any, place: str) -> Any:
    """A copy as JSON will give it back. (json itself would quietly turn a key 1 into "1".)"""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{place}[{index}]") for index, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{place} is a {type(value).__name__}, which is not JSON; nothing was written")
    for key in value:
        if not isinstance(key, str):
            raise CheckpointError(f"{place} has the key {key!r}, which is not text; nothing was written")
    return {key: _plain(inner, f"{place}[{key!r}]") for key, inner in value.items()}
