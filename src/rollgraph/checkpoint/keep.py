"""The checkpoints of a run: saving in the background, finding intact ones, and deleting old ones.

Owns the names in the checkpoint folder, and deletes leftovers and old checkpoints. `checkpoint/write.py` owns the
contents of a checkpoint and writes it atomically. The caller owns the meaning of `state`.

    step_00000100/                          a checkpoint; only a rename creates or removes this name
    step_00000100.1f2e3d4c-7.incomplete/    being written, by the run 1f2e3d4c
    step_00000100.1f2e3d4c-7.deleted/       being deleted
    run_1f2e3d4c.lock                       locked while that run lives, so that no other run deletes what it is writing
    run_1f2e3d4c.new                        the same file before it is locked

Files with other names are never touched. Readers change nothing.
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

from rollgraph.checkpoint import load as checkpoint_loader
from rollgraph.checkpoint import write
from rollgraph.checkpoint.format import CheckpointError, read_manifest, verify
from rollgraph.checkpoint.write import ShardSnapshot, take_snapshot
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.failures import RankLost

_PAUSE = 0.5  # seconds between two checks for a lost rank, while waiting for the disk
_GRACE_SECONDS = 5.0  # for a save to fail after a rank was lost

_COMPLETE = re.compile(r"step_\d{8,}")
_LEFTOVER = re.compile(r"step_\d{8,}\.([0-9a-f]{8})-\d+\.(incomplete|deleted)")
_LOCK = re.compile(r"run_([0-9a-f]{8})\.(lock|new)")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint, e.g. SavedCheckpoint(100, Path("run/step_00000100"), score=0.7)."""

    step: int
    path: Path
    score: float | None
    due: bool = True  # False: saved only for its score


def choose_kept(saved: Sequence[SavedCheckpoint], keep_last: int, keep_best: int) -> set[SavedCheckpoint]:
    """The newest checkpoints that were due, and those with the highest scores; of equal scores, the newer one."""
    newest = sorted(
        (checkpoint for checkpoint in saved if checkpoint.due), key=lambda checkpoint: checkpoint.step, reverse=True
    )[:keep_last]
    return {*newest, *by_score(saved)[:keep_best]}


