"""One run with its indexes and files (`RunData`), and all runs below the folders on the command line (`Catalog`)."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollgraph.view.index import Database, IndexedFile, MetricsIndex, ReadCounters, SamplesIndex
from rollgraph.view.run_files import METRICS, SAMPLES, SmallFiles, Status, find_status, is_run_folder

# -- one run ---------------------------------------------------------------------------------------

MAX_STEPS = 2**53  # a larger value of `steps` is ignored
RECENT = 50  # steps whose median duration predicts the remaining time


class RunData:
    """One run. The server's requests come from several threads; `opened()` admits one of them at a time."""

    def __init__(self, id: str, name: str, folder: Path, database: Database | None = None) -> None:
        self.id = id
        self.name = name
        self.folder = folder.resolve()
        self.counters = ReadCounters()
        self._database = database or Database.for_run(self.folder)
        self.metrics = MetricsIndex(self.folder / METRICS, self._database, self.counters)
        self.samples = SamplesIndex(self.folder / SAMPLES, self._database, self.counters)
        self.files = SmallFiles(self.folder)
        self._lock = threading.RLock()

    @contextmanager
    def opened(self) -> Iterator[RunData]:
        """Lock the run and read what is new, up to `UPDATE_BYTES` of each file.

        Inside, texts are read from the files as they were indexed, even if a resumed run replaces them meanwhile.
        """
        with self._lock:
            try:
                self._read_new_lines()
                yield self
            except sqlite3.DatabaseError as error:
                self._database.fall_back(error)  # the next request gets an answer
                raise
            finally:
                self._close_files()
                self._database.close()

    def update(self) -> bool:
        """Read new lines of both files. Returns whether anything changed."""
        with self._lock:
            try:
                return self._read_new_lines()
            finally:
                self._close_files()

    def _read_new_lines(self) -> bool:
        try:
            grew = self.metrics.update()
            return self.samples.update() or grew
        except sqlite3.DatabaseError as error:
            self._database.fall_back(error)
            return self._read_new_lines()
        finally:
            self._database.end_snapshot()

    def _close_files(self) -> None:
        self.metrics.close()
        self.samples.close()

    def catch_up(self, seconds: float) -> None:
        """Index for at most `seconds`, or until all is indexed; other requests may run in between."""
        end = time.monotonic() + seconds
        while self.update() and not self.is_indexed and time.monotonic() < end:
            time.sleep(0.001)

    @property
    def is_indexed(self) -> bool:
        return self.metrics.indexed_fraction == 1.0 and self.samples.indexed_fraction == 1.0

    @property
    def size(self) -> int:
        """Indexed bytes; they grow with the run."""
        return self.metrics.progress.indexed_bytes + self.samples.progress.indexed_bytes

    @property
    def step(self) -> int | None:
        """The last finished step; None before the first one."""
        for index in (self.metrics, self.samples):
            step = index.progress.last_step
            if step is not None and step >= 0:
                return int(step)
        return None

    @property
    def steps(self) -> int | None:
        """The number of steps in the configuration; None if it is not known."""
        steps = self.files.config.value.get("steps")
        return steps if isinstance(steps, int) and 0 <= steps <= MAX_STEPS else None

    @property
    def status(self) -> Status:
        return find_status(self.folder, self.step, self.steps)

    def summary(self) -> dict[str, Any]:
        """The entry of this run in the list of runs."""
        status = self.status
        return {
            "id": self.id,
            "name": self.name,
            "path": str(self.folder),
            "status": status,
            "size": self.size,
            "step": self.step,
            "steps": self.steps,
            "seconds_left": self._seconds_left() if status == "running" else None,
        }

    def _seconds_left(self) -> float | None:
        steps = self.steps
        if steps is None or self.step is None:
            return None
        durations = self.metrics.column("speed/seconds")[-RECENT:]
        durations = durations[np.isfinite(durations)]
        steps_left = max(0, steps - 1 - self.step)  # a resumed run may have fewer `steps` than it has taken
        return float(np.median(durations)) * steps_left if len(durations) else None

    def notes(self) -> list[str]:
        """Sentences about missing, damaged or partly read files, for the top of the page."""
        notes = [self.files.config.note]
        starts = self.files.starts
        notes += [starts.note, _version_note(starts.value), _resume_note(starts.value)]
        for index, contents in ((self.metrics, "numbers"), (self.samples, "samples")):
            notes += self._file_notes(index, contents)
        return [note for note in notes if note]

    def _file_notes(self, index: MetricsIndex | SamplesIndex, contents: str) -> list[str]:
        name = METRICS if isinstance(index, MetricsIndex) else SAMPLES
        notes = []
        if index.problem and not (index.is_missing and self.status == "running"):  # before its first step
            notes.append(f"{name} {index.problem}, so there are no {contents} to show.")
        if index.indexed_fraction < 1.0:
            notes.append(f"{name} is being indexed: {index.indexed_fraction:.0%} so far.")
        if index.has_partial_line and self.status != "running":
            notes.append(f"{name} ends in a half-written line, which is left out.")
        notes.append(_damage_note(name, index))
        if index.superseded_count:
            notes.append(
                f"{name} has {index.superseded_count} entries of steps that were taken again; the last are shown."
            )
        return notes


