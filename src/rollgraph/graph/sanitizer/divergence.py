"""Where two traces of one function diverge, and whether Python values are the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rollgraph.graph.errors import Location
from rollgraph.graph.sanitizer.operation_trace import TracedOperation


class Divergence(NamedTuple):
    what: str
    where: Location


def first_divergence(eager: Sequence[TracedOperation], replayed: Sequence[TracedOperation]) -> Divergence | None:
    """The first operation that an eager run and a replay did not compute alike."""
    for ours, theirs in zip(eager, replayed, strict=False):
        if ours.operation != theirs.operation:
            return Divergence(f"eager runs {ours.operation}, but the graph holds {theirs.operation}", ours.where)
        if not _same_numbers(ours, theirs):
            what = f"eager passes {_spell_numbers(ours)} to {ours.operation}, but the graph holds "
            return Divergence(what + _spell_numbers(theirs), ours.where)
        if not _same_checksums(ours, theirs):
            return Divergence(f"{ours.operation} is the first operation with another result", ours.where)
    if len(eager) == len(replayed):
        return None
    longer = eager if len(eager) > len(replayed) else replayed
    first_extra = longer[min(len(eager), len(replayed))]
    what = f"eager runs {len(eager)} operations, but the graph holds {len(replayed)}"
    return Divergence(what, first_extra.where)


def python_divergence(one: Sequence[TracedOperation], other: Sequence[TracedOperation]) -> Divergence | None:
    """Where two eager runs diverge because Python gave an operation other values; None if a kernel is the reason."""
    for first, second in zip(one, other, strict=False):
        if first.operation != second.operation or not _same_numbers(first, second):
            return Divergence(f"{first.operation} gets another Python value in each run of the function", first.where)
        if not _same_checksums(first, second):
            if first.operation.startswith("aten.lift_fresh"):
                return Divergence("a tensor is made from other Python values in each run of the function", first.where)
            return None
    return None


def _same_numbers(one: TracedOperation, other: TracedOperation) -> bool:
    return repr(one.numbers) == repr(other.numbers)  # NaN equals NaN here, and 1 differs from True


def _same_checksums(one: TracedOperation, other: TracedOperation) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.checksums, other.checksums, strict=False))


def _spell_numbers(operation: TracedOperation) -> str:
    return ", ".join(map(repr, operation.numbers)) or "no number"
