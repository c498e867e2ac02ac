"""The index of `metrics.jsonl`: one column for each metric, so that a chart reads only what it shows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgraph.view.growing_lines import Line, Work, finite
from rollgraph.view.index_store import IndexStore, SavedIndex
from rollgraph.view.indexed_file import IndexedFile

STEP = "step"
MOST_ROWS = 5000  # that are kept as they were read
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class MetricsIndex(IndexedFile):
    """Rows as columns of numbers. What a row does not have, and what is no finite number, is NaN.

    Where a run was resumed and wrote steps again, the rows that came before the resumed one and are not earlier steps
    belong to a past that was given up, and are not shown.
    """

    name = "metrics"

    def __init__(self, path: Path, store: IndexStore, work: Work) -> None:
        super().__init__(path, store, work)
        self.clear()

    def clear(self) -> None:
        self._columns: dict[str, int] = {STEP: 0}
        self._base: NDArray[np.float64] = np.empty((1, 0))  # [columns, rows], mapped if it was saved
        self._tail: list[dict[str, float]] = []  # rows after it
        self._known: dict[str, Floats] = {}  # columns that were asked for since the last change
        self._shown_rows: Flags | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in self._columns if name != STEP]

    def add(self, line: Line, record: dict[str, Any]) -> bool:
        if math.isnan(finite(record.get(STEP))):
            return False
        numbers = {}
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = finite(value)
                self._columns.setdefault(name, len(self._columns))
        self._tail.append(numbers)
        self._known.clear()
        self._shown_rows = None
        return True

    def steps(self) -> Floats:
        """The steps that are shown, in order."""
        return self.column(STEP)

    def column(self, name: str) -> Floats:
        """The values of a metric at `steps()`."""
        if name not in self._known:
            self._known[name] = self._whole_column(name)[self._shown()]
        return self._known[name]

    @property
    def superseded(self) -> int:
        """How many rows were written again by a resumed run."""
        shown = self._shown()
        return int(len(shown) - np.count_nonzero(shown))

    def _shown(self) -> Flags:
        """The rows whose step no later row takes again."""
        if self._shown_rows is None:
            steps = self._whole_column(STEP)
            later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], math.inf)[: len(steps)]
            self._shown_rows = steps < later
        return self._shown_rows

    def _whole_column(self, name: str) -> Floats:
        number = self._columns.get(name)
        rows = self._base.shape[1]
        if number is None:
            return np.full(rows + len(self._tail), math.nan)
        before = np.full(rows, math.nan)
        if number < self._base.shape[0]:
            before = np.asarray(self._base[number])
            self.work.bytes_read += before.nbytes
        after = np.fromiter((row.get(name, math.nan) for row in self._tail), np.float64, len(self._tail))
        return np.concatenate([before, after])

    def compact(self) -> None:
        if len(self._tail) > MOST_ROWS:
            self._join()

    def _join(self) -> None:
        self._base = np.stack([self._whole_column(name) for name in self._columns])
        self._tail = []

    def pack(self) -> SavedIndex:
        self._join()
        return SavedIndex({"columns": list(self._columns)}, {"rows": self._base})

    def unpack(self, saved: SavedIndex) -> None:
        names = [str(name) for name in saved.header["columns"]]
        rows = saved.arrays["rows"]
        if rows.ndim != 2 or rows.shape[0] != len(names):
            raise ValueError("the saved index does not fit its header")
        self.clear()
        self._columns = {name: number for number, name in enumerate(names)}
        self._base = rows
