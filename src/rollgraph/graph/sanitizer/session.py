"""The state of one `sanitize()` block, shared by the instrumented recordings and the interceptors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from rollgraph.graph.backend import optimizer_hint
from rollgraph.graph.errors import Location, here
from rollgraph.graph.sanitizer.findings import Finding, Findings
from rollgraph.graph.sanitizer.output_poisoning import OutputPoisoner
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot, spell_value


class ChangedValue(NamedTuple):
    """A Python value that changed since capture. Only a comparison with eager tells whether it matters."""

    what: str
    where: Location


class Session:
    def __init__(self, compares: bool, stream: TextIO | None) -> None:
        self.findings = Findings()
        self.compares = compares  # whether the function runs eagerly beside each replay
        self.active = False
        self.outputs = OutputPoisoner()
        self.host_reads: dict[Location, str] = {}  # of the capture in progress
        self._stream = stream
        self._capture_depth = 0  # of warm-ups and recordings inside one another
        self._creating_optimizer_state = False

    def report(self, kind: str, graph: str, what: str, where: Location) -> None:
        finding = Finding(kind, graph, what, where)
        if self.findings.add(finding) and self._stream is not None:
            print(finding, file=self._stream)

    @property
    def is_capturing(self) -> bool:
        return self._capture_depth > 0

    @contextmanager
    def in_capture(self) -> Iterator[None]:
        self._capture_depth += 1
        try:
            yield
        finally:
            self._capture_depth -= 1

    @contextmanager
    def creating_optimizer_state(self) -> Iterator[None]:
        """The runtime steps an optimizer on zero gradients; what that reads, the function does not read."""
        self._creating_optimizer_state = True
        try:
            yield
        finally:
            self._creating_optimizer_state = False

    def note_host_read(self, operation: str) -> None:
        """Remember a host read until the capture fails. If it succeeds, only its first run read, and no graph does."""
        if self.is_capturing and not self._creating_optimizer_state:
            self.host_reads.setdefault(here(), spell_host_read(operation) + optimizer_hint())

    def report_program_changes(self, graph: str, snapshot: ProgramSnapshot) -> list[ChangedValue]:
        """Report what is certainly wrong, and return the Python values that changed."""
        place = here()
        for change in snapshot.tree_changes():
            self.report("tree", graph, change, place)
        for name in snapshot.moved_tensors():
            self.report("moved", graph, f"{name} is at another address than at capture", place)
        for tensor in snapshot.orphans():
            what = f"the graph reads a tensor of shape {tuple(tensor.shape)} that nothing else holds any more"
            self.report("orphan", graph, what, place)
        changed: list[ChangedValue] = []
        for read, value in snapshot.names.changed():
            what = f"{read.name} was {spell_value(read.value)} at capture and is {spell_value(value)} now"
            changed.append(ChangedValue(what, read.where))
        return changed


def spell_host_read(operation: str) -> str:
    return f"{operation} reads tensor values on the host"