def by_score(saved: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """The checkpoints with a score, the highest first; of equal scores, the newer one first."""
    scored = [(checkpoint.score, checkpoint.step, checkpoint) for checkpoint in saved if checkpoint.score is not None]
    return [checkpoint for *_, checkpoint in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def find_checkpoints(
    folder: Path, exclude: Container[Path] = (), on_broken: Callable[[Path, CheckpointError], None] | None = None
) -> list[SavedCheckpoint]:
    """The checkpoints of a folder that have all their files, by step. The contents of the files are not read."""
    checkpoints = []
    try:
        paths = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and path not in exclude]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for path in paths:
        try:
            checkpoints.append(_read_saved(path))
        except CheckpointError as error:
            if on_broken is not None and path.exists():  # otherwise it was deleted while it was read
                on_broken(path, error)
    return sorted(checkpoints, key=lambda saved: saved.step)


class Checkpoints:
    """The checkpoints of a run, in `folder`, which all ranks see.

    All ranks create it, save and load together. `problems` are messages for people about checkpoints that were skipped
    or not written; `new_problems()` returns the new ones. Ranks wait for each other for `timeout` seconds, by default
    those of the model's collectives. Without `writes` nothing can be saved, and the folder, which must exist, may be
    read-only. `before_commit` is called on rank 0 just before a checkpoint gets its name; if it raises, there is no
    checkpoint. `find_snapshot` returns a snapshot of the end of a step, if there is one already.
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
        find_snapshot: Callable[[int], ShardSnapshot | None] | None = None,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last={keep_last}, keep_best={keep_best}: the newest one is always kept")
        self.folder = Path(folder)
        self.problems: list[str] = []
        self._reported = 0  # how many problems `new_problems` has returned
        self._model, self._optimizer = model, optimizer
        self._keep = (keep_last, keep_best)
        self._timeout = model.collectives.timeout if timeout is None else timeout
        self.broken: dict[Path, str] = {}  # checkpoints that were skipped, and why
        self._save_count = 0
        self._memory: ShardSnapshot | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous and writes else None
        self._before_commit = before_commit
        self._find_snapshot = find_snapshot
        self._running: Future[None] | None = None
        self._being_saved: SavedCheckpoint | None = None
        self._failed = False  # whether the last save failed
        self._lock: IO[str] | None = None
        self._run = ""  # the name of this run; empty without `writes`
        if writes:
            self._run = model.exchange_text(self._open_folder() if model.rank == 0 else "")[0]
            if not re.fullmatch("[0-9a-f]{8}", self._run):
                raise CheckpointError(self._run)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], score: float | None = None, *, due: bool = True) -> None:
        """Save the current weights and optimizer state.

        An asynchronous save waits for the copies to host memory, not for the disk. If the previous save failed, that
        becomes one of the `problems`, and we wait for this one: a second failure in a row is raised. `state` is JSON
        (tuples become lists), and each rank has its own. A score of NaN counts as none. A checkpoint that is not `due`
        is kept only for its score.
        """
        if not self._run:
            raise CheckpointError(f"{self.folder} was opened for reading only")
        self.finish_save()
        state = _json_copy(state, "state")
        target = self.path_of(step)
        if any(saved.path == target for saved in self.complete()):
            raise CheckpointError(f"{target} exists already")
        self._save_count += 1
        snapshot = None if self._find_snapshot is None else self._find_snapshot(step)
        if snapshot is None:
            self._memory = snapshot = take_snapshot(self._model, self._optimizer, self._memory)
        manifest_fields = {
            "step": step,
            "score": None if score is None or math.isnan(score) else float(score),
            "due": due,
        }
        self._being_saved = SavedCheckpoint(step, target, manifest_fields["score"], due)
        if self._writer is None:
            try:
                self._write(snapshot, target, state, manifest_fields)
            finally:
                self._being_saved = None
        else:
            self._running = self._writer.submit(self._write, snapshot, target, state, manifest_fields)
            if self._failed:
                self.wait()
                self._failed = False

    @property
    def is_saving(self) -> bool:
        """Whether a save has been started and not yet waited for; the same on all ranks."""
        return self._running is not None

    @property
    def has_failed(self) -> bool:
        """Whether that save is known to have failed. Ranks learn of it at different times."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def wait(self) -> None:
        """Wait until the last save is on disk for all ranks. Raises its error, once; RankLost if a rank is lost."""
        if self._running is not None:
            self._wait_for_disk(self._running)  # after Ctrl-C we may wait again
        running, self._running = self._running, None
        self._being_saved = None
        if running is not None:
            running.result()

    def _wait_for_disk(self, running: Future[None]) -> None:
        """Wait for a slow disk without a time-out. Once a rank is lost, wait only a little: the save should fail."""
        liveness = self._model.collectives.liveness
        seconds_left = _GRACE_SECONDS
        while concurrent.futures.wait([running], timeout=_PAUSE).not_done:
            if liveness is not None and liveness.loss is not None:
                seconds_left -= _PAUSE
                if seconds_left < 0:
                    liveness.check()

    def finish_save(self) -> None:
        """Wait for the last save. A failure becomes one of the `problems`: the disk may have room for the next one."""
        try:
            self.wait()
        except RankLost:
            raise
        except Exception as error:
            self._failed = True
            self._note(str(error))

    def close(self) -> None:
        """Wait for the last save, and release the folder."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                was_interrupted = self._running is not None  # by Ctrl-C or a lost rank: do not wait for this save
                self._writer.shutdown(wait=not was_interrupted)
            if self._lock is not None:
                with suppress(OSError):
                    self._lock_file(self._run).unlink()
                self._lock.close()
                self._lock = None

    def _write(self, snapshot: ShardSnapshot, target: Path, state: Any, manifest_fields: Mapping[str, Any]) -> None:
        if self._model.rank == 0 and target.is_dir():  # broken, or save() would have refused
            self._delete(target)
        temporary = self._temporary_path(target, "incomplete")
        write.write(
            snapshot,
            temporary,
            target,
            state=state,
            manifest_fields=manifest_fields,
            timeout=self._timeout,
            liveness=self._model.collectives.liveness,
            before_commit=self._before_commit,
        )
        self.broken.pop(target, None)
        self._prune(target)

    def prune_after_load(self, loaded: SavedCheckpoint) -> None:
        """Delete the checkpoints that a killed run did not get to delete.

        Call this after a load, when one of the checkpoints that stay is known to be intact.
        """
        self._prune(loaded.path)

    def _prune(self, newest: Path) -> None:
        if self._model.rank != 0:
            return
        saved = self.complete()
        to_keep = choose_kept(saved, *self._keep)
        for checkpoint in saved:
            if checkpoint not in to_keep and checkpoint.path != newest:
                self._delete(checkpoint.path)

    def _delete(self, path: Path) -> None:
        try:
            write.discard(path, self._temporary_path(path, "deleted"))
        except OSError as error:  # not a reason to end the run
            self._note(f"{path} could not be deleted: {error}")

    def _temporary_path(self, path: Path, what: str) -> Path:
        return path.with_name(f"{path.name}.{self._run}-{self._save_count}.{what}")

    # -- finding -----------------------------------------------------------------------------------

    def complete(self) -> list[SavedCheckpoint]:
        """The checkpoints that have all their files, by step. The contents of the files are not read."""
        return find_checkpoints(self.folder, self.broken, self._mark_broken)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def has(self, step: int) -> bool:
        """Whether the end of this step is saved, or being saved."""
        being_saved = self._being_saved
        return (being_saved is not None and being_saved.step == step) or any(
            saved.step == step for saved in self.complete()
        )

    def latest(self) -> SavedCheckpoint | None:
        """The newest intact checkpoint, verified byte by byte. Newer ones that are damaged go to `problems`."""
        return self.newest_intact(self.complete())

    def newest_intact(
        self, complete: Sequence[SavedCheckpoint], broken: Mapping[Path, CheckpointError] = MappingProxyType({})
    ) -> SavedCheckpoint | None:
        """The newest intact one of these checkpoints, which an earlier scan of the folder returned."""
        for path, error in broken.items():
            self._mark_broken(path, error)
        return self._first_intact(reversed(complete))

    def best(self) -> SavedCheckpoint | None:
        """The intact checkpoint with the highest score, verified byte by byte."""
        return self._first_intact(by_score(self.complete()))

    def is_best(self, score: float | None) -> bool:
        """Whether `keep_best` would keep a checkpoint with this score: fewer than that many others score as high."""
        if score is None or math.isnan(score):
            return False
        scores = {
            checkpoint.step: checkpoint.score for checkpoint in (*self.complete(), *filter(None, [self._being_saved]))
        }
        return sum(saved is not None and saved >= score for saved in scores.values()) < self._keep[1]

    def new_problems(self) -> list[str]:
        """The problems since the last call."""
        new, self._reported = self.problems[self._reported :], len(self.problems)
        return new

    def _first_intact(self, candidates: Iterable[SavedCheckpoint]) -> SavedCheckpoint | None:
        for saved in candidates:
            try:
                verify(saved.path)
            except CheckpointError as error:
                self._mark_broken(saved.path, error)
            else:
                return saved
        return None

    def _mark_broken(self, path: Path, error: CheckpointError) -> None:
        if path.exists():  # otherwise it was deleted while it was read
            self.broken[path] = str(error)
            self._note(f"{path} is skipped: {error}")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- loading -----------------------------------------------------------------------------------

    def load(self, saved: SavedCheckpoint) -> dict[str, Any]:
        """Load a checkpoint into model and optimizer. Returns the state that this rank saved.

        If it was saved with another number of ranks or another `tensor_parallel`, returns the state of rank 0.
        """
        states = checkpoint_loader.load(saved.path, self._model, self._optimizer)
        tensor_parallel = read_manifest(saved.path).get("tensor_parallel", 1)
        same_layout = (len(states), tensor_parallel) == (self._model.ranks, self._model.tensor_parallel)
        state: dict[str, Any] = states[self._model.rank if same_layout else 0]
        return state

    # -- the folder --------------------------------------------------------------------------------

    def _open_folder(self) -> str:
        """Open the folder for a new run, and clear leftovers of dead runs. Returns the run's name, or a problem."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            run = self._lock_new_name()
            self._clear()
        except OSError as error:
            return f"{self.folder} cannot be used: {error}"
        return run

    def _lock_new_name(self) -> str:
        while True:
            run = uuid.uuid4().hex[:8]
            new = self.folder / f"run_{run}.new"
            self._lock = new.open("x")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
            except OSError as error:
                self._note(f"{self.folder} has no file locks, so leftovers in it stay: {error}")
            try:
                new.rename(self._lock_file(run))  # so a file of this name is always locked by its run
                return run
            except FileNotFoundError:  # another run removed it as a leftover before it was locked
                self._lock.close()

    def _lock_file(self, run: str) -> Path:
        return self.folder / f"run_{run}.lock"

    def _clear(self) -> None:
        # List folders first, then locks: a run whose folder is listed took its lock before.
        folders = [(path, match[1]) for path in self.folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))]
        locks = [(path, match[1]) for path in self.folder.iterdir() if (match := _LOCK.fullmatch(path.name))]
        alive = {run for lock, run in locks if not _remove_dead(lock)}
        for path, run in folders:
            if run not in alive:
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    self._note(f"{path} is a leftover that could not be deleted")


def _remove_dead(lock: Path) -> bool:
    """Remove a lock that no process holds; returns whether it is gone. Only an empty regular file is a lock."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:  # unknown
        return False
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink(missing_ok=True)
    except OSError:  # locked, or unknown
        return False
    finally:
        os.close(handle)
    return True


def _read_saved(path: Path) -> SavedCheckpoint:
    manifest, step = read_manifest(path), int(path.name.removeprefix("step_"))
    if manifest.get("step") != step:
        raise CheckpointError(f"{path} was saved as step {manifest.get('step')}")
    return SavedCheckpoint(step, path, manifest.get("score"), manifest.get("due", True))


def _json_copy(value: Any, path_in_state: str) -> Any:
    """A copy as JSON would return it. Raises for other types, and for keys like 1, which json turns into "1"."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_json_copy(inner, f"{path_in_state}[{index}]") for index, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path_in_state} is a {type(value).__name__}, which is not JSON; nothing was written")
    for key in value:
        if not isinstance(key, str):
            raise CheckpointError(f"{path_in_state} has the key {key!r}, which is not text; nothing was written")
    return {key: _json_copy(inner, f"{path_in_state}[{key!r}]") for key, inner in value.items()}
