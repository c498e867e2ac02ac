"""Findings of the sanitizer: the kinds of mistakes it knows, and their form on a terminal and in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rollgraph.graph.errors import Location

# -- kinds of mistakes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    name: str
    checked: str  # the subject of the check, for a report without findings
    why: str
    fix: str


_ALL = (
    Kind(
        "host-read",
        "host reads and data-dependent shapes",
        "Python reads the value once, at capture, and every replay reuses it",
        "keep the value in a tensor (torch.where, masked arithmetic, a static shape), or read it after the call",
    ),
    Kind(
        "escape",
        "tensors that escape from the graph's memory",
        "the tensor lives in the graph's memory: any replay of a graph in the same pool may overwrite it",
        "return the tensor, and keep a clone in the caller",
    ),
    Kind(
        "moved",
        "parameters and buffers that moved",
        "the graph still uses the memory that it was captured with, not the tensor's new memory",
        "copy into the existing tensor (copy_, or load_state_dict without assign=True), or capture again",
    ),
    Kind(
        "hook",
        "Python hooks that ran at capture",
        "a replay runs no Python: the hook ran during capture and will not run again",
        "pass it in GraphHooks with 'replay' in `when`, or register it on the graphed module itself",
    ),
    Kind(
        "constant",
        "Python values read at capture (closures, globals, attributes)",
        "the graph holds the value from capture; a replay does not read it again",
        "pass a value that changes as a tensor argument, or keep it in a tensor that is updated in place",
    ),
    Kind(
        "stale-output",
        "outputs read after a replay overwrote them",
        "an output is valid until a replay overwrites it; without the sanitizer, this reads another step's values",
        "use or clone the output before that replay",
    ),
    Kind(
        "orphan",
        "tensors that only the graph keeps alive",
        "plain CUDA graphs would read freed memory here; rollgraph keeps it alive, but the program can no longer "
        "change what the graph reads",
        "keep a reference for as long as the graph lives (an attribute, a module's buffer), or pass the tensor as an "
        "argument",
    ),
    Kind(
        "generator",
        "random numbers that a replay cannot draw again",
        "the numbers were drawn at capture; a replay repeats them or fails",
        "draw with PyTorch, from a generator that exists before the capture, and seed it outside the function",
    ),
    Kind(
        "tree",
        "modules added to or removed from the module tree",
        "the graph holds the old tree: a replay does not run new modules, and still runs removed ones",
        "capture once the tree is final, or capture again; keep managers and wrappers outside the tree",
    ),
    Kind(
        "collective",
        "collectives inside a graph",
        "every rank must replay it at the same point and with the same group; a rank that does not hangs the others",
        "communicate between two graphs, in a hook or in plain code",
    ),
    Kind(
        "differs",
        "replays compared with eager, bit for bit",
        "on the same inputs and random numbers, the replay computed something other than the function does now",
        "find what this operation reads that is neither an argument nor a tensor updated in place",
    ),
    Kind(
        "mismatch",
        "calls that do not match the capture",
        "the arguments or modes are not those of the capture, or the call needs memory that is still in use",
        "see the message",
    ),
    Kind(
        "refused",
        "functions that cannot be captured",
        "a graph cannot hold this function as it is",
        "see the message",
    ),
)

KINDS = {kind.name: kind for kind in _ALL}


# -- findings --------------------------------------------------------------------------------------


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
    """The report: each finding once, and the extent of the checks."""

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
