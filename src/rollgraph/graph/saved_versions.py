"""What autograd saved for a backward, and whether it was changed since the forward.

Eager autograd refuses a backward over a tensor that was changed in place since it was saved. A graph
would read the changed memory. So a segment compares the same version counters: those of the outside
tensors and outputs that the recorded forward saved, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from rollgraph.graph.autograd_leaves import nodes_behind
from rollgraph.graph.errors import StaleGraph
from rollgraph.graph.surface import spanned
from rollgraph.graph.undo_log import storage_of

version = attrgetter("_version")


class SavedVersions:
    """The version counters of the tensors that a backward reads and the program can change."""

    def __init__(self, named: Mapping[str, Tensor] | None = None) -> None:
        self._names = list(named or ())
        # Plain tensors share the counter with parameters and are read faster.
        self.tensors = [tensor.detach() for tensor in (named or {}).values()]
        self.noted: list[int] = []  # their versions after the last forward

    @classmethod
    def of(cls, results: Sequence[Tensor], named: Mapping[str, Tensor]) -> SavedVersions:
        """The versions of those among `named` that the autograd graph behind `results` saved."""
        saved = [(spanned(t), t.device) for t in saved_tensors(results) if storage_of(t) is not None and t.numel()]
        found = {}
        for name, tensor in named.items():
            if tensor.is_inference() or storage_of(tensor) is None or not tensor.numel():
                continue
            low, high = spanned(tensor)
            if any(start < high and low < end and device == tensor.device for (start, end), device in saved):
                found[name] = tensor
        return cls(found)

    def refuse_change(self, graph: str) -> NoReturn:
        """Raise StaleGraph: a tensor changed since the forward."""
        pairs = zip(self._names, self.noted, self.tensors, strict=True)
        changed = [name for name, noted, tensor in pairs if tensor._version != noted]
        raise StaleGraph(
            f"{', '.join(changed[:3])} of graph {graph!r} was modified in place between its forward and its backward, "
            "which needs the value that the forward saw: run the backward first, or change a clone"
        )


def saved_tensors(results: Sequence[Tensor]) -> Iterator[Tensor]:
    """What the nodes behind `results` saved, except what a saved-tensor hook packed away."""
    for node in nodes_behind(results):
        for name in dir(node):
            if not name.startswith("_raw_saved_"):
                continue
            for saved in _flat(getattr(node, name)):
                if saved.unpack_hook is None and isinstance(saved.data, Tensor):
                    yield saved.data


def _flat(saved: Any) -> Iterable[Any]:
    if isinstance(saved, torch._C._autograd.SavedTensor):
        return (saved,)
    return [entry for entry in saved or () if isinstance(entry, torch._C._autograd.SavedTensor)]
