"""The trace of a run: each operation with its line, its Python numbers and a checksum of what it computed.

While a graph is recorded, the checksums become part of it, so that every replay computes its own. Comparing them with
those of an eager run (`divergence.py`) names the first operation that computed something else.
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

from rollgraph.graph.errors import Location, here
from rollgraph.graph.operation_mode import OperationMode
from rollgraph.graph.undo_log import storage_of, tensors_in, written_arguments

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")


@dataclass
class TracedOperation:
    """One operation that ran."""

    operation: str
    where: Location
    numbers: tuple[Any, ...]  # the Python numbers among its arguments
    running: set[CodeType]  # the code of the functions that were running
    checksums: list[Tensor]
    results: list[weakref.ref[Tensor]]  # the tensors that it made


class OperationTrace(OperationMode):
    """Traces each operation while it is entered."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[TracedOperation] = []
        self.recorded_code: set[CodeType] = set()  # of the functions that left an operation in the recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returned = tensors_in(result)
        checksums: list[Tensor] = []
        if _computes(func):
            checksums = _checksums([*returned, *written_arguments(func, args, kwargs)])
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        made = [weakref.ref(tensor) for tensor in returned if id(tensor) not in given]
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, (int, float, complex)))
        running = _code_on_the_stack()
        if func._schema.name not in ("aten::detach", "aten::alias"):
            self.recorded_code |= running
        self.operations.append(TracedOperation(str(func), here(), numbers, running, checksums, made))
        return result


def _computes(func: Any) -> bool:
    """Whether an operation has a result to check: a view has none, and fresh memory has no value yet."""
    name = func._schema.name
    if func.is_view and name != "aten::lift_fresh":  # which is torch.tensor(...)
        return False
    return not name.startswith(_UNINITIALISED)


def _code_on_the_stack() -> set[CodeType]:
    """The functions that led to an operation. A hook is a plain function, so only the stack tells that it ran."""
    found: set[CodeType] = set()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def _checksums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of the bits of each tensor, without those that have none to look at."""
    sums: list[Tensor] = []
    with torch._C.DisableTorchFunction():
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            integers = _as_integers(tensor)
            if integers is not None and integers.numel():
                sums.append(integers.sum(dtype=torch.int64))
    return sums


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit, as far as their memory can be looked at."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    integers = _as_integers(one)
    others = _as_integers(other)
    return integers is None or others is None or torch.equal(integers, others)


def _as_integers(tensor: Tensor) -> Tensor | None:
    """The tensor's memory as integers, or None if it has no memory that can be read as it is."""
    if storage_of(tensor) is None or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = _INTEGERS.get(tensor.element_size())
    return None if dtype is None else tensor.view(dtype)
