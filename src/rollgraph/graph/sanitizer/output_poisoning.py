"""Use-after-overwrite detection: outputs are handed out as copies, which are poisoned when a replay overwrites them.

A replay may overwrite its own last output, and that of any graph captured after it in the same arena: that memory was
free, or held temporaries, while the first graph was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rollgraph.graph.pool import Arena
from rollgraph.graph.undo_log import bytes_of, storage_of

_POISON = 0xFF  # in every byte: NaN as a float, -1 as an index


@dataclass(eq=False)
class HandedOut:
    """The copy of an output that the program holds."""

    arena: Arena
    capture: int  # place of its graph in the arena's order of captures
    graph: str
    storage: StorageWeakRef
    alias: Tensor | None  # until it is poisoned
    overwritten_by: str = ""  # the event that poisoned it


class OutputPoisoner:
    """Hands out copies of outputs, and knows which of them are poisoned."""

    def __init__(self) -> None:
        self._handed_out: dict[int, HandedOut] = {}  # by storage

    def hand_out(
        self, arena: Arena, capture: int, graph: str, outputs: Sequence[Tensor | None], borrowed: set[int]
    ) -> list[Tensor | None]:
        """Copy the outputs. Those in `borrowed` storages are the program's own and are returned as they are."""
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
                    entry = HandedOut(arena, capture, graph, StorageWeakRef(storage), copy.detach())
                    self._handed_out[storage._cdata] = entry
        return copies

    def poison_from(self, arena: Arena, capture: int, event: str) -> None:
        """A graph was replayed: poison its outputs, and those of the graphs captured after it."""
        self._poison([entry for entry in self._valid(arena) if entry.capture >= capture], event)

    def poison_only(self, arena: Arena, capture: int, event: str) -> None:
        """A graph was reset: poison its outputs."""
        self._poison([entry for entry in self._valid(arena) if entry.capture == capture], event)

    def find_poisoned(self, tensor: Tensor) -> HandedOut | None:
        """The poisoned output that a tensor is, or is a view of."""
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
        """A poisoned output that the program overwrites from end to end is valid again."""
        if self.find_poisoned(tensor) is None:
            return
        storage = tensor.untyped_storage()
        if tensor.nbytes == storage.nbytes():
            del self._handed_out[storage._cdata]

    def _valid(self, arena: Arena) -> list[HandedOut]:
        for key in [key for key, entry in self._handed_out.items() if entry.storage.expired()]:
            del self._handed_out[key]
        return [entry for entry in self._handed_out.values() if entry.arena is arena and not entry.overwritten_by]

    def _poison(self, entries: list[HandedOut], event: str) -> None:
        for entry in entries:
            assert entry.alias is not None
            if not entry.alias.is_inference():
                torch._C._increment_version([entry.alias])  # autograd refuses a backward that saved it
            bytes_of(entry.alias.untyped_storage()).fill_(_POISON)
            entry.overwritten_by = event
            entry.alias = None
