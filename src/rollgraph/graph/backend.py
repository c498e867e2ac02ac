"""Backends, which record a function so that it can be replayed; and the observer that the sanitizer installs.

The eager backend runs the Python function again; `cuda_backend.py` records a CUDA graph, and `tape.py` records
operations. All three implement one protocol, so no code above them asks which one it has. Both recording backends
refuse host reads, so that code is here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollgraph.graph.errors import CaptureError, GraphError, HostReadError, here, raised_at
from rollgraph.graph.pool import Arena
from rollgraph.graph.state.undo_log import tensors_in
from rollgraph.graph.surface import StaticTensors

# -- backends --------------------------------------------------------------------------------------

_STREAM_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: the legacy stream would wait for the capture
PassFunction = Callable[[Sequence[Tensor]], list[Tensor | None]]  # a pass: inputs -> outputs


class Recording(Protocol):
    """One recorded pass. `replay` fills the static inputs, runs the pass, and returns its outputs."""

    operations: int
    nbytes: int  # memory that stays allocated for the recording
    external: Sequence[Tensor]  # tensors it reads that are neither created in it nor inputs
    outputs: list[Tensor | None]

    def seal(self, versions: bool = True) -> None:
        """Finish the recording. All passes of its callable are recorded, so none can refer to it any more.

        With `versions`, each replay increments the version counters of its outputs, so that autograd notices the write.
        """

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]: ...

    def release(self) -> None: ...


RecordCall = Callable[[PassFunction, StaticTensors], Recording]  # records a pass as it runs, and keeps its effects


class Backend(Protocol):
    name: str
    records: bool  # False if each replay runs Python: nothing to warm up or to bind
    executes: bool  # whether recording runs the function for real

    @property
    def record_call(self) -> RecordCall | None:
        """Records a call as it runs; None if recording does not have all effects of the call."""

    def stream_context(self, arena: Arena, in_pool: bool = False) -> AbstractContextManager[None]:
        """The context of warm-up: the capture stream on a GPU. With `in_pool`, allocate from the arena's memory."""

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        """Run `run_pass` on `inputs` and record it. The passes of one callable share `shared_state`."""


# -- eager -----------------------------------------------------------------------------------------


class EagerRecording:
    """Runs the Python function itself on the tensors of the caller."""

    operations = 0
    nbytes = 0
    external: Sequence[Tensor] = ()

    def __init__(self, run_pass: PassFunction) -> None:
        self.outputs: list[Tensor | None] = []
        self._run_pass = run_pass

    def seal(self, versions: bool = True) -> None:
        pass

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        return self._run_pass(inputs)

    def release(self) -> None:
        pass


