"""Incremental indexes of JSONL files that another process is still writing. Each line is read and parsed once.

`IndexedFile` follows a file; its subclasses in `indexes.py` say what they keep of each record. `IndexStore` caches
indexes on disk, so that opening a long run again reads little.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollgraph.files import FileError, MissingFile, check_regular_file, parse_json, write_atomically
from rollgraph.view.run_files import path_in

# -- complete lines --------------------------------------------------------------------------------

BLOCK_BYTES = 1 << 18  # bytes of one read


@dataclass
class ReadCounters:
    """How much was read, for tests and for the budget of a search; unlike times, the same on every machine."""

    bytes_read: int = 0
    lines_parsed: int = 0


class Line(NamedTuple):
    offset: int  # of its first byte
    content: bytes  # with its line end


def complete_lines(path: Path, offset: int, limit: int, counters: ReadCounters) -> Iterator[Line]:
    """Yield complete lines from `offset` on, until `limit` bytes have been read.

    A line longer than the limit is yielded all the same. The last line of the file may be half written: it is left for
    the next call.
    """
    partial_blocks: list[bytes] = []  # blocks of a line whose end was not read yet
    bytes_read = 0
    with path.open("rb") as file:
        file.seek(offset)
        while bytes_read < limit or partial_blocks:
            block = file.read(BLOCK_BYTES)
            if not block:
                return
            bytes_read += len(block)
            counters.bytes_read += len(block)
            complete, newline, partial = block.rpartition(b"\n")
            if not newline:
                partial_blocks.append(block)
                continue
            for content in b"".join([*partial_blocks, complete]).split(b"\n"):
                line = Line(offset, content + b"\n")
                offset += len(line.content)
                yield line
            if bytes_read >= limit:
                return
            partial_blocks = [partial] if partial else []


def read_slice(path: Path, offset: int, length: int, counters: ReadCounters) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    counters.bytes_read += len(content)
    return content


def finite_or_nan(value: Any) -> float:
    """The value as a float; NaN if it is not a number, not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:  # an integer with hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan


def parse_object(content: bytes, counters: ReadCounters) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not a JSON object."""
    counters.lines_parsed += 1
    try:
        value = parse_json(content, "")
    except FileError:  # not JSON, not UTF-8, or nested too deeply
        return None
    return value if isinstance(value, dict) else None


# -- indexes on disk -------------------------------------------------------------------------------
# An index is a JSON header and NumPy arrays, which are memory-mapped, so opening one reads next to nothing. The header
# names the generation of its arrays and is replaced last, so a reader sees one generation or another, never a mixture.

INDEX_FORMAT = 1  # version of the saved files; other versions are ignored and written anew


@dataclass(frozen=True)
class SavedIndex:
    """The saved form of an index: numbers and names in `header`, and arrays by name."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


