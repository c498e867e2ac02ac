"""One run: its indexes, its small files, and how far it has come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollgraph.view.growing_lines import Work
from rollgraph.view.index_store import IndexStore
from rollgraph.view.indexed_file import IndexedFile
from rollgraph.view.metrics_index import MetricsIndex
from rollgraph.view.run_files import (
    METRICS,
    SAMPLES,
    SmallFiles,
    Status,
    find_status,
)
from rollgraph.view.samples_index import SamplesIndex

MOST_STEPS = 2**53  # what is more is no number of steps
RECENT = 50  # steps whose median time says how long the others will take


class RunData:
    """Answers about one folder. Requests come from several threads: `opened()` lets one of them in at a time."""

    def __init__(self, id: str, name: str, folder: Path, store: IndexStore | None = None) -> None:
        self.id = id
        self.name = name
        self.folder = folder.resolve()
        self.work = Work()
        store = store or IndexStore.of_run(self.folder)
        self.metrics = MetricsIndex(self.folder / METRICS, store, self.work)
        self.samples = SamplesIndex(self.folder / SAMPLES, store, self.work)
        self.files = SmallFiles(self.folder)
        self._lock = threading.RLock()

    @contextmanager
    def opened(self) -> Iterator[RunData]:
        """The run as it is now, as far as one portion of each file goes."""
        with self._lock:
            self.update()
            yield self

    def update(self) -> bool:
        """Read what is new; whether anything is."""
        with self._lock:
            grew = self.metrics.update()
            return self.samples.update() or grew

    def catch_up(self, seconds: float) -> None:
        """Read for so long, or until there is nothing new, and let requests in between."""
        end = time.monotonic() + seconds
        while self.update() and not self.is_indexed and time.monotonic() < end:
            time.sleep(0.001)

    @property
    def is_indexed(self) -> bool:
        return self.metrics.share == 1.0 and self.samples.share == 1.0

    @property
    def size(self) -> int:
        """Bytes that are indexed: more of them as the run grows."""
        return self.metrics.covered + self.samples.covered

    @property
    def step(self) -> int | None:
        """The last step that was taken; None before the first one."""
        steps = self.metrics.steps()
        if len(steps) and steps[-1] >= 0:
            return int(steps[-1])
        groups = self.samples.groups
        newest = int(groups["step"][-1]) if len(groups) else -1
        return newest if newest >= 0 else None

    @property
    def steps(self) -> int | None:
        """How many the configuration asks for."""
        found = self.files.config.value.get("steps")
        return found if isinstance(found, int) and 0 <= found <= MOST_STEPS else None

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
        left = max(0, steps - 1 - self.step)  # a resumed run may have been given fewer steps than it has taken
        return float(np.median(durations)) * left if len(durations) else None

    def notes(self) -> list[str]:
        """What people should know about the files of this run."""
        found = [self.files.config.note]
        starts = self.files.starts
        found += [starts.note, _version_note(starts.value), _resume_note(starts.value)]
        for index, what in ((self.metrics, "numbers"), (self.samples, "samples")):
            found += self._file_notes(index, what)
        return [note for note in found if note]

    def _file_notes(self, index: MetricsIndex | SamplesIndex, what: str) -> list[str]:
        name = METRICS if isinstance(index, MetricsIndex) else SAMPLES
        found = []
        if index.problem and not (index.is_missing and self.status == "running"):  # before its first step
            found.append(f"{name} {index.problem}, so there are no {what} to show.")
        if index.share < 1.0:
            found.append(f"{name} is being indexed: {index.share:.0%} so far.")
        if index.ends_in_half_a_line and self.status != "running":
            found.append(f"{name} ends in a line that is half written, and left out.")
        found.append(_damage_note(name, index))
        if index.superseded:
            found.append(f"{name} has {index.superseded} entries of steps that were taken again; the last are shown.")
        return found


def _damage_note(name: str, index: IndexedFile) -> str:
    if not index.damaged:
        return ""
    lines = "1 line that is" if index.damaged == 1 else f"{index.damaged} lines that are"
    return f"{name} has {lines} damaged or of another kind, and left out."


def _version_note(starts: list[dict[str, Any]]) -> str:
    versions = starts[-1].get("versions") if starts else None
    written = versions.get("rollgraph") if isinstance(versions, dict) else None
    mine = sys.modules["rollgraph"].__version__
    if written is None or written == mine:
        return ""
    return f"rollgraph {written} wrote this run, and this page is of {mine}: what it does not know is left out."


def _resume_note(starts: list[dict[str, Any]]) -> str:
    resumed = [start.get("first_step") for start in starts[1:]]
    known = [str(step) for step in resumed if isinstance(step, int) and step > 0]
    return f"The run was resumed at step {', '.join(known)}." if known else ""
