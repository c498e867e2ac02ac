"""The index of `samples.jsonl`: where each group is, and the few numbers that people choose groups by.

The completions of a group are written one after the other, so a group is a range of bytes. Nothing else of the texts
is kept: a page of groups is read from the file when it is shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgraph.view.growing_lines import Line, Work, finite, parse_object, read_range
from rollgraph.view.index_store import IndexStore, SavedIndex
from rollgraph.view.indexed_file import IndexedFile

KINDS = ("train", "validation", "dropped")
FINISHES = ("stop", "length", "abort", "error", "")  # the last one is any other
FAILED = ("error", "abort")
GROUP = np.dtype(
    [
        ("offset", np.int64),
        ("length", np.int64),
        ("step", np.int64),
        ("kind", np.uint8),
        ("group", np.int64),
        ("prompt", np.uint64),
        ("first", np.int64),  # its first sample, in the table of samples
        ("count", np.int32),
    ]
)
SAMPLE = np.dtype([("reward", np.float64), ("tokens", np.int32), ("finish", np.uint8), ("failed", np.bool_)])
LARGEST = 2**53  # number of a step or a group
MOST_SAMPLES = 20_000  # that are kept as they were read
Table = NDArray[np.void]
Key = tuple[int, int, int]  # step, kind, group


class SamplesIndex(IndexedFile):
    """Groups in the order in which they were written.

    Where a run was resumed and wrote steps again, what it had written of them before is not shown.
    """

    name = "samples"

    def __init__(self, path: Path, store: IndexStore, work: Work) -> None:
        super().__init__(path, store, work)
        self.clear()

    def clear(self) -> None:
        self._base_groups: Table = np.empty(0, GROUP)
        self._base_samples: Table = np.empty(0, SAMPLE)
        self._groups: list[list[int]] = []  # after those of the base; the last one may still grow
        self._samples: list[tuple[float, int, int, bool]] = []
        self._key: Key | None = None  # of the last group
        self._of_step: set[Key] = set()  # groups of its step
        self._repeats = False  # whether a step or a group was written again
        self.summaries: dict[tuple[int, int], dict[str, Any]] = {}  # of groups that were shown, by where they are
        self._known: dict[str, Any] = {}  # tables that were asked for since the last change

    def add(self, line: Line, record: dict[str, Any]) -> bool:
        try:
            step, group = int(record["step"]), int(record.get("group", 0))
            kind = KINDS.index(record.get("split", "train"))
        except (KeyError, ValueError, TypeError, OverflowError):
            return False
        if max(abs(step), abs(group)) > LARGEST:
            return False
        key = (step, kind, group)
        number = len(self._base_samples) + len(self._samples)
        if key != self._key:
            self._notice_repeats(key)
            self._groups.append([line.offset, 0, *key, hash_prompt(record), number, 0])
            self._key = key
        last = self._groups[-1]
        last[1] = line.offset + len(line.content) - last[0]
        last[-1] += 1
        finish = record.get("finish_reason")
        ending = FINISHES.index(finish if finish in FINISHES else "")
        self._samples.append((finite(record.get("reward")), length_of(record), ending, has_failed(record)))
        self._known.clear()
        return True

    def _notice_repeats(self, key: Key) -> None:
        if self._key is not None and key[0] != self._key[0]:
            self._repeats |= key[0] < self._key[0]
            self._of_step.clear()
        self._repeats |= key in self._of_step
        self._of_step.add(key)

    # -- tables ------------------------------------------------------------------------------------

    @property
    def groups(self) -> Table:
        """The groups that are shown; `first` and `count` say where their samples are."""
        if "groups" not in self._known:
            rows = self._all_groups()
            self.work.bytes_read += self._base_groups.nbytes
            self._known["groups"] = rows[_latest(rows)] if self._repeats else rows
        found: Table = self._known["groups"]
        return found

    @property
    def samples(self) -> Table:
        if "samples" not in self._known:
            self.work.bytes_read += self._base_samples.nbytes
            self._known["samples"] = _join(self._base_samples, self._samples, SAMPLE)
        found: Table = self._known["samples"]
        return found

    @property
    def superseded(self) -> int:
        """How many groups were written again."""
        return len(self._base_groups) + len(self._groups) - len(self.groups)

    def _all_groups(self) -> Table:
        return _join(self._base_groups, [tuple(row) for row in self._groups], GROUP)

    def read_group(self, row: np.void) -> list[dict[str, Any]]:
        """The records of a group, in the order of the file."""
        content = read_range(self.path, int(row["offset"]), int(row["length"]), self.work)
        records = (parse_object(line, self.work) for line in content.split(b"\n") if line.strip())
        return [record for record in records if record is not None]

    def read_stretch(self, rows: Table) -> bytes:
        """All bytes from the first of these groups in the file to the last."""
        start = int(rows["offset"].min())
        end = int((rows["offset"] + rows["length"]).max())
        return read_range(self.path, start, end - start, self.work)

    # -- saving ------------------------------------------------------------------------------------

    def compact(self) -> None:
        if len(self._samples) > MOST_SAMPLES:
            self.unpack(self.pack())

    def pack(self) -> SavedIndex:
        header = {"repeats": self._repeats, "of_step": sorted(self._of_step)}
        return SavedIndex(header, {"groups": self._all_groups(), "samples": self.samples})

    def unpack(self, saved: SavedIndex) -> None:
        groups, samples = saved.arrays["groups"], saved.arrays["samples"]
        if groups.dtype != GROUP or samples.dtype != SAMPLE or not len(groups):
            raise ValueError("the saved index has other columns, or no groups")
        self.clear()
        last = groups[-1]  # the file may go on with it
        first = int(last["first"])
        self._base_groups, self._base_samples = groups[:-1], samples[:first]
        self._groups = [list(last.tolist())]
        self._samples = samples[first:].tolist()
        self._key = (int(last["step"]), int(last["kind"]), int(last["group"]))
        self._of_step = {(int(step), int(kind), int(group)) for step, kind, group in saved.header["of_step"]}
        self._repeats = bool(saved.header["repeats"])


def hash_prompt(record: dict[str, Any]) -> int:
    """The same for the same text, in any run."""
    text = str(record.get("prompt", "")).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def length_of(record: Mapping[str, Any]) -> int:
    value = record.get("tokens")
    return min(value, 2**31 - 1) if isinstance(value, int) and value >= 0 else 0


def has_failed(record: Mapping[str, Any]) -> bool:
    """Whether it did not come to its end, or a reward function failed for it."""
    return record.get("finish_reason") in FAILED or bool(record.get("failures"))


def _join(base: Table, rows: list[Any], dtype: np.dtype[Any]) -> Table:
    return np.concatenate([base, np.array(rows, dtype)]) if rows else base


def _latest(rows: Table) -> NDArray[np.bool_]:
    """Without groups of steps that were taken again later, and of equal groups only the last one."""
    steps = rows["step"]
    later = np.minimum.accumulate(steps[::-1])[::-1]
    shown: NDArray[np.bool_] = steps <= later
    keys = np.stack([steps, rows["kind"].astype(np.int64), rows["group"]], axis=1)
    _, last = np.unique(keys[::-1], axis=0, return_index=True)
    is_last = np.zeros(len(rows), np.bool_)
    is_last[len(rows) - 1 - last] = True
    return shown & is_last