class IndexStore:
    """The saved indexes of one run. Without a `folder`, or if it cannot be written, nothing is saved."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def for_run(cls, run: Path) -> IndexStore:
        """The store of a run, below XDG_CACHE_HOME or ~/.cache."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # there is no home directory
            return cls(None)
        key = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
        return cls(cache / "rollgraph" / "view" / key)

    def load(self, name: str) -> SavedIndex | None:
        """The saved index; None if there is no usable one."""
        if self._folder is None:
            return None
        try:
            header = json.loads((self._folder / f"{name}.json").read_bytes())
            if header["format"] != INDEX_FORMAT:
                return None
            arrays = {}
            for array_name in header["arrays"]:
                arrays[array_name] = np.load(self._array_path(name, header["generation"], array_name), mmap_mode="r")
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return SavedIndex(header, arrays)

    def save(self, name: str, index: SavedIndex) -> bool:
        """Save an index. Returns whether it could be written."""
        if self._folder is None:
            return False
        generation = secrets.token_hex(4)
        header = {**index.header, "format": INDEX_FORMAT, "generation": generation, "arrays": list(index.arrays)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for array_name, array in index.arrays.items():
                np.save(self._array_path(name, generation, array_name), array, allow_pickle=False)
            write_atomically(self._folder / f"{name}.json", json.dumps(header))
        except OSError:
            return False
        self._remove_old_arrays(name, generation)
        return True

    def _array_path(self, name: str, generation: str, array_name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.{generation}.{array_name}.npy"

    def _remove_old_arrays(self, name: str, generation: str) -> None:
        """Delete the arrays of other generations. Processes that have mapped one can still read it."""
        assert self._folder is not None
        for path in self._folder.glob(f"{name}.*.npy"):
            if not path.name.startswith(f"{name}.{generation}."):
                with suppress(OSError):
                    path.unlink()


# -- a file and its index --------------------------------------------------------------------------
# A file may be replaced or rewritten: a resumed run truncates the steps it will repeat. We detect this by a hash
# of the first and the last indexed bytes, and then index the file from its beginning.

UPDATE_BYTES = 1 << 18  # most bytes that one update reads, so that a request never waits for more
SAVE_AFTER_BYTES = 4 << 20  # bytes indexed since the last save, after which the index is saved again
SAVE_AFTER_BYTES_INDEXING = 256 << 20  # the same before the end of the file is reached
FINGERPRINT_BYTES = 4096  # bytes at each end of the indexed part that are hashed


class IndexedFile:
    """Follows a growing JSONL file and reads each line once. A subclass defines what to keep and how to save it."""

    name = ""  # file name of the saved index

    def __init__(self, path: Path, store: IndexStore, counters: ReadCounters) -> None:
        self.path = path
        self.counters = counters
        self.indexed_bytes = 0
        self.damaged_lines = 0  # lines without a valid record
        self.replacements = 0  # how often the file was replaced or rewritten
        self.size = 0  # of the file, at the last update
        self.problem = ""  # why the file cannot be read; empty if it can
        self.is_missing = False
        self._store = store
        self._saved_bytes = 0  # value of `indexed_bytes` when the index was last saved
        self._version: tuple[int, ...] = ()  # inode, size and time of the file at the last update
        self._fingerprint = ""
        self._looked_for_saved = False
        self._at_end = True  # everything is indexed, except for a half-written last line

    # -- what a subclass defines -------------------------------------------------------------------

    def add(self, line: Line, record: dict[str, Any]) -> bool:
        """Add a record to the index. Returns False if it is not a valid record of this file."""
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def compact(self) -> None:
        """Move added records into arrays once there are many."""
        raise NotImplementedError

    def pack(self) -> SavedIndex:
        raise NotImplementedError

    def unpack(self, saved: SavedIndex) -> None:
        raise NotImplementedError

    # -- following the file ------------------------------------------------------------------------

    @property
    def indexed_fraction(self) -> float:
        """The indexed fraction of the file, from 0 to 1."""
        return 1.0 if self._at_end else self.indexed_bytes / max(1, self.size)

    @property
    def has_partial_line(self) -> bool:
        return self._at_end and self.indexed_bytes < self.size

    def update(self, limit: int = UPDATE_BYTES) -> bool:
        """Read new lines, up to `limit` bytes. Returns whether anything changed."""
        self.is_missing = False
        try:
            check_regular_file(path_in(self.path.parent, self.path.name))
            changed = self._follow(limit)
            self.problem = ""
            return changed
        except MissingFile:
            self.is_missing = True
            self.problem = "is missing"
        except FileError as error:
            self.problem = error.detail
        except OSError as error:  # for example, replaced just now; the next update reads it
            self.problem = f"cannot be read: {error.strerror}"
        changed = self.indexed_bytes > 0
        self._start_over()
        return changed

    def _follow(self, limit: int) -> bool:
        status = self.path.stat()
        if self._at_end and self._version == _version_of(status):
            return False  # a half-written line is not read again before the file grows
        self._at_end = True
        changed = self._detect_replacement(status)
        self.size = status.st_size
        if self.size <= self.indexed_bytes:
            return changed
        before = self.indexed_bytes
        self._read_lines(limit)
        if self.indexed_bytes != before:
            self._fingerprint = self._read_fingerprint()
            self.compact()
        self._save_if_worthwhile()
        return changed or self.indexed_bytes != before

    def _detect_replacement(self, status: os.stat_result) -> bool:
        if not self._looked_for_saved:
            self._looked_for_saved = True
            self._load_saved()
        same = self._version == _version_of(status)
        self._version = _version_of(status)
        if same or (status.st_size >= self.indexed_bytes and self._fingerprint == self._read_fingerprint()):
            return False
        changed = self.indexed_bytes > 0
        self.replacements += 1
        self._start_over()
        return changed

    def _load_saved(self) -> None:
        saved = self._store.load(self.name)
        if saved is None:
            return
        try:
            self.indexed_bytes = int(saved.header["covered"])
            self.damaged_lines = int(saved.header["damaged"])
            self._fingerprint = str(saved.header["ends"])
            self.unpack(saved)
            self._saved_bytes = self.indexed_bytes
        except (KeyError, ValueError, TypeError):
            self._start_over()

    def _read_lines(self, limit: int) -> None:
        start, read_before = self.indexed_bytes, self.counters.bytes_read
        for line in complete_lines(self.path, self.indexed_bytes, limit, self.counters):
            record = parse_object(line.content, self.counters)
            if line.content.strip() and (record is None or not self.add(line, record)):
                self.damaged_lines += 1
            self.indexed_bytes = line.offset + len(line.content)
        self._at_end = start + self.counters.bytes_read - read_before >= self.size

    def _start_over(self) -> None:
        self._at_end = True
        self._version = ()
        self.indexed_bytes = self.damaged_lines = self.size = self._saved_bytes = 0
        self._fingerprint = ""
        self.clear()

    def _read_fingerprint(self) -> str:
        if not self.indexed_bytes:
            return ""
        length = min(FINGERPRINT_BYTES, self.indexed_bytes)
        first_and_last = read_slice(self.path, 0, length, self.counters) + read_slice(
            self.path, self.indexed_bytes - length, length, self.counters
        )
        return hashlib.sha256(first_and_last).hexdigest()

    def _save_if_worthwhile(self) -> None:
        if self.indexed_bytes - self._saved_bytes < (SAVE_AFTER_BYTES if self._at_end else SAVE_AFTER_BYTES_INDEXING):
            return
        index = self.pack()
        header = {
            **index.header,
            "covered": self.indexed_bytes,
            "damaged": self.damaged_lines,
            "ends": self._fingerprint,
        }
        self._store.save(self.name, SavedIndex(header, index.arrays))
        self._saved_bytes = self.indexed_bytes


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
