"""The index of a run's `metrics.jsonl` and `samples.jsonl`, which another process is still writing.

Each line is read and parsed once. The index is a SQLite database in the cache folder, one for each run. The table
`files` says how far each file is indexed; `metrics` and `chunks` hold columns of numbers; `groups` and `samples` hold
what a search filters by. Texts are not in it: they are read from the file, at the offsets that `groups` has.

**Growth.** An update parses the next portion of lines, and then stores it in one transaction, together with how far it
came. So a process that is killed leaves whole portions, and no lock is held while lines are parsed. Several servers can
index the same run: one that finds its portion stored already drops it.

**Truncation.** A resumed run truncates the steps it will repeat. We detect this, and any other rewriting, by a hash of
the first and the last indexed bytes, and then index the file from its beginning. If a run repeats steps without a
truncation, a row deletes the rows of its own step and of later ones, so the database only holds rows that count.

**Connections.** `Database` owns the only connection to the index of a run. It is opened by the first query of a request
and closed at the request's end, because a page can show thousands of runs. The queries of a request read one snapshot.
Requests come from several threads, and `RunData` admits one at a time. Where the file cannot be used (it is read-only,
damaged or locked for long, or the disk is full), the run is indexed again in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rollgraph.files import FileError, MissingFile, open_regular, parse_json
from rollgraph.view.run_files import path_in

# -- the database ----------------------------------------------------------------------------------

FORMAT = 1  # of the tables; another version has another file
BUSY_SECONDS = 5.0  # how long to wait for the locks of other servers
SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, indexed_bytes, damaged_lines, records, last_step, fingerprint,
    replacements);
CREATE TABLE IF NOT EXISTS metrics (name UNIQUE);
CREATE TABLE IF NOT EXISTS chunks (name, chunk, numbers, PRIMARY KEY (name, chunk));
CREATE TABLE IF NOT EXISTS groups (start INTEGER PRIMARY KEY, end, step, kind, number, prompt,
    UNIQUE (step, kind, number));
CREATE TABLE IF NOT EXISTS samples (start INTEGER PRIMARY KEY, reward, finish, failed);
COMMIT;
"""


