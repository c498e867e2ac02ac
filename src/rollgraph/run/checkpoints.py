"""The checkpoints of a run: which are whole, which are kept, and saving in the background.

Owns the names in the checkpoint folder, and clearing and pruning it. `sharding/checkpoint_writer.py` owns the contents
of a checkpoint and makes it appear whole or not at all; the caller owns the meaning of `state`.

    step_00000100/                          a checkpoint; only a rename creates or removes this name
    step_00000100.1f2e3d4c-7.incomplete/    being written, by the run 1f2e3d4c
    step_00000100.1f2e3d4c-7.deleted/       being deleted
    run_1f2e3d4c.lock                       locked while that run lives, so that nobody clears what it is writing
    run_1f2e3d4c.new                        the same file before it is locked

Any other name belongs to somebody else and is never touched. Readers change nothing.
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
from types import MappingProxyType
from typing import IO, Any

from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.sharding import CheckpointError, ShardedAdamW, ShardedModel, checkpoint_loader, checkpoint_writer
from rollgraph.sharding.manifest import read_manifest, verify
from rollgraph.sharding.shard_snapshot import ShardSnapshot, take_snapshot

_PAUSE = 0.5  # seconds between two looks at the other ranks, while the disk is at work
_GRACE_SECONDS = 5.0  # for a save to give up after a rank was lost

_COMPLETE = re.compile(r"step_\d{8,}")
_LEFT_OVER = re.compile(r"step_\d{8,}\.([0-9a-f]{8})-\d+\.(incomplete|deleted)")
_LOCK = re.compile(r"run_([0-9a-f]{8})\.(lock|new)")


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint, e.g. Saved(100, Path("run/step_00000100"), score=0.7)."""

    step: int
    path: Path
    score: float | None
    due: bool = True  # False: it was saved for its score alone


def choose_kept(saved: Sequence[Saved], keep_last: int, keep_best: int) -> set[Saved]:
    """The newest checkpoints that were due, and those with the highest scores; of equal scores, the newer one."""
    newest = sorted((one for one in saved if one.due), key=lambda one: one.step, reverse=True)[:keep_last]
    return {*newest, *by_score(saved)[:keep_best]}


def by_score(saved: Iterable[Saved]) -> list[Saved]:
    """Those that have a score, the highest first; of equal scores, the newer one first."""
    scored = [(one.score, one.step, one) for one in saved if one.score is not None]
    return [one for *_, one in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def find_complete(
    folder: Path, without: Container[Path] = (), on_broken: Callable[[Path, CheckpointError], None] | None = None
) -> list[Saved]:
    """The checkpoints of a folder that have all their files, by step. The contents of the files are not read."""
    found = []
    try:
        paths = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and path not in without]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for path in paths:
        try:
            found.append(_read_saved(path))
        except CheckpointError as error:
            if on_broken is not None and path.exists():  # otherwise it was deleted while it was read
                on_broken(path, error)
    return sorted(found, key=lambda saved: saved.step)


