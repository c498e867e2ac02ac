"""Reads the small files of a run's folder: configuration, starts and lock. Also decides whether the run is alive."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped, unused-ignore]

from rollgraph.files import FileError, MissingFile, open_regular, read_json_object

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
STARTS = "starts.jsonl"
CONFIG = "config.yaml"
GRAPHS = "graphs.json"
LOCK = "run.lock"
MAX_FILE_BYTES = 64 << 20  # most bytes read of a small file
MAX_CONFIG_VALUES = 50_000

Status = Literal["running", "finished", "stopped", "unknown"]
_LOCK_OWNER = re.compile(r"process (\d+) on (.*)")
ALIVE_SECONDS = 600  # a run on another machine counts as running if it wrote within this time


@dataclass
class NotedValue:
    """The value read from a file, and a sentence for the user if it is missing or damaged."""

    value: Any
    note: str = ""


class SmallFiles:
    """The contents of a run's small files, read again only after they have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache: dict[str, tuple[object, NotedValue]] = {}

    @property
    def config(self) -> NotedValue:
        return self._read(CONFIG, read_run_config)

    @property
    def starts(self) -> NotedValue:
        return self._read(STARTS, read_starts)

    def _read(self, name: str, read: Callable[[Path], NotedValue]) -> NotedValue:
        try:
            status = (self.folder / name).stat()
            version: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            version = None
        cached = self._cache.get(name)
        if cached is None or cached[0] != version:
            self._cache[name] = (version, read(self.folder))
        return self._cache[name][1]


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is that of a run; False if it cannot be read."""
    return any(os.path.isfile(folder / name) for name in (METRICS, SAMPLES, STARTS))


def path_in(folder: Path, name: str) -> Path:
    """The path of a file in `folder`, which must be resolved. Refuses a link that leads out of the folder."""
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(folder):
        raise FileError(path, "is a link to somewhere else, and is not shown")
    return path


def read_run_config(folder: Path) -> NotedValue:
    """The configuration of the last start, as nested dictionaries."""
    try:
        with open_regular(path_in(folder, CONFIG)) as file:
            tree = yaml.safe_load(file.read(MAX_FILE_BYTES))
    except MissingFile:
        return NotedValue({}, f"{CONFIG} is missing, so the configuration is not known.")
    except Exception:  # PyYAML does not wrap what its conversions of dates and numbers raise
        return NotedValue({}, f"{CONFIG} cannot be read, so the configuration is not known.")
    if not _is_small(tree):
        return NotedValue({}, f"{CONFIG} is too large to be shown, so the configuration is not known.")
    if not isinstance(tree, dict):
        return NotedValue({}, f"{CONFIG} does not hold a configuration.")
    return NotedValue(tree)


def _is_small(tree: Any) -> bool:
    """Whether a tree has few enough values to walk. A few lines of YAML aliases can expand to billions."""
    pending = [tree]
    for _ in range(MAX_CONFIG_VALUES):
        if not pending:
            return True
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False


def read_starts(folder: Path) -> NotedValue:
    """All starts of the run; damaged lines are left out."""
    starts: list[dict[str, Any]] = []
    damaged = 0
    try:
        with open_regular(path_in(folder, STARTS)) as file:
            lines = file.read(MAX_FILE_BYTES).splitlines()
    except MissingFile:
        return NotedValue([], f"{STARTS} is missing, so it is not known when and how the run was started.")
    except FileError as error:
        return NotedValue([], f"{error}.")
    for line in lines:
        try:
            start = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(start, dict):
            starts.append(start)
    return NotedValue(starts, f"{STARTS} has {damaged} damaged lines, which are left out." if damaged else "")


def read_small_object(folder: Path, name: str, missing_note: str) -> NotedValue:
    """A JSON object; None with `missing_note` if there is no such file."""
    try:
        return NotedValue(read_json_object(path_in(folder, name)))
    except MissingFile:
        return NotedValue(None, missing_note)
    except FileError as error:
        return NotedValue(None, f"{error}.")


def last_modified(folder: Path, *names: str) -> float | None:
    """The modification time of the newest of these files, in seconds since 1970; None if none exists."""
    times = []
    for name in names:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def find_status(folder: Path, step: int | None, steps: int | None) -> Status:
    """Whether the run is running, from its lock, its steps and the file that it writes last."""
    owner = _read_owner(folder)
    if owner is not None:
        process, host = owner
        if host == socket.gethostname():
            return "running" if _is_alive(process) else "stopped"
        updated = last_modified(folder, METRICS, SAMPLES, LOCK)
        recent = updated is not None and time.time() - updated < ALIVE_SECONDS
        return "running" if recent else "unknown"
    if step is None:
        return "unknown"
    all_taken = steps is None or step + 1 >= steps
    return "finished" if all_taken and os.path.isfile(folder / GRAPHS) else "stopped"


def _read_owner(folder: Path) -> tuple[int, str] | None:
    try:
        with open_regular(path_in(folder, LOCK)) as file:
            match = _LOCK_OWNER.match(file.read(1000).decode("utf-8", "replace"))
    except FileError:
        return None
    return (int(match[1]), match[2].strip()) if match else None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # the process belongs to another user
    return True
