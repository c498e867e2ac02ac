"""Outputs in the hands of the program: copies, poisoned once a replay would have written over the original.

A replay may write over its own last output, and over that of any graph captured after it in the same
arena: their memory was free, or temporary, while it was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rollgraph.graph.pool import Arena
from rollgraph.graph.undo_log import bytes_of, storage_of


@dataclass
class Lent:
    arena: Arena
    number: int
    graph: str
    storage: StorageWeakRef
    alias: Tensor | None  # until it has ended
    ended: str = ""


class StaleOutputs:
    """Copies of outputs in the hands of the program, and those whose time is over."""

    def __init__(self) -> None:
        self._lent: dict[int, Lent] = {}

    def lend(
        self, arena: Arena, number: int, graph: str, outputs: Sequence[Tensor | None], borrowed: set[int]
    ) -> list[Tensor | None]:
        """Copies of the outputs; what lies in `borrowed` storages is the program's own and is handed out as it is."""
        handed: list[Tensor | None] = []
        with torch.no_grad():
            for output in outputs:
                if output is None or output.untyped_storage()._cdata in borrowed:
                    handed.append(output)
                    continue
                copy = output.clone()
                handed.append(copy)
                if copy.numel():
                    storage = copy.untyped_storage()
                    alias = copy.detach()
                    self._lent[storage._cdata] = Lent(arena, number, graph, StorageWeakRef(storage), alias)
        return handed

    def end(self, arena: Arena, number: int, why: str, only: bool = False) -> None:
        """Poison what a replay of that graph may write over: results of graphs that were captured later, or its own."""
        for key, lent in list(self._lent.items()):
            if lent.storage.expired():
                del self._lent[key]
            elif lent.arena is arena and not lent.ended and (lent.number == number if only else lent.number >= number):
                assert lent.alias is not None
                _poison(lent.alias)
                lent.ended, lent.alias = why, None

    def ended(self, tensor: Tensor) -> Lent | None:
        if not self._lent:
            return None
        storage = storage_of(tensor)
        lent = None if storage is None else self._lent.get(storage._cdata)
        return lent if lent is not None and lent.ended and not lent.storage.expired() else None

    def written(self, tensor: Tensor) -> None:
        """Written over from end to end: from now on it is the program's."""
        lent = self.ended(tensor)
        if lent is not None and tensor.nbytes == tensor.untyped_storage().nbytes():
            del self._lent[tensor.untyped_storage()._cdata]


def _poison(tensor: Tensor) -> None:
    """Every byte 0xff: NaN as a number, -1 as an index."""
    if not tensor.is_inference():
        torch._C._increment_version([tensor])  # what autograd saved of it is not the same any more
    bytes_of(tensor.untyped_storage()).fill_(0xFF)