class Checkpoints:
    """The checkpoints of a run, in `folder`, which all ranks see.

    All ranks create it, save and load together. `problems` tells people what was skipped or not written, and why;
    `unread()` returns the new ones. Ranks wait for each other for `timeout` seconds, by default those of the model's
    collectives. Without `writes` nothing can be saved, and the folder, which must exist, may be read-only.
    `before_commit` is called on rank 0 before a checkpoint gets its name; if it raises, there is none.
    `kept` gives a snapshot of the end of a step, if there is one already.
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
        before_commit: Callable[[], None] | None = None,
        kept: Callable[[int], ShardSnapshot | None] | None = None,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last={keep_last}, keep_best={keep_best}: the newest one is always kept")
        self.folder = Path(folder)
        self.problems: list[str] = []
        self._told = 0  # of the problems
        self._model, self._optimizer = model, optimizer
        self._keep = (keep_last, keep_best)
        self._timeout = model.collectives.timeout if timeout is None else timeout
        self.broken: dict[Path, str] = {}  # those that were passed over, and why
        self._saves = 0
        self._memory: ShardSnapshot | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous and writes else None
        self._before_commit = before_commit
        self._kept = kept
        self._running: Future[None] | None = None
        self._being_saved: Saved | None = None
        self._lock: IO[str] | None = None
        self._run = ""  # the name of this run, where it writes
        if writes:
            self._run = model.exchange_text(self._begin() if model.rank == 0 else "")[0]
            if not re.fullmatch("[0-9a-f]{8}", self._run):
                raise CheckpointError(self._run)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], score: float | None = None, *, due: bool = True) -> None:
        """Save the current weights and optimizer state.

        An asynchronous save waits for the copies, not for the disk. If the save before it failed, that becomes one of
        the `problems`. `state` is JSON (tuples become lists), and each rank has its own. A score of NaN counts as none.
        A checkpoint that is not `due` is kept for its score alone.
        """
        if not self._run:
            raise CheckpointError(f"{self.folder} was opened for reading only")
        self.settle()
        state = _plain(state, "state")
        target = self.path_of(step)
        if any(saved.path == target for saved in self.complete()):
            raise CheckpointError(f"{target} exists already")
        self._saves += 1
        snapshot = None if self._kept is None else self._kept(step)
        if snapshot is None:
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
        """Wait until the last save is on disk for all ranks; raise what it raised, once. RankLost if a rank is lost."""
        if self._running is not None:
            self._wait_for_disk(self._running)  # after Ctrl-C it can be waited for again
        running, self._running = self._running, None
        self._being_saved = None
        if running is not None:
            running.result()

    def _wait_for_disk(self, running: Future[None]) -> None:
        """Wait without end for a slow disk, but not once a rank is lost: the save ends by itself then, if it can."""
        liveness = self._model.collectives.liveness
        patience = _GRACE_SECONDS
        while concurrent.futures.wait([running], timeout=_PAUSE).not_done:
            if liveness is not None and liveness.loss is not None:
                patience -= _PAUSE
                if patience < 0:
                    liveness.check()

    def settle(self) -> None:
        """Wait. If the last save failed, that becomes one of the `problems`: the disk may have room for the next."""
        try:
            self.wait()
        except RankLost:
            raise
        except Exception as error:
            self._note(str(error))

    def close(self) -> None:
        """Wait, and release the folder."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown(wait=self._running is None)
            if self._lock is not None:
                with suppress(OSError):
                    self._lock_file(self._run).unlink()
                self._lock.close()
                self._lock = None

    def _write(self, snapshot: ShardSnapshot, target: Path, state: Any, about: Mapping[str, Any]) -> None:
        if self._model.rank == 0 and target.is_dir():  # broken, or save() would have refused
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
            before_commit=self._before_commit,
        )
        self.broken.pop(target, None)
        self._prune(target)

    def clear_surplus(self, loaded: Saved) -> None:
        """Delete what a killed run did not get to delete. Call this after a load: one of those that stay is then known
        to be whole.
        """
        self._prune(loaded.path)

    def _prune(self, newest: Path) -> None:
        if self._model.rank != 0:
            return
        saved = self.complete()
        kept = choose_kept(saved, *self._keep)
        for one in saved:
            if one not in kept and one.path != newest:
                self._delete(one.path)

    def _delete(self, path: Path) -> None:
        try:
            checkpoint_writer.discard(path, self._beside(path, "deleted"))
        except OSError as error:  # not a reason to end the run
            self._note(f"{path} could not be deleted: {error}")

    def _beside(self, path: Path, what: str) -> Path:
        return path.with_name(f"{path.name}.{self._run}-{self._saves}.{what}")

    # -- what there is -----------------------------------------------------------------------------

    def complete(self) -> list[Saved]:
        """The checkpoints that have all their files, by step. The contents of the files are not read."""
        return find_complete(self.folder, self.broken, self._distrust)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def has(self, step: int) -> bool:
        """Whether the end of this step is saved, or being saved."""
        being = self._being_saved
        return (being is not None and being.step == step) or any(saved.step == step for saved in self.complete())

    def latest(self) -> Saved | None:
        """The newest checkpoint of which every byte is as it was written; newer ones that are not go to `problems`."""
        return self.newest_sound(self.complete())

    def newest_sound(
        self, found: Sequence[Saved], broken: Mapping[Path, CheckpointError] = MappingProxyType({})
    ) -> Saved | None:
        """The same, for a folder that was scanned before."""
        for path, error in broken.items():
            self._distrust(path, error)
        return self._first_sound(reversed(found))

    def best(self) -> Saved | None:
        """The checkpoint with the highest score of which every byte is as it was written."""
        return self._first_sound(by_score(self.complete()))

    def is_best(self, score: float | None) -> bool:
        """Whether a checkpoint with this score would be kept for it; not if enough others are as good."""
        if score is None or math.isnan(score):
            return False
        scores = {one.step: one.score for one in (*self.complete(), *filter(None, [self._being_saved]))}
        return sum(other is not None and other >= score for other in scores.values()) < self._keep[1]

    def unread(self) -> list[str]:
        """The problems since the last call."""
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
        if path.exists():  # otherwise it was deleted while it was read
            self.broken[path] = str(error)
            self._note(f"{path} is skipped: {error}")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- loading -----------------------------------------------------------------------------------

    def load(self, saved: Saved) -> dict[str, Any]:
        """Copy a checkpoint into the model and the optimizer, and return the state that this rank saved.

        If another number of ranks saved it, or divided layers in another way, return the state of rank 0.
        """
        states = checkpoint_loader.load(saved.path, self._model, self._optimizer)
        divided = read_manifest(saved.path).get("tensor_parallel", 1)
        same = (len(states), divided) == (self._model.ranks, self._model.tensor_parallel)
        state: dict[str, Any] = states[self._model.rank if same else 0]
        return state

    # -- the folder --------------------------------------------------------------------------------

    def _begin(self) -> str:
        """Open the folder for a new run and clear what dead runs left; return the run's name, or what is wrong."""
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
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
            except OSError as error:
                self._note(f"{self.folder} has no file locks, so leftovers in it stay: {error}")
            try:
                new.rename(self._lock_file(run))  # so a lock of this name is locked from the start
                return run
            except FileNotFoundError:  # another run removed it as a leftover before it was locked
                self._lock.close()

    def _lock_file(self, run: str) -> Path:
        return self.folder / f"run_{run}.lock"

    def _clear(self) -> None:
        # Folders first, then locks: a run that has a folder by now took its lock before.
        folders = [(path, match[1]) for path in self.folder.iterdir() if (match := _LEFT_OVER.fullmatch(path.name))]
        locks = [(path, match[1]) for path in self.folder.iterdir() if (match := _LOCK.fullmatch(path.name))]
        alive = {run for lock, run in locks if not _remove_dead(lock)}
        for path, run in folders:
            if run not in alive:
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    self._note(f"{path} is a leftover that could not be deleted")


def _remove_dead(lock: Path) -> bool:
    """Remove a lock that nobody holds. A lock is an empty regular file; anything else of that name is left alone."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:  # unknown
        return False
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink(missing_ok=True)
    except OSError:  # held, or unknown
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
    """A copy as JSON will return it. (json itself would silently turn the key 1 into "1".)"""
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
