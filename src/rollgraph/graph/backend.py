"""Backends: how a function becomes something that can be replayed.

`eager` runs the Python again, `cuda` records a CUDA graph, `tape` (its own file) records operations.
All three are behind one protocol, so nothing above asks which one it has. The refusal of host reads
is here, because every recording backend needs it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph.errors import CaptureError, GraphError, HostReadError, here, raised_at
from rollgraph.graph.pool import Arena, pool_segments
from rollgraph.graph.surface import StaticTensors
from rollgraph.graph.undo_log import no_gc, storage_of, tensors_in

_increment_version = torch._C._increment_version
Thunk = Callable[[Sequence[Tensor]], list[Tensor | None]]


class Recording(Protocol):
    """One recorded pass. `replay` fills the inputs, runs, and returns the outputs."""

    operations: int
    nbytes: int  # memory that stays allocated for it
    external: Sequence[Tensor]  # tensors it reads or writes that it did not make and was not given
    outputs: list[Tensor | None]

    def seal(self, versions: bool = True) -> None:
        """All passes of its callable are recorded; none will refer to this one any more.

        With `versions`, each replay raises those of its outputs: autograd sees that they were written.
        """

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]: ...

    def release(self) -> None: ...


class Backend(Protocol):
    name: str
    records: bool  # False: Python runs each time, so there is nothing to warm up or to bind
    executes: bool  # recording runs the function for real

    def stage(self, arena: Arena) -> AbstractContextManager[None]:
        """Where warm-up runs."""

    def record(
        self,
        thunk: Thunk,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        marks: dict[Any, Any],
    ) -> Recording:
        """Run `thunk` on `inputs` and record it. `marks` is shared by the passes of one callable."""


# -- eager -----------------------------------------------------------------------------------------


class EagerRecording:
    """Runs the Python function itself, on the caller's own tensors."""

    operations = 0
    nbytes = 0
    external: Sequence[Tensor] = ()

    def __init__(self, thunk: Thunk) -> None:
        self.outputs: list[Tensor | None] = []
        self._thunk = thunk

    def seal(self, versions: bool = True) -> None:
        pass

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        return self._thunk(inputs)

    def release(self) -> None:
        pass


class EagerBackend:
    name = "eager"
    records = False
    executes = False

    def stage(self, arena: Arena) -> AbstractContextManager[None]:
        return nullcontext()

    def record(
        self,
        thunk: Thunk,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        marks: dict[Any, Any],
    ) -> Recording:
        return EagerRecording(thunk)


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
    """Refuses the reads that never reach the dispatcher: `.tolist()`, `.numpy()`, `bool()`, printing, `apply_`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = reads_on_host(func, args)
        if read is not None:
            _refuse(read)
        return func(*args, **(kwargs or {}))


def reads_on_host(func: Any, args: tuple[Any, ...]) -> str | None:
    """The name of a function that reads values without a word to the dispatcher, else None."""
    name = _READING_METHODS.get(getattr(func, "__wrapped__", func))  # the undo log wraps some of them
    if name is not None:
        return f"Tensor.{name}"
    if func in _CONSTRUCTORS and any(map(_lists_tensors, args)):
        return f"{func.__name__} of a list of tensors"
    if func in (torch.tensor_split, Tensor.tensor_split) and any(isinstance(a, Tensor) for a in args[1:]):
        return "tensor_split by a tensor"
    return None


def _lists_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and next(tensors_in(argument), None) is not None


@contextmanager
def refusing_host_reads() -> Iterator[None]:
    """HostReads, in backward too: PyTorch runs `backward` itself with the mode off, so the engine turns it on."""
    engine = torch.autograd._engine_run_backward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with HostReads():
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = watched
    try:
        with HostReads():
            yield
    finally:
        torch.autograd._engine_run_backward = engine


def refuse_host_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise if an operation's result, or the shape of it, depends on values read on the host."""
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
    """A copy into pageable memory cannot be captured, and would only be made to be read."""
    name, source = func._schema.name, next(tensors_in(args[1:2] if "copy_" in func._schema.name else args[:1]), None)
    if source is None or not source.is_cuda:
        return
    target = kwargs.get("device")
    if name == "aten::_to_copy" and target is not None and target.type == "cpu" and not kwargs.get("pin_memory"):
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
    in_optimizer = any("/torch/optim/" in frame.filename for frame in traceback.extract_stack())
    return "; optimizers need fused=True on a CPU and capturable=True on a GPU" if in_optimizer else ""


