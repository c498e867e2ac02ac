"""The runs that may be shown: the folders that were named, and those below them that hold runs. No others."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollgraph.view.run_data import RunData
from rollgraph.view.run_files import is_run

DEPTH = 3  # levels below a named folder in which runs are looked for
MOST = 2000  # folders that are looked at


class UnknownRun(LookupError):
    """No run that is shown has this id."""

    def __init__(self, id: str) -> None:
        self.id = id
        super().__init__(f"there is no run {id!r}")


class Catalog:
    """Finds runs, and gives each an id that stays the same as long as the page is served."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._runs: dict[str, RunData] = {}
        self._ids: dict[Path, str] = {}
        self.notes: list[str] = []  # on what was not found
        self._lock = threading.Lock()

    def find(self) -> list[RunData]:
        """All runs there are now, in the order of the folders."""
        with self._lock:
            found: dict[str, RunData] = {}
            notes: list[str] = []
            for named in self._folders:
                for folder in _find_runs(named, notes):
                    if folder not in self._ids:
                        self._add(named, folder)
                    id = self._ids[folder]
                    found[id] = self._runs[id]
            self.notes = notes
            return list(found.values())

    def known(self) -> list[RunData]:
        """The runs that were found so far."""
        with self._lock:
            return list(self._runs.values())

    def get(self, id: str) -> RunData:
        if id not in self._runs:
            self.find()
        with self._lock:
            run = self._runs.get(id)
        if run is None or not is_run(run.folder):  # its folder may have been deleted
            raise UnknownRun(id)
        return run

    def _add(self, named: Path, folder: Path) -> None:
        name = folder.relative_to(named.parent).as_posix() if folder != named else folder.name
        id = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "run"
        if id in self._runs:
            id = f"{id}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]}"
        self._ids[folder] = id
        self._runs[id] = RunData(id, name, folder)


def _find_runs(named: Path, notes: list[str]) -> Iterator[Path]:
    """The folder itself if it is a run, otherwise the runs below it. Links are not followed."""
    level = [named]
    looked_at = 0
    for _ in range(DEPTH + 1):
        deeper: list[Path] = []
        for folder in level:
            looked_at += 1
            if looked_at > MOST:
                notes.append(f"{named.name} has many folders, and runs are shown from the first {MOST:,} of them only.")
                return
            if is_run(folder):
                yield folder
                continue
            try:
                deeper += _subfolders(folder)
            except OSError as error:
                notes.append(f"{folder.name} cannot be read: {error.strerror}.")
        level = deeper


def _subfolders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [folder / name for name in sorted(names) if not name.startswith((".", "checkpoints"))]
