"""The report: what was captured, what was replayed, and what ran eagerly and why.

Each graph keeps its own record up to date; a report is a snapshot of the records of a pool.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class GraphRecord:
    """The counters of one graph. Its forward and its backward count as one."""

    name: str
    backend: str
    surface: str = ""
    operations: int = 0  # dispatched operations, forward and backward
    bytes_owned: int = 0
    captures: int = 0
    replays: int = 0  # forward replays
    backward_replays: int = 0
    eager_runs: Counter[str] = field(default_factory=Counter)  # reason -> count
    dropped: int = 0  # captures released to make room for newer ones
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The records of a pool: a table when printed, JSON for tools."""

    graphs: tuple[GraphRecord, ...]
    pool_bytes: int
    notes: tuple[str, ...] = ()  # about all graphs

    @property
    def captures(self) -> int:
        return sum(graph.captures for graph in self.graphs)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    @property
    def eager_runs(self) -> int:
        return sum(graph.eager_runs.total() for graph in self.graphs)

    def to_json(self) -> str:
        graphs = [vars(graph) for graph in self.graphs]
        return json.dumps({"pool_bytes": self.pool_bytes, "notes": self.notes, "graphs": graphs}, indent=2)

    def __str__(self) -> str:
        header = ("graph", "backend", "ops", "owned", "captures", "replays", "eager", "surface")
        lines = _table(header, list(map(_row, self.graphs)))
        for graph in self.graphs:
            lines += [f"  {graph.name}: {n} eager: {why}" for why, n in sorted(graph.eager_runs.items())]
            if graph.dropped:
                lines.append(
                    f"  {graph.name}: {graph.dropped} captures dropped for newer ones (on_mismatch='recapture')"
                )
            lines += [f"  {graph.name}: note: {note}" for note in graph.notes]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(
            f"{len(self.graphs)} graphs, {self.captures} captures, {self.replays} replays, "
            f"{self.eager_runs} eager runs, {_bytes(self.pool_bytes)} of pool memory"
        )
        return "\n".join(lines)


def _row(graph: GraphRecord) -> tuple[str, ...]:
    replays = str(graph.replays)
    if graph.backward_replays:
        replays += f"+{graph.backward_replays}"
    surface = graph.surface
    if len(surface) > 60:
        surface = surface[:57] + "..."
    return (
        graph.name,
        graph.backend,
        str(graph.operations),
        _bytes(graph.bytes_owned),
        str(graph.captures),
        replays,
        str(graph.eager_runs.total()),
        surface,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    numeric = {2, 3, 4, 5, 6}

    def line(cells: Sequence[str]) -> str:
        padded = []
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.rjust(width) if column in numeric else cell.ljust(width))
        return "  ".join(padded).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"