class Database:
    """The SQLite file of a run or, without a `path` or where it cannot be used, a database in memory."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None

    @classmethod
    def for_run(cls, run: Path) -> Database:
        """The database of a run, below XDG_CACHE_HOME or ~/.cache."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # there is no home directory
            return cls(None)
        key = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
        return cls(cache / "rollgraph" / "view" / f"{key}.{FORMAT}.sqlite")

    def version(self) -> object:
        """Differs from an earlier version if a process has changed the file since, or deleted it."""
        if self.path is None:
            return None
        try:
            status = self.path.stat()
        except OSError:
            return object()
        return (status.st_ino, status.st_size, status.st_mtime_ns)

    def select(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Query a snapshot, which the first query begins."""
        connection = self._connect()
        if not connection.in_transaction:
            connection.execute("BEGIN")
        return connection.execute(sql, values)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is stored completely or not at all. Ends the snapshot."""
        connection = self._connect()
        connection.rollback()
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield connection

    def end_snapshot(self) -> None:
        if self._connection is not None:
            self._connection.rollback()

    def close(self) -> None:
        """Close the file. A database in memory stays."""
        if self._connection is not None and self.path is not None:
            self._connection.close()
            self._connection = None

    def fall_back(self, error: sqlite3.Error) -> None:
        """Continue in memory after an error of the file. The next start tries the file again."""
        if self.path is None:
            raise error
        self.close()
        if not isinstance(error, sqlite3.OperationalError):  # damaged, and not just locked, full or read-only
            with suppress(OSError):
                Path(f"{self.path}-journal").unlink(missing_ok=True)
                self.path.unlink()
        self.path = None

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            if self.path is not None:
                with suppress(OSError):  # opening the file fails, too
                    self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path or ":memory:", BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous = OFF")  # a cache: it may be lost when the power fails
            if self._connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                self._connection.executescript(SCHEMA)
        return self._connection


# -- lines -----------------------------------------------------------------------------------------


@dataclass
class ReadCounters:
    """How much was read, for tests and for the budget of a search; unlike times, the same on every machine."""

    bytes_read: int = 0
    lines_parsed: int = 0


def read_slice(file: BinaryIO, start: int, end: int, counters: ReadCounters) -> bytes:
    file.seek(start)
    content = file.read(end - start)
    counters.bytes_read += len(content)
    return content


def parse_object(content: bytes, counters: ReadCounters) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not a JSON object."""
    counters.lines_parsed += 1
    try:
        value = parse_json(content, "")
    except FileError:  # not JSON, not UTF-8, or nested too deeply
        return None
    return value if isinstance(value, dict) else None


def finite_or_nan(value: Any) -> float:
    """The value as a float; NaN if it is not a number, not finite, or too large for a float."""
    if type(value) not in (int, float):  # True is no number
        return math.nan
    try:
        number = float(value)
    except OverflowError:  # an integer with hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan


# -- a file and its index --------------------------------------------------------------------------

UPDATE_BYTES = 1 << 18  # most bytes that one update reads, so that a request never waits for more
FINGERPRINT_BYTES = 4096  # bytes at each end of the indexed part that are hashed


@dataclass(frozen=True)
class IndexProgress:
    """How far a file is indexed."""

    indexed_bytes: int = 0
    damaged_lines: int = 0  # lines without a valid record
    records: int = 0  # rows of metrics or groups of samples, including those that were written again
    last_step: float | None = None
    fingerprint: str = ""  # of the indexed part
    replacements: int = 0  # how often the file was replaced or rewritten


class IndexedFile:
    """Follows a growing JSONL file. A subclass defines what to keep of each record."""

    tables: tuple[str, ...] = ()

    def __init__(self, path: Path, database: Database, counters: ReadCounters) -> None:
        self.path = path
        self.counters = counters
        self.progress = IndexProgress()
        self.size = 0  # of the file, at the last update
        self.problem = ""  # why the file cannot be read; empty if it can
        self.is_missing = False
        self._database = database
        self._version: tuple[Any, ...] = ()  # of the file and the database at the last update
        self._at_end = True  # everything is indexed, except for a half-written last line
        self._file: BinaryIO | None = None  # as the last update read it, even if another has replaced it since

    def open_rows(self) -> list[Any]:
        """Stored rows that the next line may still change; the rows of a portion begin with them."""
        return []

    def add(self, rows: list[Any], record: dict[str, Any], start: int, end: int) -> float | None:
        """Add the record of a line to the rows. Returns its step; None if it is not a valid record of this file."""
        raise NotImplementedError

    def store(self, rows: list[Any], connection: sqlite3.Connection) -> None:
        """Store rows, and delete those that they replace."""
        raise NotImplementedError

    @property
    def indexed_fraction(self) -> float:
        """The indexed fraction of the file, from 0 to 1."""
        return 1.0 if self._at_end else self.progress.indexed_bytes / max(1, self.size)

    @property
    def has_partial_line(self) -> bool:
        return self._at_end and self.progress.indexed_bytes < self.size

    def update(self) -> bool:
        """Read new lines, up to `UPDATE_BYTES`. Returns whether anything changed. Keeps the file open until `close`."""
        self.close()
        before = self.progress
        self.problem = ""
        self.is_missing = False
        try:
            path = path_in(self.path.parent, self.path.name)  # refuses a link that leads out of the folder
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                self._follow(file, version, status.st_size)
                self._file = os.fdopen(os.dup(file.fileno()), "rb")
        except FileError as error:
            self.is_missing = isinstance(error, MissingFile)
            self.problem = "is missing" if self.is_missing else error.detail
            self._follow(io.BytesIO(), (self.problem,), 0)  # as an empty file: its rows go until it can be read again
        return self.progress != before

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _follow(self, file: BinaryIO, version: tuple[Any, ...], size: int) -> None:
        version = (self._database.version(), *version)
        if self._at_end and self._version == version:
            return  # a half-written line is not read again before the file grows
        self._version = version
        self.size = size
        stored = self._load()
        is_rewritten = size < stored.indexed_bytes or self._hash_ends(file, stored.indexed_bytes) != stored.fingerprint
        before = IndexProgress(replacements=stored.replacements + 1) if is_rewritten else stored
        rows = [] if is_rewritten else self.open_rows()
        self._database.end_snapshot()  # others may write while we parse
        self.progress = self._read_lines(file, before, rows)
        if self.progress == stored:
            return
        with self._database.writing() as connection:
            latest = self._load()
            if latest != stored:  # another server was faster
                self.progress = latest
                self._at_end = False
                return
            if is_rewritten:
                for table in self.tables:
                    connection.execute(f"DELETE FROM {table}")
            if rows:
                self.store(rows, connection)
            values = (self.path.name, *astuple(self.progress))
            connection.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def _load(self) -> IndexProgress:
        row = self._database.select("SELECT * FROM files WHERE name = ?", self.path.name).fetchone()
        return IndexProgress(*row[1:]) if row else IndexProgress()

    def _read_lines(self, file: BinaryIO, progress: IndexProgress, rows: list[Any]) -> IndexProgress:
        """Read a portion of lines. The last line of the file may be half written: it is left for the next update."""
        end = progress.indexed_bytes
        content = read_slice(file, end, end + UPDATE_BYTES, self.counters)
        if b"\n" not in content:  # a long line
            content += file.readline()
            self.counters.bytes_read += max(0, len(content) - UPDATE_BYTES)
        self._at_end = end + len(content) >= self.size
        damaged = progress.damaged_lines
        last_step = progress.last_step
        row_count = len(rows)
        for line in io.BytesIO(content[: content.rfind(b"\n") + 1]):
            start = end
            end += len(line)
            record = parse_object(line, self.counters)
            step = None if record is None else self.add(rows, record, start, end)
            if step is not None:
                last_step = step
            elif line.strip():
                damaged += 1
        if end == progress.indexed_bytes:
            return progress
        records = progress.records + len(rows) - row_count
        return IndexProgress(end, damaged, records, last_step, self._hash_ends(file, end), progress.replacements)

    def _hash_ends(self, file: BinaryIO, end: int) -> str:
        if not end:
            return ""
        length = min(FINGERPRINT_BYTES, end)
        first = read_slice(file, 0, length, self.counters)
        last = read_slice(file, end - length, end, self.counters)
        return hashlib.sha256(first + last).hexdigest()


# -- metrics ---------------------------------------------------------------------------------------

STEP = "step"
CHUNK_ROWS = 1024  # numbers of a metric in one row of `chunks`; NaN where a metric has no finite value
Floats = NDArray[np.float64]


class MetricsIndex(IndexedFile):
    """Metrics as columns of numbers. For each step only the last row counts, and no row of an earlier past."""

    tables = ("metrics", "chunks")

    @property
    def names(self) -> list[str]:
        rows = self._database.select("SELECT name FROM metrics WHERE name != ? ORDER BY rowid", json.dumps(STEP))
        return [json.loads(name) for (name,) in rows]

    def steps(self) -> Floats:
        """The steps of all rows that count, ascending."""
        return self.column(STEP)

    def column(self, name: str) -> Floats:
        """The values of a metric at `steps()`; NaN where a row lacks it or its value is not a finite number."""
        values = np.full(self._count_rows(), math.nan)
        sql = "SELECT chunk, numbers FROM chunks WHERE name = ?"
        for chunk, numbers in self._database.select(sql, json.dumps(name)):
            first = chunk * CHUNK_ROWS
            values[first : first + CHUNK_ROWS] = np.frombuffer(numbers)
        return values

    @property
    def superseded_count(self) -> int:
        """The number of rows that a resumed run has written again."""
        return self.progress.records - self._count_rows()

    def _count_rows(self) -> int:
        sql = "SELECT total(length(numbers)) / 8 FROM chunks WHERE name = ?"
        return int(self._database.select(sql, json.dumps(STEP)).fetchone()[0])

    # -- indexing ----------------------------------------------------------------------------------

    def add(self, rows: list[Any], record: dict[str, Any], start: int, end: int) -> float | None:
        step = finite_or_nan(record.get(STEP))
        if math.isnan(step):
            return None
        numbers = {}
        for name, value in record.items():
            if type(value) in (int, float):
                numbers[name] = finite_or_nan(value)
        rows.append(numbers)
        return step

    def store(self, rows: list[dict[str, float]], connection: sqlite3.Connection) -> None:
        names: dict[str, float] = {}
        last_rows: list[dict[str, float]] = []
        for row in rows:
            names.update(row)
            while last_rows and last_rows[-1][STEP] >= row[STEP]:
                last_rows.pop()
            last_rows.append(row)
        stored_count = int(np.searchsorted(self.steps(), last_rows[0][STEP]))
        first_chunk, kept = divmod(stored_count, CHUNK_ROWS)
        columns = {json.dumps(name): np.full(kept, math.nan) for name in names}
        connection.executemany("INSERT OR IGNORE INTO metrics VALUES (?)", [(name,) for name in columns])
        for name, numbers in connection.execute("SELECT name, numbers FROM chunks WHERE chunk = ?", (first_chunk,)):
            columns[name] = np.frombuffer(numbers)[:kept]
        connection.execute("DELETE FROM chunks WHERE chunk >= ?", (first_chunk,))
        for name, kept_values in columns.items():
            key = json.loads(name)
            values = np.concatenate([kept_values, [row.get(key, math.nan) for row in last_rows]])
            for first in range(0, len(values), CHUNK_ROWS):
                chunk = first_chunk + first // CHUNK_ROWS
                numbers = values[first : first + CHUNK_ROWS].tobytes()
                connection.execute("INSERT INTO chunks VALUES (?, ?, ?)", (name, chunk, numbers))


# -- samples ---------------------------------------------------------------------------------------

KINDS = ("train", "validation", "dropped")
FINISHES = ("stop", "length", "abort", "error", "")  # "" stands for any other reason
FAILED_FINISHES = ("error", "abort")
MAX_NUMBER = 2**53  # largest step or group


@dataclass
class Group:
    """The samples of a prompt in one step: lines that follow each other, so a range of bytes."""

    start: int
    end: int
    step: int
    kind: str
    number: int
    prompt: str  # hash of its text
    new_samples: list[tuple[int, float, str, bool]] = field(default_factory=list)  # rows of the table `samples`


class SamplesIndex(IndexedFile):
    """Groups of samples in the order of the file. Of groups that a resumed run wrote again, only the last counts."""

    tables = ("groups", "samples")

    def __init__(self, path: Path, database: Database, counters: ReadCounters) -> None:
        super().__init__(path, database, counters)
        self.summaries: dict[tuple[int, int, int], dict[str, Any]] = {}  # of groups shown before

    def groups(
        self, where: str = "TRUE", values: Sequence[Any] = (), order: str = "start", limit: int = -1, offset: int = 0
    ) -> Iterator[Group]:
        """The groups that match an SQL condition with these values; a limit of -1 is none."""
        sql = f"SELECT * FROM groups WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        return (Group(*row) for row in self._database.select(sql, *values, limit, offset))

    def count_groups(self, where: str = "TRUE", values: Sequence[Any] = ()) -> int:
        return int(self._database.select(f"SELECT count(*) FROM groups WHERE {where}", *values).fetchone()[0])

    @property
    def superseded_count(self) -> int:
        """The number of groups that a resumed run has written again."""
        return self.progress.records - self.count_groups()

    def steps(self, kind: str = "") -> list[int]:
        """The steps that have samples (of a kind), ascending."""
        sql = "SELECT DISTINCT step FROM groups WHERE ? IN (kind, '') ORDER BY step"
        return [step for (step,) in self._database.select(sql, kind)]

    def prompts(self) -> Iterator[tuple[int, Group]]:
        """How many groups each prompt has, and the last of them; the most frequent prompts first."""
        sql = "SELECT count(*), max(start), * FROM groups GROUP BY prompt ORDER BY count(*) DESC, prompt"
        return ((count, Group(*columns)) for count, _, *columns in self._database.select(sql))

    def read_group(self, group: Group) -> list[dict[str, Any]]:
        """The records of a group's samples, in the order of the file."""
        records = [parse_object(line, self.counters) for line in self.read_span([group]).split(b"\n") if line.strip()]
        return [record for record in records if record is not None]

    def read_span(self, groups: Sequence[Group]) -> bytes:
        """The bytes of the file from the first of these groups to the end of the last."""
        with nullcontext(self._file) if self._file is not None else self.path.open("rb") as file:
            start = min(group.start for group in groups)
            return read_slice(file, start, max(group.end for group in groups), self.counters)

    # -- indexing ----------------------------------------------------------------------------------

    def open_rows(self) -> list[Any]:
        return list(self.groups(order="start DESC", limit=1))

    def add(self, rows: list[Any], record: dict[str, Any], start: int, end: int) -> float | None:
        try:
            step, number = int(record["step"]), int(record.get("group", 0))
            kind = KINDS[KINDS.index(record.get("split", "train"))]
        except (KeyError, ValueError, TypeError, OverflowError):
            return None
        if max(abs(step), abs(number)) > MAX_NUMBER:
            return None
        group = rows[-1] if rows else None
        if group is None or group.step != step or group.kind != kind or group.number != number:
            group = Group(start, end, step, kind, number, hash_prompt(record))
            rows.append(group)
        finish = record.get("finish_reason")
        if finish not in FINISHES:
            finish = ""
        group.end = end
        group.new_samples.append((start, finite_or_nan(record.get("reward")), finish, is_failed_sample(record)))
        return step

    def store(self, rows: list[Group], connection: sqlite3.Connection) -> None:
        groups: list[Group] = []
        for group in rows:
            while groups and groups[-1].step > group.step:
                groups.pop()
            groups.append(group)
        connection.execute("DELETE FROM groups WHERE step > ?", (groups[0].step,))
        columns = [(group.start, group.end, group.step, group.kind, group.number, group.prompt) for group in groups]
        connection.executemany("REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?)", columns)
        new_samples = [sample for group in groups for sample in group.new_samples]
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", new_samples)


def hash_prompt(record: dict[str, Any]) -> str:
    """A hash of the prompt's text, so that runs can be compared prompt by prompt."""
    text = str(record.get("prompt", "")).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def is_failed_sample(record: Mapping[str, Any]) -> bool:
    """Whether the rollout was aborted or failed, or a reward function failed for it."""
    return record.get("finish_reason") in FAILED_FINISHES or bool(record.get("failures"))
