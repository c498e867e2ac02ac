"""The indexes of `metrics.jsonl` and `samples.jsonl`: arrays of numbers, and offsets of the texts in the file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgraph.view.index import (
    IndexedFile,
    IndexStore,
    Line,
    ReadCounters,
    SavedIndex,
    finite_or_nan,
    parse_object,
    read_slice,
)

# -- metrics ---------------------------------------------------------------------------------------

STEP = "step"
MAX_TAIL_ROWS = 5000  # rows kept as dictionaries before they are merged into the arrays
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class MetricsIndex(IndexedFile):
    """Metrics as columns of numbers; NaN where a row lacks a metric or its value is not a finite number.

    A resumed run writes some steps again. For each step only the last row counts: a row is hidden if a later row has
    the same or an earlier step.
    """

    name = "metrics"

    def __init__(self, path: Path, store: IndexStore, counters: ReadCounters) -> None:
        super().__init__(path, store, counters)
        self.clear()

    def clear(self) -> None:
        self._columns: dict[str, int] = {STEP: 0}
        self._base: NDArray[np.float64] = np.empty((1, 0))  # [columns, rows], memory-mapped if loaded from disk
        self._tail: list[dict[str, float]] = []  # the rows after `_base`
        self._cache: dict[str, Floats] = {}  # columns requested since the last change
        self._current_mask: Flags | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in self._columns if name != STEP]

    def add(self, line: Line, record: dict[str, Any]) -> bool:
        if math.isnan(finite_or_nan(record.get(STEP))):
            return False
        numbers = {}
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = finite_or_nan(value)
                self._columns.setdefault(name, len(self._columns))
        self._tail.append(numbers)
        self._cache.clear()
        self._current_mask = None
        return True

    def steps(self) -> Floats:
        """The steps of all rows that count, ascending."""
        return self.column(STEP)

    def column(self, name: str) -> Floats:
        """The values of a metric at `steps()`."""
        if name not in self._cache:
            self._cache[name] = self._whole_column(name)[self._current_rows()]
        return self._cache[name]

    @property
    def superseded_count(self) -> int:
        """The number of rows that a resumed run has written again."""
        is_current = self._current_rows()
        return int(len(is_current) - np.count_nonzero(is_current))

    def _current_rows(self) -> Flags:
        """Mask of the rows that count: those whose step is smaller than every later row's."""
        if self._current_mask is None:
            steps = self._whole_column(STEP)
            lowest_later_step = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], math.inf)[: len(steps)]
            self._current_mask = steps < lowest_later_step
        return self._current_mask

    def _whole_column(self, name: str) -> Floats:
        column = self._columns.get(name)
        rows = self._base.shape[1]
        if column is None:
            return np.full(rows + len(self._tail), math.nan)
        saved_values = np.full(rows, math.nan)
        if column < self._base.shape[0]:
            saved_values = np.asarray(self._base[column])
            self.counters.bytes_read += saved_values.nbytes
        tail_values = np.fromiter((row.get(name, math.nan) for row in self._tail), np.float64, len(self._tail))
        return np.concatenate([saved_values, tail_values])

    def compact(self) -> None:
        if len(self._tail) > MAX_TAIL_ROWS:
            self._merge_tail()

    def _merge_tail(self) -> None:
        self._base = np.stack([self._whole_column(name) for name in self._columns])
        self._tail = []

    def pack(self) -> SavedIndex:
        self._merge_tail()
        return SavedIndex({"columns": list(self._columns)}, {"rows": self._base})

    def unpack(self, saved: SavedIndex) -> None:
        names = [str(name) for name in saved.header["columns"]]
        rows = saved.arrays["rows"]
        if rows.ndim != 2 or rows.shape[0] != len(names):
            raise ValueError("the saved index does not fit its header")
        self.clear()
        self._columns = {name: column for column, name in enumerate(names)}
        self._base = rows


# -- samples ---------------------------------------------------------------------------------------
# The completions of a group are written one after the other, so a group is a range of bytes. The index keeps no texts:
# they are read from the file when a page shows them.

KINDS = ("train", "validation", "dropped")
FINISHES = ("stop", "length", "abort", "error", "")  # "" stands for any other reason
FAILED_FINISHES = ("error", "abort")
GROUP = np.dtype(
    [
        ("offset", np.int64),  # bytes in the file
        ("length", np.int64),
        ("step", np.int64),
        ("kind", np.uint8),
        ("group", np.int64),
        ("prompt", np.uint64),  # hash of its text
        ("first", np.int64),  # row of its first sample in the table of samples
        ("count", np.int32),  # samples
    ]
)
SAMPLE = np.dtype([("reward", np.float64), ("tokens", np.int32), ("finish", np.uint8), ("failed", np.bool_)])
MAX_NUMBER = 2**53  # largest step or group
MAX_TAIL_SAMPLES = 20_000  # samples kept in lists before they are merged into the tables
Table = NDArray[np.void]
Key = tuple[int, int, int]  # step, kind, group


