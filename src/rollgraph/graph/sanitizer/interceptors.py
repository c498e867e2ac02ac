"""Interceptors: see every operation of the program during a `sanitize()` block, and report to its session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollgraph.graph.errors import GraphError, HostReadError, here
from rollgraph.graph.host_reads import reads_on_host, refuse_copy_to_host, refuse_host_read
from rollgraph.graph.passes import saved_tensors
from rollgraph.graph.sanitizer.session import OutputCopy, Session
from rollgraph.graph.state.undo_log import OperationMode, tensors_in

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")  # they do not read their first argument


class OperationInterceptor(OperationMode):
    """Sees operations in the dispatcher: reads of poisoned outputs; in a capture, host reads and collectives."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors_read(func, args, kwargs):
            _check_read(self._session, tensor, str(func))
        if self._session.is_capturing:
            self._check_capture(func, args, kwargs)
        result = func(*args, **kwargs)
        if func._schema.name in _OVERWRITES:
            self._session.outputs.forget_if_rewritten(args[0])
        return result

    def _check_capture(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func.namespace in _COLLECTIVES:
            self._session.report("collective", "", f"{func} is part of the graph", here())
        try:
            refuse_host_read(func, args, kwargs)
            refuse_copy_to_host(func, args, kwargs)
        except HostReadError as error:
            self._session.note_host_read(error.operation)


class MethodInterceptor(TorchFunctionMode):
    """Sees host reads that never reach the dispatcher: `.tolist()`, `.numpy()`, `bool()`, printing."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = reads_on_host(func, args)
        if operation is not None:
            for tensor in tensors_in(args):
                _check_read(self._session, tensor, operation)
            self._session.note_host_read(operation)
        return func(*args, **(kwargs or {}))


@contextmanager
def intercepting_backward(session: Session) -> Iterator[None]:
    """Report a backward that autograd refuses because it saved an output that was poisoned since."""
    engine = torch.autograd._engine_run_backward

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        saved = _poisoned_outputs_behind(t_outputs, session)
        try:
            return engine(t_outputs, *args, **kwargs)
        except GraphError:
            raise
        except RuntimeError:
            for output in saved:
                what = f"autograd saved an output of graph {output.graph!r} for this backward, but "
                session.report("stale-output", output.graph, what + output.overwritten_by, here())
            raise

    torch.autograd._engine_run_backward = run_backward
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine


def _poisoned_outputs_behind(roots: Any, session: Session) -> list[OutputCopy]:
    poisoned: list[OutputCopy] = []
    if not session.outputs.has_poisoned():
        return poisoned
    with suppress(RuntimeError):  # a graph that a backward freed has no saved tensors
        for tensor in saved_tensors(tensors_in(roots)):
            output = session.outputs.find_poisoned(tensor)
            if output is not None and output not in poisoned:
                poisoned.append(output)
    return poisoned


def _tensors_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors whose values an operation reads."""
    name = func._schema.name
    if func.is_view or name.endswith("_like") or name.startswith("aten::new_"):
        return
    yield from tensors_in(args[1:] if name in _OVERWRITES else args)
    for key, value in kwargs.items():
        if key != "out":
            yield from tensors_in(value)


def _check_read(session: Session, tensor: Tensor, operation: str) -> None:
    output = session.outputs.find_poisoned(tensor)
    if output is None:
        return
    where = here()
    for known in session.findings:
        if (known.kind, known.where) == ("stale-output", where):
            return
    what = f"{operation} reads an output of graph {output.graph!r}, but {output.overwritten_by}"
    session.report("stale-output", output.graph, what, where)