@contextmanager
def capture_errors(what: str, kind: type[CaptureError] = CaptureError) -> Iterator[None]:
    """Turn whatever the user's function raised into a CaptureError that names the place."""
    try:
        yield
    except GraphError:
        raise
    except Exception as error:
        message = str(error).split("\n", 1)[0]
        if "legacy stream" in message:
            message += " (is an output or a loss of an earlier run still alive? It ties the parameters to its stream)"
        raise kind(f"{what} failed at {raised_at(error)}: {type(error).__name__}: {message}") from error


# -- CUDA ------------------------------------------------------------------------------------------


class Sentry(TorchDispatchMode):
    """Watches a CUDA capture: refuses host reads before they break it, and holds what it reads."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.seen: dict[int, Tensor] = {}
        self._held: set[int] = set()  # the storages of those
        self.made: dict[int, StorageWeakRef] = {}  # weak, but a key is not used again while it is here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_host_read(func, args, kwargs)
        refuse_copy_to_host(func, args, kwargs)
        self.operations += 1
        inputs = set()
        for tensor in tensors_in((args, kwargs)):
            storage = storage_of(tensor)
            if storage is None or storage._cdata in self.made:
                continue
            inputs.add(storage._cdata)
            # A leaf by identity, to see it re-pointed; of others only the memory, not their autograd graph.
            if tensor.is_leaf:
                self.seen[id(tensor)] = tensor
                self._held.add(storage._cdata)
            elif storage._cdata not in self._held:
                self.seen[-storage._cdata] = tensor.detach()
                self._held.add(storage._cdata)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in inputs:
                self.made.setdefault(storage._cdata, StorageWeakRef(storage))
        return result


class CudaRecording:
    """A CUDA graph with its static inputs and outputs."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: StaticTensors,
        outputs: list[Tensor | None],
        sentry: Sentry,
        arena: Arena,
    ) -> None:
        self._arena = arena
        self.operations = sentry.operations
        self.external: Sequence[Tensor] = list(sentry.seen.values())
        self.nbytes = 0
        self._graph = graph
        self._fill = inputs.fill
        self._launch = super(torch.cuda.CUDAGraph, graph).replay
        self.outputs = outputs
        self._released = False
        self._written = [o for o in outputs if o is not None and not o.is_inference()]

    def seal(self, versions: bool = True) -> None:
        if not versions:
            self._written = []

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        self._fill(inputs)
        self._launch()
        if self._written:  # whoever saved an output of the previous replay for a backward now gets autograd's error
            _increment_version(self._written)
        return self.outputs

    def release(self) -> None:
        if not self._released:
            self._graph.reset()
            self._arena.release()
        self._released = True
        self.outputs, self._written, self.external = [], [], ()


class CudaBackend:
    name = "cuda"
    records = True
    executes = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    @contextmanager
    def stage(self, arena: Arena) -> Iterator[None]:
        stream = arena.stream(self.device)
        caller = torch.cuda.current_stream(self.device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)  # after a failure too: the rollback must not overtake what still runs there

    def record(
        self,
        thunk: Thunk,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        marks: dict[Any, Any],
    ) -> Recording:
        graph, sentry = torch.cuda.CUDAGraph(), Sentry()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        with self.stage(arena), no_gc():
            torch.cuda.synchronize(self.device)
            torch._C._cuda_clearCublasWorkspaces()  # so that the graph's own workspace lies in its pool
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(self.device)
            outputs = self._capture(graph, thunk, inputs, arena, sentry)
            torch._C._cuda_clearCublasWorkspaces()
            recording = CudaRecording(graph, inputs, outputs, sentry, arena)
            recording.nbytes = torch.cuda.memory_allocated(self.device) - before
        segments = pool_segments(arena)
        recording.external = [
            tensor
            for tensor in recording.external  # the pool's own memory is the pool's to hold
            if not any(start <= tensor.data_ptr() < start + size for start, size in segments)
        ]
        return recording

    def _capture(
        self, graph: torch.cuda.CUDAGraph, thunk: Thunk, inputs: StaticTensors, arena: Arena, sentry: Sentry
    ) -> list[Tensor | None]:
        arena.retain()
        try:
            graph.capture_begin(pool=cast(Any, arena.cuda_handle()), capture_error_mode="thread_local")
            with refusing_host_reads(), sentry:
                outputs = thunk(inputs.tensors)
            graph.capture_end()
        except BaseException:
            self._abandon(graph, arena)
            raise
        return outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph, arena: Arena) -> None:
        """End a broken capture and clear what PyTorch leaves behind when CUDA invalidated it."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, arena.cuda_handle())
            generator = torch.cuda.default_generators[self.device.index]
            generator.graphsafe_set_state(torch.Generator(self.device))  # the old one believes it is captured
            arena.handle = None
        graph.reset()
        arena.release()