class SamplesIndex(IndexedFile):
    """Groups of samples in the order of the file.

    A resumed run writes some steps again; their earlier groups are hidden.
    """

    name = "samples"

    def __init__(self, path: Path, store: IndexStore, counters: ReadCounters) -> None:
        super().__init__(path, store, counters)
        self.clear()

    def clear(self) -> None:
        self._base_groups: Table = np.empty(0, GROUP)
        self._base_samples: Table = np.empty(0, SAMPLE)
        self._groups: list[list[int]] = []  # the groups after `_base_groups`; the last one may still grow
        self._samples: list[tuple[float, int, int, bool]] = []
        self._key: Key | None = None  # of the last group
        self._step_keys: set[Key] = set()  # all groups of the last group's step
        self._has_repeats = False  # whether any step or group was written again
        self.summaries: dict[tuple[int, int], dict[str, Any]] = {}  # of groups shown before, by (offset, length)
        self._cache: dict[str, Any] = {}  # tables requested since the last change

    def add(self, line: Line, record: dict[str, Any]) -> bool:
        try:
            step, group = int(record["step"]), int(record.get("group", 0))
            kind = KINDS.index(record.get("split", "train"))
        except (KeyError, ValueError, TypeError, OverflowError):
            return False
        if max(abs(step), abs(group)) > MAX_NUMBER:
            return False
        key = (step, kind, group)
        first_sample = len(self._base_samples) + len(self._samples)
        if key != self._key:
            self._detect_repeats(key)
            self._groups.append([line.offset, 0, *key, hash_prompt(record), first_sample, 0])
            self._key = key
        last = self._groups[-1]
        last[1] = line.offset + len(line.content) - last[0]
        last[-1] += 1
        finish = record.get("finish_reason")
        finish_code = FINISHES.index(finish if finish in FINISHES else "")
        self._samples.append(
            (finite_or_nan(record.get("reward")), token_count(record), finish_code, is_failed_sample(record))
        )
        self._cache.clear()
        return True

    def _detect_repeats(self, key: Key) -> None:
        if self._key is not None and key[0] != self._key[0]:
            self._has_repeats |= key[0] < self._key[0]
            self._step_keys.clear()
        self._has_repeats |= key in self._step_keys
        self._step_keys.add(key)

    # -- tables ------------------------------------------------------------------------------------

    @property
    def groups(self) -> Table:
        """The groups that count, a GROUP array; rows `first` to `first + count` of `samples` belong to a group."""
        if "groups" not in self._cache:
            rows = self._all_groups()
            self.counters.bytes_read += self._base_groups.nbytes
            self._cache["groups"] = rows[_is_latest(rows)] if self._has_repeats else rows
        groups: Table = self._cache["groups"]
        return groups

    @property
    def samples(self) -> Table:
        if "samples" not in self._cache:
            self.counters.bytes_read += self._base_samples.nbytes
            self._cache["samples"] = _append_rows(self._base_samples, self._samples, SAMPLE)
        samples: Table = self._cache["samples"]
        return samples

    @property
    def superseded_count(self) -> int:
        """The number of groups that were written again."""
        return len(self._base_groups) + len(self._groups) - len(self.groups)

    def _all_groups(self) -> Table:
        return _append_rows(self._base_groups, [tuple(row) for row in self._groups], GROUP)

    def read_group(self, row: np.void) -> list[dict[str, Any]]:
        """The records of a group's samples, in the order of the file."""
        content = read_slice(self.path, int(row["offset"]), int(row["length"]), self.counters)
        records = (parse_object(line, self.counters) for line in content.split(b"\n") if line.strip())
        return [record for record in records if record is not None]

    def read_span(self, rows: Table) -> bytes:
        """The bytes of the file from the first of these groups to the end of the last."""
        start = int(rows["offset"].min())
        end = int((rows["offset"] + rows["length"]).max())
        return read_slice(self.path, start, end - start, self.counters)

    # -- saving ------------------------------------------------------------------------------------

    def compact(self) -> None:
        if len(self._samples) > MAX_TAIL_SAMPLES:
            self.unpack(self.pack())

    def pack(self) -> SavedIndex:
        header = {"repeats": self._has_repeats, "of_step": sorted(self._step_keys)}
        return SavedIndex(header, {"groups": self._all_groups(), "samples": self.samples})

    def unpack(self, saved: SavedIndex) -> None:
        groups, samples = saved.arrays["groups"], saved.arrays["samples"]
        if groups.dtype != GROUP or samples.dtype != SAMPLE or not len(groups):
            raise ValueError("the saved index has other columns, or no groups")
        self.clear()
        last = groups[-1]  # the next line of the file may belong to it
        first = int(last["first"])
        self._base_groups, self._base_samples = groups[:-1], samples[:first]
        self._groups = [list(last.tolist())]
        self._samples = samples[first:].tolist()
        self._key = (int(last["step"]), int(last["kind"]), int(last["group"]))
        self._step_keys = {(int(step), int(kind), int(group)) for step, kind, group in saved.header["of_step"]}
        self._has_repeats = bool(saved.header["repeats"])


def hash_prompt(record: dict[str, Any]) -> int:
    """A hash of the prompt's text, so that runs can be compared prompt by prompt."""
    text = str(record.get("prompt", "")).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def token_count(record: Mapping[str, Any]) -> int:
    value = record.get("tokens")
    return min(value, 2**31 - 1) if isinstance(value, int) and value >= 0 else 0


def is_failed_sample(record: Mapping[str, Any]) -> bool:
    """Whether the rollout was aborted or failed, or a reward function failed for it."""
    return record.get("finish_reason") in FAILED_FINISHES or bool(record.get("failures"))


def _append_rows(base: Table, rows: list[Any], dtype: np.dtype[Any]) -> Table:
    return np.concatenate([base, np.array(rows, dtype)]) if rows else base


def _is_latest(rows: Table) -> NDArray[np.bool_]:
    """Mask of the groups that count: no later group has an earlier step, or the same step, kind and number."""
    steps = rows["step"]
    earliest_later_step = np.minimum.accumulate(steps[::-1])[::-1]
    not_repeated: NDArray[np.bool_] = steps <= earliest_later_step
    keys = np.stack([steps, rows["kind"].astype(np.int64), rows["group"]], axis=1)
    _, last = np.unique(keys[::-1], axis=0, return_index=True)
    is_last = np.zeros(len(rows), np.bool_)
    is_last[len(rows) - 1 - last] = True
    return not_repeated & is_last
