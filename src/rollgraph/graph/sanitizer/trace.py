"""Probes: what each operation of a run computed, as one number for each result.

Inside a recording the sums become part of the graph, so that a replay leaves its own; next to those of
an eager run they name the first operation that computed something else.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph.errors import Location, here
from rollgraph.graph.undo_log import storage_of, tensors_in, written_arguments

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")


@dataclass
class TracedOperation:
    """One operation that ran."""

    operation: str
    where: Location
    constants: tuple[Any, ...]  # the numbers among its arguments
    codes: set[CodeType]  # of the functions that were running
    sums: list[Tensor]
    made: list[weakref.ref[Tensor]]  # the tensors it returned


class OperationTrace(TorchDispatchMode):
    """Notes each operation while it is entered, and sums the bits of what it computed."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[TracedOperation] = []
        self.codes: set[CodeType] = set()  # of the functions that left an operation in the recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = list(tensors_in(result))
        sums: list[Tensor] = []
        computes = not func.is_view or func._schema.name == "aten::lift_fresh"  # torch.tensor(...)
        if computes and not func._schema.name.startswith(_UNINITIALISED):
            written = {id(t): t for t in (*results, *written_arguments(func, args, kwargs))}
            sums = [total for t in written.values() if (total := bit_sum(t)) is not None]
        given = {id(t) for t in tensors_in((args, kwargs))}
        made = [weakref.ref(t) for t in results if id(t) not in given]
        constants = tuple(
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (int, float, complex))
        )
        codes = _codes_on_the_stack()
        if func._schema.name not in ("aten::detach", "aten::alias"):
            self.codes |= codes
        self.steps.append(TracedOperation(str(func), here(), constants, codes, sums, made))
        return result


def _codes_on_the_stack() -> set[CodeType]:
    found: set[CodeType] = set()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def bits(tensor: Tensor) -> Tensor | None:
    """The tensor's memory as integers, or None where there is none to look at."""
    if storage_of(tensor) is None or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = _BITS.get(tensor.element_size())
    return None if dtype is None else tensor.view(dtype)


def bit_sum(tensor: Tensor) -> Tensor | None:
    with torch._C.DisableTorchFunction():
        found = bits(tensor)
        return None if found is None or not found.numel() else found.sum(dtype=torch.int64)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is None and other is None
    mine, theirs = bits(one), bits(other)
    return mine is None or theirs is None or torch.equal(mine, theirs)


def python_difference(one: Sequence[TracedOperation], other: Sequence[TracedOperation]) -> tuple[str, Location] | None:
    """Where two runs of one function part because Python gave an operation other values, not because of a kernel."""
    for first, second in zip(one, other, strict=False):
        if first.operation != second.operation or repr(first.constants) != repr(second.constants):
            return f"{first.operation} gets another Python value each time the function runs", first.where
        if any(not torch.equal(a, b) for a, b in zip(first.sums, second.sums, strict=False)):
            made = first.operation.startswith("aten.lift_fresh")
            return (
                ("a tensor is made of other Python values each time the function runs", first.where) if made else None
            )
    return None


def _numbers(step: TracedOperation) -> str:
    return ", ".join(map(repr, step.constants)) or "no number"


def first_difference(
    eager: Sequence[TracedOperation], replayed: Sequence[TracedOperation]
) -> tuple[str, Location] | None:
    """The first operation that did not compute the same, and its place."""
    for mine, theirs in zip(eager, replayed, strict=False):
        if mine.operation != theirs.operation:
            return f"eager runs {mine.operation} where the graph holds {theirs.operation}", mine.where
        if repr(mine.constants) != repr(theirs.constants):
            what = f"{mine.operation} gets {_numbers(mine)}, the graph holds {_numbers(theirs)}"
            return what, mine.where
        if any(not torch.equal(a, b) for a, b in zip(mine.sums, theirs.sums, strict=False)):
            return f"{mine.operation} is the first operation that computes something else", mine.where
    if len(eager) != len(replayed):
        step = (eager if len(eager) > len(replayed) else replayed)[min(len(eager), len(replayed))]
        return f"eager runs {len(eager)} operations, the graph holds {len(replayed)}", step.where
    return None
