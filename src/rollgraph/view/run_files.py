"""The small files of a run's folder: its configuration, its starts, its graphs, its plan, and whether it is alive."""

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

from rollgraph.files import FileError, MissingFile, open_regular, read_object

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
STARTS = "starts.jsonl"
CONFIG = "config.yaml"
GRAPHS = "graphs.json"
LOCK = "run.lock"
LARGEST = 64 << 20  # bytes of a small file; what is larger is not read
MOST_VALUES = 50_000  # of a configuration

Status = Literal["running", "finished", "stopped", "unknown"]
_OWNER = re.compile(r"process (\d+) on (.*)")
ALIVE_SECONDS = 600  # a run on another machine that has written since then counts as running


@dataclass
class Noted:
    """Something that was read, and what people should know about it."""

    value: Any
    note: str = ""


class SmallFiles:
    """What the small files of a folder hold, read again only when they have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[object, Noted]] = {}

    @property
    def config(self) -> Noted:
        return self._read(CONFIG, read_config)

    @property
    def starts(self) -> Noted:
        return self._read(STARTS, read_starts)

    def _read(self, name: str, read: Callable[[Path], Noted]) -> Noted:
        try:
            status = (self.folder / name).stat()
            version: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            version = None
        known = self._known.get(name)
        if known is None or known[0] != version:
            self._known[name] = (version, read(self.folder))
        return self._known[name][1]


def is_run(folder: Path) -> bool:
    """False also for a folder that may not be read."""
    return any(os.path.isfile(folder / name) for name in (METRICS, SAMPLES, STARTS))


def path_in(folder: Path, name: str) -> Path:
    """A file of the folder, which is given without links. What a link leads to elsewhere is not shown."""
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(folder):
        raise FileError(path, "is a link to somewhere else, and is not shown")
    return path


def read_config(folder: Path) -> Noted:
    """The configuration as of the last start, as a tree."""
    try:
        with open_regular(path_in(folder, CONFIG)) as file:
            tree = yaml.safe_load(file.read(LARGEST))
    except MissingFile:
        return Noted({}, f"{CONFIG} is missing, so the configuration is not known.")
    except Exception:  # PyYAML lets through whatever its conversions of dates and numbers raise
        return Noted({}, f"{CONFIG} cannot be read, so the configuration is not known.")
    if not _is_small(tree):
        return Noted({}, f"{CONFIG} is too large to be shown, so the configuration is not known.")
    if not isinstance(tree, dict):
        return Noted({}, f"{CONFIG} does not hold a configuration.")
    return Noted(tree)


def _is_small(tree: Any) -> bool:
    """Whether a tree can be walked. A few lines of YAML can name each other until there is no end to them."""
    waiting = [tree]
    for _ in range(MOST_VALUES):
        if not waiting:
            return True
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def read_starts(folder: Path) -> Noted:
    """All starts; lines that hold none are left out."""
    starts: list[dict[str, Any]] = []
    damaged = 0
    try:
        with open_regular(path_in(folder, STARTS)) as file:
            lines = file.read(LARGEST).splitlines()
    except MissingFile:
        return Noted([], f"{STARTS} is missing, so it is not known when and how the run was started.")
    except FileError as error:
        return Noted([], f"{error}.")
    for line in lines:
        try:
            start = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(start, dict):
            starts.append(start)
    return Noted(starts, f"{STARTS} has {damaged} damaged lines, which are left out." if damaged else "")


def read_small_object(folder: Path, name: str, absent: str) -> Noted:
    """A JSON object, or None and what `absent` says."""
    try:
        return Noted(read_object(path_in(folder, name)))
    except MissingFile:
        return Noted(None, absent)
    except FileError as error:
        return Noted(None, f"{error}.")


def modified(folder: Path, *names: str) -> float | None:
    """When the newest of these files was written, in seconds since 1970."""
    found = []
    for name in names:
        try:
            found.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(found, default=None)


def find_status(folder: Path, step: int | None, steps: int | None) -> Status:
    """Whether the run goes on, from its lock and its last file."""
    owner = _read_owner(folder)
    if owner is not None:
        process, host = owner
        if host == socket.gethostname():
            return "running" if _is_alive(process) else "stopped"
        updated = modified(folder, METRICS, SAMPLES, LOCK)
        recent = updated is not None and time.time() - updated < ALIVE_SECONDS
        return "running" if recent else "unknown"
    if step is None:
        return "unknown"
    all_taken = steps is None or step + 1 >= steps
    return "finished" if all_taken and os.path.isfile(folder / GRAPHS) else "stopped"


def _read_owner(folder: Path) -> tuple[int, str] | None:
    try:
        with open_regular(path_in(folder, LOCK)) as file:
            found = _OWNER.match(file.read(1000).decode("utf-8", "replace"))
    except FileError:
        return None
    return (int(found[1]), found[2].strip()) if found else None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it belongs to somebody else
    return True
