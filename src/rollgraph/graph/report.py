"""What was captured, what was replayed, and what ran eagerly and why.

A record is counted by the graph it belongs to; a report is a snapshot of a pool's records.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class GraphRecord:
    """The life of one graph (a forward and a backward recording count as one)."""

    name: str
    backend: str
    surface: str = ""
    operations: int = 0  # operations seen by the dispatcher, forward and backward
    bytes_owned: int = 0
    captures: int = 0
    replays: int = 0  # forward replays
    backward_replays: int = 0
    eager_runs: Counter[str] = field(default_factory=Counter)  # reason -> count
    dropped: int = 0  # captures given back because newer ones took their place
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A table when printed, JSON for tools."""

    graphs: tuple[GraphRecord, ...]
    pool_bytes: int

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
        return json.dumps({"pool_bytes": self.pool_bytes, "graphs": [vars(g) for g in self.graphs]}, indent=2)

    def __str__(self) -> str:
        header = ("graph", "backend", "ops", "owned", "captures", "replays", "eager", "surface")
        rows = [
            (
                graph.name,
                graph.backend,
                str(graph.operations),
                _bytes(graph.bytes_owned),
                str(graph.captures),
                f"{graph.replays}+{graph.backward_replays}" if graph.backward_replays else str(graph.replays),
                str(graph.eager_runs.total()),
                graph.surface if len(graph.surface) <= 60 else graph.surface[:57] + "...",
            )
            for graph in self.graphs
        ]
        lines = _table(header, rows)
        for graph in self.graphs:
            lines += [f"  {graph.name}: {n} eager: {why}" for why, n in sorted(graph.eager_runs.items())]
            if graph.dropped:
                lines.append(
                    f"  {graph.name}: {graph.dropped} captures dropped for newer ones (on_mismatch='recapture')"
                )
            lines += [f"  {graph.name}: note: {note}" for note in graph.notes]
        lines.append(
            f"{len(self.graphs)} graphs, {self.captures} captures, {self.replays} replays, "
            f"{self.eager_runs} eager runs, {_bytes(self.pool_bytes)} of pool memory"
        )
        return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    right = {2, 3, 4, 5, 6}

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
