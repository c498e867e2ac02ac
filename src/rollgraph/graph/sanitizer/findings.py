"""What the sanitizer found: a record for each finding, and how it reads on a terminal and in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from rollgraph.graph.errors import Location


@dataclass(frozen=True)
class Kind:
    """A class of mistakes: why it matters, and how it is mended."""

    name: str
    checked: str  # what was looked at, for the line that says that nothing was found
    why: str
    fix: str


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "host-read",
            "host reads and data-dependent shapes",
            "Python reads the value once, at capture; every replay goes on with that value",
            "keep the value in a tensor (torch.where, masked arithmetic, a static shape), or read it after the call",
        ),
        Kind(
            "escape",
            "allocations that escape the pool",
            "the tensor lives in the graph's memory: each replay, also of other graphs of the pool, writes over it",
            "return the tensor, and let the caller keep a clone",
        ),
        Kind(
            "moved",
            "addresses of parameters and buffers",
            "the graph goes on with the memory it was captured with, not with the program's new one",
            "copy into the existing tensor (copy_, load_state_dict without assign=True), or capture again",
        ),
        Kind(
            "hook",
            "Python hooks that ran at capture",
            "a replay runs no Python: what the hook does happened while capturing and does not happen again",
            "make it a GraphHooks of the capture, with 'replay' in `when`, or hook the graphed module itself",
        ),
        Kind(
            "constant",
            "Python values, closures and attributes read at capture",
            "a Python value is part of the graph; a replay does not read it again",
            "pass what varies as a tensor argument, or keep it in a tensor that is written in place",
        ),
        Kind(
            "stale-output",
            "outputs read after they were replayed over",
            "what a graph returns is lent until a replay writes over it; elsewhere this reads another step's values",
            "use or clone the output before that replay",
        ),
        Kind(
            "orphan",
            "tensors that only the graph still holds",
            "nothing else owns the memory: rollgraph keeps it alive, other captures would read freed memory, and "
            "the program can no longer change what the graph reads",
            "keep the tensor for as long as the graph (an attribute, a buffer of the module), or make it an argument",
        ),
        Kind(
            "generator",
            "random numbers from generators a replay cannot follow",
            "the numbers were drawn at capture; a replay repeats them, or fails",
            "draw with PyTorch, from a generator that exists before the capture, and seed outside the function",
        ),
        Kind(
            "tree",
            "modules added to or removed from the tree",
            "the graph is that of the old tree: new modules do not run, removed ones still do",
            "capture after the tree is final, or capture again; keep managers and wrappers outside the tree",
        ),
        Kind(
            "collective",
            "collectives inside the recording",
            "each rank must replay it at the same moment with the same group; one that does not hangs the others",
            "communicate in a hook beside the graph, between two graphs",
        ),
        Kind(
            "differs",
            "replays compared with eager, bit for bit",
            "the replay computed something else than the function does now, on the same inputs and random numbers",
            "find what the operation reads that is neither an argument nor a tensor written in place",
        ),
        Kind(
            "mismatch",
            "calls that do not fit the capture",
            "the call is not what was captured: other arguments, modes, or memory that is in use",
            "as the message says",
        ),
        Kind(
            "refused",
            "captures that failed",
            "the function cannot be held by a graph as it is",
            "as the message says",
        ),
    )
}


@dataclass(frozen=True)
class Finding:
    """One mistake: `kind` is a key of KINDS."""

    kind: str
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
        lines += [f"  graph: {self.graph}"] * bool(self.graph)
        return "\n".join([*lines, f"  why:   {self.why}", f"  fix:   {self.fix}"])


@dataclass
class Findings:
    """Everything found, each place once, with what was looked at."""

    items: list[Finding] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    replays: int = 0
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> bool:
        """Whether it is new."""
        known = any((f.kind, f.where, f.what) == (finding.kind, finding.where, finding.what) for f in self.items)
        if not known:
            self.items.append(finding)
        return not known

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        graphs = f"{_count(len(self.graphs), 'graph')} ({', '.join(self.graphs)})" if self.graphs else "no graph"
        looked = f"{graphs}, {_count(self.replays, 'replay')}, {_count(self.compared, 'comparison')} with eager"
        notes = [f"note: {note}" for note in self.notes]
        if self.items:
            summary = f"{_count(len(self.items), 'finding')}: {looked}"
            return "\n\n".join([*map(str, self.items), "\n".join([summary, *notes])])
        if not self.graphs:
            return "nothing was captured, so nothing was checked"
        checked = "\n".join(f"  - {kind.checked}" for kind in KINDS.values())
        return "\n".join([f"clean: {looked}", "checked:", checked, *notes])

    def to_json(self) -> str:
        items = [{**asdict(f), "where": asdict(f.where), "why": f.why, "fix": f.fix} for f in self.items]
        return json.dumps(
            {
                "clean": not self.items and bool(self.graphs),
                "findings": items,
                "graphs": self.graphs,
                "replays": self.replays,
                "compared": self.compared,
                "checked": [kind.checked for kind in KINDS.values()],
                "notes": self.notes,
            },
            indent=2,
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
