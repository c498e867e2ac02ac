"""The state of one `sanitize()` block. `interceptors.py` watches the program during it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TextIO

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rollgraph.graph.errors import Location, here
from rollgraph.graph.host_reads import optimizer_hint
from rollgraph.graph.pool import Arena
from rollgraph.graph.sanitizer.findings import Finding, Findings
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot, describe_value
from rollgraph.graph.state.undo_log import bytes_of, storage_of

# -- use after overwrite ---------------------------------------------------------------------------
# A replay may overwrite the last output of its graph and of any graph captured later in the same arena: while its graph
# was captured, that memory was free or held temporaries.

_POISON = 0xFF  # in every byte: NaN as a float, -1 as an index


@dataclass(eq=False)
class OutputCopy:
    """The copy of an output that the program got."""

    arena: Arena
    capture: int  # index of its graph in the arena's order of captures
    graph: str
    storage: StorageWeakRef
    alias: Tensor | None  # None once poisoned
    overwritten_by: str = ""  # the event that poisoned it


class OutputPoisoner:
    """Returns copies of outputs to the program, and knows which of them are poisoned."""

    def __init__(self) -> None:
        self._handed_out: dict[int, OutputCopy] = {}  # by storage

    def hand_out(
        self, arena: Arena, capture: int, graph: str, outputs: Sequence[Tensor | None], borrowed: set[int]
    ) -> list[Tensor | None]:
        """Copy the outputs. An output in a `borrowed` storage belongs to the program and is returned as it is."""
        copies: list[Tensor | None] = []
        with torch.no_grad():
            for output in outputs:
                if output is None or output.untyped_storage()._cdata in borrowed:
                    copies.append(output)
                    continue
                copy = output.clone()
                copies.append(copy)
                if copy.numel():
                    storage = copy.untyped_storage()
                    entry = OutputCopy(arena, capture, graph, StorageWeakRef(storage), copy.detach())
                    self._handed_out[storage._cdata] = entry
        return copies

    def poison_from(self, arena: Arena, capture: int, event: str) -> None:
        """A graph was replayed: poison its outputs, and those of the graphs captured after it."""
        self._poison([entry for entry in self._valid(arena) if entry.capture >= capture], event)

    def poison_only(self, arena: Arena, capture: int, event: str) -> None:
        """A graph was reset: poison its outputs."""
        self._poison([entry for entry in self._valid(arena) if entry.capture == capture], event)

    def find_poisoned(self, tensor: Tensor) -> OutputCopy | None:
        """Return the poisoned output to which a tensor belongs, if any."""
        if not self._handed_out:
            return None
        storage = storage_of(tensor)
        if storage is None:
            return None
        entry = self._handed_out.get(storage._cdata)
        if entry is None or not entry.overwritten_by or entry.storage.expired():
            return None
        return entry

    def has_poisoned(self) -> bool:
        return any(entry.overwritten_by and not entry.storage.expired() for entry in self._handed_out.values())

    def forget_if_rewritten(self, tensor: Tensor) -> None:
        """Forget a poisoned output that the program has overwritten completely: it is valid again."""
        if self.find_poisoned(tensor) is None:
            return
        storage = tensor.untyped_storage()
        if tensor.nbytes == storage.nbytes():
            del self._handed_out[storage._cdata]

    def _valid(self, arena: Arena) -> list[OutputCopy]:
        for key in [key for key, entry in self._handed_out.items() if entry.storage.expired()]:
            del self._handed_out[key]
        return [entry for entry in self._handed_out.values() if entry.arena is arena and not entry.overwritten_by]

    def _poison(self, entries: list[OutputCopy], event: str) -> None:
        for entry in entries:
            assert entry.alias is not None
            if not entry.alias.is_inference():
                torch._C._increment_version([entry.alias])  # so that autograd refuses a backward that saved it
            bytes_of(entry.alias.untyped_storage()).fill_(_POISON)
            entry.overwritten_by = event
            entry.alias = None


# -- the session -----------------------------------------------------------------------------------


class ChangedValue(NamedTuple):
    """A Python value that changed since capture. Only a comparison with eager shows whether that matters."""

    what: str
    where: Location


class Session:
    """The settings, findings and current state of one `sanitize()` block."""

    def __init__(self, compares: bool, stream: TextIO | None) -> None:
        self.findings = Findings()
        self.compares = compares  # the function also runs eagerly at each replay
        self.active = False
        self.outputs = OutputPoisoner()
        self.host_reads: dict[Location, str] = {}  # of the capture in progress
        self._stream = stream
        self._capture_depth = 0  # number of nested warm-ups and recordings
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
        """The runtime steps an optimizer on zero gradients. Host reads in that step are not the function's."""
        self._creating_optimizer_state = True
        try:
            yield
        finally:
            self._creating_optimizer_state = False

    def note_host_read(self, operation: str) -> None:
        """Remember a host read in case the capture fails. If it succeeds, only the first run read on the host."""
        if self.is_capturing and not self._creating_optimizer_state:
            self.host_reads.setdefault(here(), describe_host_read(operation) + optimizer_hint())

    def report_program_changes(self, graph: str, snapshot: ProgramSnapshot) -> list[ChangedValue]:
        """Report changes that are certainly wrong, and return the Python values that changed."""
        line = here()
        for change in snapshot.tree_changes():
            self.report("tree", graph, change, line)
        for name in snapshot.moved_tensors():
            self.report("moved", graph, f"{name} is at another address than at capture", line)
        for tensor in snapshot.orphans():
            what = f"the graph reads a tensor of shape {tuple(tensor.shape)} that nothing else refers to any more"
            self.report("orphan", graph, what, line)
        changed: list[ChangedValue] = []
        for read, value in snapshot.names.changed():
            what = f"{read.name} was {describe_value(read.value)} at capture and is {describe_value(value)} now"
            changed.append(ChangedValue(what, read.where))
        return changed


def describe_host_read(operation: str) -> str:
    return f"{operation} reads tensor values on the host"
