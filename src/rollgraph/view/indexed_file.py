"""A file of JSON lines that grows, and the index that follows it.

A file may also be replaced or rewritten: a resumed run cuts off the steps that it takes again. An index knows this by
the first and the last bytes that it covers, and then begins anew.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from rollgraph.files import FileError, MissingFile, regular_file
from rollgraph.view.growing_lines import Line, Work, complete_lines, parse_object, read_range
from rollgraph.view.index_store import IndexStore, SavedIndex
from rollgraph.view.run_files import path_in

PORTION = 1 << 18  # bytes that one update reads at most: a request waits no longer than for that
WORTH_SAVING = 4 << 20  # bytes of the file that were read since the index was saved
WORTH_SAVING_HALF = 256 << 20  # the same while the end of the file is not reached
SEEN = 4096  # bytes at each end by which a file is known again


class IndexedFile:
    """Reads each line once. A subclass says what is kept of it, and how that is saved."""

    name = ""  # of the saved index

    def __init__(self, path: Path, store: IndexStore, work: Work) -> None:
        self.path = path
        self.work = work
        self.covered = 0  # bytes of the file that are in the index
        self.damaged = 0  # lines that hold no record
        self.replaced = 0  # times that the file turned out to be another one
        self.size = 0  # of the file, when it was last looked at
        self.problem = ""  # why the file cannot be read, if it cannot
        self.is_missing = False
        self._store = store
        self._saved = 0  # what of `covered` the saved index has
        self._version: tuple[int, ...] = ()  # of the file, when it was last looked at
        self._ends = ""
        self._opened = False
        self._at_end = True  # apart from a half-written last line, everything is indexed

    # -- what a subclass defines -------------------------------------------------------------------

    def add(self, line: Line, record: dict[str, Any]) -> bool:
        """Keep what the index needs of a record; False if it is no record of this kind."""
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def compact(self) -> None:
        """Bring what was added into the form in which it is asked for, if it is much."""
        raise NotImplementedError

    def pack(self) -> SavedIndex:
        raise NotImplementedError

    def unpack(self, saved: SavedIndex) -> None:
        raise NotImplementedError

    # -- following the file ------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """How much of the file is indexed."""
        return 1.0 if self._at_end else self.covered / max(1, self.size)

    @property
    def ends_in_half_a_line(self) -> bool:
        return self._at_end and self.covered < self.size

    def update(self, limit: int = PORTION) -> bool:
        """Read what is new, up to `limit` bytes; whether anything changed."""
        self.is_missing = False
        try:
            regular_file(path_in(self.path.parent, self.path.name))
            changed = self._follow(limit)
            self.problem = ""
            return changed
        except MissingFile:
            self.is_missing = True
            self.problem = "is missing"
        except FileError as error:
            self.problem = error.detail
        except OSError as error:  # a file that was replaced meanwhile is read the next time
            self.problem = f"cannot be read: {error.strerror}"
        changed = self.covered > 0
        self._begin_anew()
        return changed

    def _follow(self, limit: int) -> bool:
        status = self.path.stat()
        if self._at_end and self._version == _version_of(status):
            return False  # half a line is not read again before something was added to it
        self._at_end = True
        changed = self._notice_other_file(status)
        self.size = status.st_size
        if self.size <= self.covered:
            return changed
        before = self.covered
        self._read_on(limit)
        if self.covered != before:
            self._ends = self._read_ends()
            self.compact()
        self._save_if_worthwhile()
        return changed or self.covered != before

    def _notice_other_file(self, status: os.stat_result) -> bool:
        if not self._opened:
            self._opened = True
            self._open_saved()
        same = self._version == _version_of(status)
        self._version = _version_of(status)
        if same or (status.st_size >= self.covered and self._ends == self._read_ends()):
            return False
        changed = self.covered > 0
        self.replaced += 1
        self._begin_anew()
        return changed

    def _open_saved(self) -> None:
        saved = self._store.load(self.name)
        if saved is None:
            return
        try:
            self.covered = int(saved.header["covered"])
            self.damaged = int(saved.header["damaged"])
            self._ends = str(saved.header["ends"])
            self.unpack(saved)
            self._saved = self.covered
        except (KeyError, ValueError, TypeError):
            self._begin_anew()

    def _read_on(self, limit: int) -> None:
        start, read_before = self.covered, self.work.bytes_read
        for line in complete_lines(self.path, self.covered, limit, self.work):
            record = parse_object(line.content, self.work)
            if line.content.strip() and (record is None or not self.add(line, record)):
                self.damaged += 1
            self.covered = line.offset + len(line.content)
        self._at_end = start + self.work.bytes_read - read_before >= self.size

    def _begin_anew(self) -> None:
        self._at_end = True
        self._version = ()
        self.covered = self.damaged = self.size = self._saved = 0
        self._ends = ""
        self.clear()

    def _read_ends(self) -> str:
        if not self.covered:
            return ""
        seen = min(SEEN, self.covered)
        ends = read_range(self.path, 0, seen, self.work) + read_range(self.path, self.covered - seen, seen, self.work)
        return hashlib.sha256(ends).hexdigest()

    def _save_if_worthwhile(self) -> None:
        if self.covered - self._saved < (WORTH_SAVING if self._at_end else WORTH_SAVING_HALF):
            return
        index = self.pack()
        header = {**index.header, "covered": self.covered, "damaged": self.damaged, "ends": self._ends}
        self._store.save(self.name, SavedIndex(header, index.arrays))
        self._saved = self.covered


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
