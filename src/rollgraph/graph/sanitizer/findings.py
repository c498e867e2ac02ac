"""What the sanitizer found, and how it reads on a terminal and in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rollgraph.graph.errors import Location
from rollgraph.graph.sanitizer.kinds import KINDS


@dataclass(frozen=True)
class Finding:
    """One mistake in the program."""

    kind: str  # a key of KINDS
    graph: str
    what: str
    where: Location

    @property
    def why(self) -> str:
        return KINDS[self.kind].why

    @property
    def fix(self) -> str:
        return KINDS[self.kind].fix

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.what}", f"  where: {self.where}"]
        if self.graph:
            lines.append(f"  graph: {self.graph}")
        lines.append(f"  why:   {self.why}")
        lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "why": self.why, "fix": self.fix}


@dataclass
class Findings:
    """The report: every finding once, and what was checked."""

    items: list[Finding] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    replays: int = 0
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> bool:
        """Add a finding; return whether it is new."""
        for known in self.items:
            if (known.kind, known.where, known.what) == (finding.kind, finding.where, finding.what):
                return False
        self.items.append(finding)
        return True

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        if self.items:
            summary = f"{_count(len(self.items), 'finding')}: {self._coverage()}"
            return "\n\n".join([*map(str, self.items), "\n".join([summary, *notes])])
        if not self.graphs:
            return "nothing was captured, so nothing was checked"
        checked = [f"  - {kind.checked}" for kind in KINDS.values()]
        return "\n".join([f"clean: {self._coverage()}", "checked:", *checked, *notes])

    def _coverage(self) -> str:
        graphs = "no graph"
        if self.graphs:
            graphs = f"{_count(len(self.graphs), 'graph')} ({', '.join(self.graphs)})"
        return f"{graphs}, {_count(self.replays, 'replay')}, {_count(self.compared, 'comparison')} with eager"

    def to_json(self) -> str:
        report = {
            "clean": not self.items and bool(self.graphs),
            "findings": [finding.to_dict() for finding in self.items],
            "graphs": self.graphs,
            "replays": self.replays,
            "compared": self.compared,
            "checked": [kind.checked for kind in KINDS.values()],
            "notes": self.notes,
        }
        return json.dumps(report, indent=2)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