def _damage_note(name: str, index: IndexedFile) -> str:
    damaged_lines = index.progress.damaged_lines
    if not damaged_lines:
        return ""
    lines = "1 line that is" if damaged_lines == 1 else f"{damaged_lines} lines that are"
    return f"{name} has {lines} damaged or not a record, and left out."


def _version_note(starts: list[dict[str, Any]]) -> str:
    versions = starts[-1].get("versions") if starts else None
    run_version = versions.get("rollgraph") if isinstance(versions, dict) else None
    current = sys.modules["rollgraph"].__version__
    if run_version is None or run_version == current:
        return ""
    return f"rollgraph {run_version} wrote this run and {current} shows it: fields that it does not know are left out."


def _resume_note(starts: list[dict[str, Any]]) -> str:
    resumed = [start.get("first_step") for start in starts[1:]]
    steps = [str(step) for step in resumed if isinstance(step, int) and step > 0]
    return f"The run was resumed at step {', '.join(steps)}." if steps else ""


# -- all runs --------------------------------------------------------------------------------------

MAX_DEPTH = 3  # levels below each folder that are searched for runs
MAX_FOLDERS = 2000  # most folders searched below each folder


class UnknownRun(LookupError):
    """The catalog has no run with this id."""

    def __init__(self, id: str) -> None:
        self.id = id
        super().__init__(f"there is no run {id!r}")


class Catalog:
    """Finds runs below the given folders. The id of a run stays the same for the life of the catalog."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._runs: dict[str, RunData] = {}
        self._ids: dict[Path, str] = {}
        self.notes: list[str] = []  # about folders that could not be searched
        self._lock = threading.Lock()

    def find(self) -> list[RunData]:
        """All runs that exist now, in the order of the folders."""
        with self._lock:
            runs: dict[str, RunData] = {}
            notes: list[str] = []
            for root in self._folders:
                for folder in _find_runs(root, notes):
                    if folder not in self._ids:
                        self._add(root, folder)
                    id = self._ids[folder]
                    runs[id] = self._runs[id]
            self.notes = notes
            return list(runs.values())

    def known_runs(self) -> list[RunData]:
        """The runs found so far, without searching again."""
        with self._lock:
            return list(self._runs.values())

    def get(self, id: str) -> RunData:
        if id not in self._runs:
            self.find()
        with self._lock:
            run = self._runs.get(id)
        if run is None or not is_run_folder(run.folder):  # its folder may have been deleted
            raise UnknownRun(id)
        return run

    def _add(self, root: Path, folder: Path) -> None:
        name = folder.relative_to(root.parent).as_posix() if folder != root else folder.name
        id = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "run"
        if id in self._runs:
            id = f"{id}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]}"
        self._ids[folder] = id
        self._runs[id] = RunData(id, name, folder)


def _find_runs(root: Path, notes: list[str]) -> Iterator[Path]:
    """The folder itself if it is a run, otherwise the runs below it. Links are not followed."""
    level = [root]
    looked_at = 0
    for _ in range(MAX_DEPTH + 1):
        next_level: list[Path] = []
        for folder in level:
            looked_at += 1
            if looked_at > MAX_FOLDERS:
                notes.append(f"{root.name} has many folders: only the first {MAX_FOLDERS:,} were searched for runs.")
                return
            if is_run_folder(folder):
                yield folder
                continue
            try:
                next_level += _subfolders(folder)
            except OSError as error:
                notes.append(f"{folder.name} cannot be read: {error.strerror}.")
        level = next_level


def _subfolders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [folder / name for name in sorted(names) if not name.startswith((".", "checkpoints"))]