class EagerBackend:
    name = "eager"
    records = False
    executes = False
    record_call = None

    def stream_context(self, arena: Arena, in_pool: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        return EagerRecording(run_pass)


# -- host reads ------------------------------------------------------------------------------------

_READING_METHODS = {
    getattr(Tensor, name): name
    for name in (
        "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
        "__repr__", "__format__", "__contains__", "__dlpack__", "apply_", "map_", "map2_",
    )
}  # fmt: skip
_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class HostReads(TorchFunctionMode):
    """Refuses host reads that bypass the dispatcher: `.tolist()`, `.numpy()`, `bool()`, printing, `apply_`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = reads_on_host(func, args)
        if read is not None:
            _refuse(read)
        return func(*args, **(kwargs or {}))


def reads_on_host(func: Any, args: tuple[Any, ...]) -> str | None:
    """The name of `func` if it reads values on the host without the dispatcher, else None."""
    name = _READING_METHODS.get(getattr(func, "__wrapped__", func))  # the undo log wraps some of them
    if name is not None:
        return f"Tensor.{name}"
    if func in _CONSTRUCTORS and any(map(_lists_tensors, args)):
        return f"{func.__name__} of a list of tensors"
    if func in (torch.tensor_split, Tensor.tensor_split) and any(isinstance(a, Tensor) for a in args[1:]):
        return "tensor_split by a tensor"
    return None


def _lists_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(tensors_in(argument))


@contextmanager
def refusing_host_reads() -> Iterator[None]:
    """Enter HostReads in forward and backward. PyTorch disables the mode around `backward`; we enable it again."""
    engine = torch.autograd._engine_run_backward

    def run_refusing(*args: Any, **kwargs: Any) -> Any:
        with HostReads():
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run_refusing
    try:
        with HostReads():
            yield
    finally:
        torch.autograd._engine_run_backward = engine


def refuse_host_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise HostReadError if an operation's result, or its shape, depends on values read on the host."""
    tags = func.tags
    if func._schema.name == "aten::_pack_padded_sequence":
        _refuse(str(func))
    if torch.Tag.data_dependent_output in tags:
        _refuse(str(func))
    if torch.Tag.dynamic_output_shape in tags and _shape_depends_on_values(func, args, kwargs):
        _refuse(str(func))
    if func._schema.name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        accumulates = len(args) > 3 and args[3]
        if by_mask and (accumulates or args[2].numel() != 1):  # a scalar is a masked fill
            _refuse(f"{func} with a boolean mask")


def refuse_copy_to_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise HostReadError for a copy into pageable memory, which CUDA cannot capture."""
    name = func._schema.name
    sources = args[1:2] if "copy_" in name else args[:1]
    source = next(iter(tensors_in(sources)), None)
    if source is None or not source.is_cuda:
        return
    device = kwargs.get("device")
    if name == "aten::_to_copy" and device is not None and device.type == "cpu" and not kwargs.get("pin_memory"):
        _refuse(f"{func} to the CPU")
    if name == "aten::copy_" and args[0].device.type == "cpu" and not args[0].is_pinned():
        _refuse(f"{func} to the CPU")


def _shape_depends_on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = func._schema.name
    if name == "aten::index":
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return True


def _refuse(operation: str) -> None:
    raise HostReadError(
        f"{operation} at {here()} reads tensor values on the host: a replay would not run it again. "
        "Keep the value in a tensor (torch.where, masked arithmetic), or move the read out of the captured function"
        + optimizer_hint(),
        operation=operation,
    )


def optimizer_hint() -> str:
    """A hint for the error message if an optimizer is running."""
    in_optimizer = any("/torch/optim/" in frame.filename for frame in traceback.extract_stack())
    if not in_optimizer:
        return ""
    return "; optimizers need fused=True on a CPU and capturable=True on a GPU"


@contextmanager
def capture_errors(label: str, kind: type[CaptureError] = CaptureError) -> Iterator[None]:
    """Turn an exception of the user's function into a `kind` of CaptureError that names the line."""
    try:
        yield
    except GraphError:
        raise
    except Exception as error:
        message = str(error).split("\n", 1)[0]
        if getattr(error, "error_code", None) == _STREAM_CAPTURE_IMPLICIT:
            message += " (is an output or a loss of an earlier run still alive? It ties the parameters to its stream)"
        raise kind(f"{label} failed at {raised_at(error)}: {type(error).__name__}: {message}") from error


# -- the observer of captures ----------------------------------------------------------------------
# The runtime calls the observer when it captures a function and when it refuses a call. A replay never does.


class Observer(Protocol):
    def wrap_backend(self, backend: Backend) -> Backend:
        """Return the backend to capture with: `backend`, or a wrapper around it."""

    def creating_optimizer_state(self) -> AbstractContextManager[None]:
        """The context of a step on zero gradients, with which the runtime creates an optimizer's state."""

    def on_capture(self, graph: Any, called_modules: Iterable[nn.Module], recordings: Sequence[Recording]) -> None:
        """A graph was captured. It called these modules and has these new recordings."""

    def on_error(self, graph: Any, error: GraphError) -> None:
        """A call of a graph was refused."""


current_observer: ContextVar[Observer | None] = ContextVar("current_observer", default=None)


def creating_optimizer_state() -> AbstractContextManager[None]:
    """Tell the observer, if there is one, that the runtime and not the program steps an optimizer."""
    observer = current_observer.get()
    if observer is None:
        return nullcontext()
    return observer.creating_optimizer_state()
