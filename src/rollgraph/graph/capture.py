"""`capture`: a whole function, with any backward and optimizer step inside it, as one graph.

Owns the public entry point and the choice of the backend. A captured function is opaque to autograd;
`callables.py` has the graphs that take part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rollgraph.graph.backend import Backend, EagerBackend, current_observer
from rollgraph.graph.captured import (
    FirstRun,
    FunctionVariant,
    GraphedTarget,
    GraphSpec,
    OnMismatch,
    callable_name,
    check_guards,
    identity,
    refuse_nesting,
)
from rollgraph.graph.cuda_backend import CudaBackend
from rollgraph.graph.errors import CaptureError, NeedsWarmup, ReplayMismatch
from rollgraph.graph.function_recorder import FunctionRecorder, eager_variant
from rollgraph.graph.hooks import NO_HOOKS, GraphHooks, Guard
from rollgraph.graph.pool import Arena, GraphPool, GraphRecord, PoolHandle
from rollgraph.graph.surface import Surface
from rollgraph.graph.tape import TapeBackend

P = ParamSpec("P")
R = TypeVar("R")
BackendName = Literal["auto", "cuda", "tape", "eager"]


class GraphedFunction(GraphedTarget[P, R, FunctionVariant], Generic[P, R]):
    """A captured function: call it like the original, and it replays.

    The next replay in its pool overwrites its outputs.
    """

    def __init__(self, spec: GraphSpec, pool: GraphPool) -> None:
        super().__init__(spec)
        self._pool: GraphPool | None = pool  # where to capture; None once captured

    @property
    def captured(self) -> bool:
        return self._pool is None

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Capture this call without running it for real. On an error nothing has changed."""
        pool = self._pool
        assert pool is not None, f"graph {self.name!r} is captured already"
        refuse_nesting(self.name)
        self._enter_pool(pool, self._capture(Surface(args, kwargs), pool.arena))

    def _capture(self, surface: Surface, arena: Arena) -> FunctionVariant:
        if not self._records:
            return eager_variant(self._spec, surface, arena)
        return FunctionRecorder(self._spec, surface, arena).capture()

    def _enter_pool(self, pool: GraphPool, variant: FunctionVariant) -> None:
        self.add_variant(variant)
        pool.add(self)
        self._pool = None

    def _call_without_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        pool = self._pool
        if pool is None:
            return super()._call_without_variant(args, kwargs)
        with pool.arena.lock:  # waits for a first call in another thread, while graphs are disabled
            if self.enabled and self._pool is pool:
                refuse_nesting(self.name)
                check_guards(self._guards, self.name)
                return self._make_first_call(pool, args, kwargs)
        if self._pool is pool:
            return self._run_original("disabled", args, kwargs)
        return self(*args, **kwargs)

    def _make_first_call(self, pool: GraphPool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Record the call as it runs if the backend can; otherwise capture it, then replay."""
        record = self._spec.backend.record_call
        with pool.disabled():
            if record is not None:
                surface = Surface(args, kwargs)
                pool.arena.enter_thread(self.name)
                try:
                    variant = FunctionRecorder(self._spec, surface, pool.arena).record_call(record)
                except NeedsWarmup:  # rolled back
                    pass
                except ReplayMismatch as error:  # rolled back, too
                    if self._handle_mismatch(error) != "eager":
                        raise
                    return self._original(*args, **kwargs)
                else:
                    self._enter_pool(pool, variant)
                    result: R = variant.first_call_result()
                    return result
                # Unsaved memory holds results of earlier calls, so it is restored, too.
                self._enter_pool(pool, FunctionRecorder(self._spec, surface, pool.arena, saves_all=True).capture())
            else:
                self.capture(*args, **kwargs)
        return self(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self._pool = None

    def __reduce__(self) -> Any:
        """A copy or pickle is the original function."""
        return identity, (self._original,)


def capture(
    fn: Callable[P, R],
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    pool: GraphPool | PoolHandle | None = None,
    hooks: GraphHooks | None = None,
    guards: Sequence[Guard] = (),
    backend: BackendName = "auto",
    on_mismatch: OnMismatch = "raise",
    warmup: int = 3,
    warmup_in_pool: bool = False,
    first_run: FirstRun = nullcontext,
    name: str | None = None,
) -> GraphedFunction[P, R]:
    """Capture `fn(*example_inputs, **example_kwargs)`, including any backward and optimizer step inside it.

    Afterwards parameters, gradients, optimizer state and RNG are as before. The result replays when it is called
    with arguments of the same surface; `on_mismatch` says what happens to other calls. Replays accumulate into the
    gradients that exist at capture.

    With `warmup_in_pool`, warm-up on a GPU allocates from the pool and the recording reuses that memory; otherwise both
    need their memory at the same time. A function that keeps a tensor it created in warm-up is then refused.

    The first run of warm-up happens inside the context that `first_run()` returns. Its results need not be correct, so
    it can, for example, skip kernels that are still to be compiled.
    """
    if isinstance(example_inputs, Tensor) or not isinstance(example_inputs, (tuple, list)):
        raise CaptureError(f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}")
    hooks = hooks or NO_HOOKS
    if hooks.pre_backward or hooks.post_backward:
        raise CaptureError("a captured function has no backward of its own: use make_graphed_callables")
    _check_arguments(fn, warmup, first_run)
    kwargs = example_kwargs or {}
    resolved_backend = choose_backend(backend, (example_inputs, kwargs), fn)
    pool = GraphPool.of(pool)
    record = _new_record(fn, name, pool, resolved_backend)
    spec = GraphSpec(fn, resolved_backend, record, hooks, guards, on_mismatch, warmup, warmup_in_pool, first_run)
    graphed: GraphedFunction[P, R] = GraphedFunction(spec, pool)
    graphed.capture(*example_inputs, **kwargs)
    return graphed


def capture_lazily(
    fn: Callable[P, R],
    *,
    pool: GraphPool,
    backend: BackendName,
    guards: Sequence[Guard] = (),
    on_mismatch: OnMismatch = "raise",
    warmup: int = 3,
    warmup_in_pool: bool = False,
    first_run: FirstRun = nullcontext,
    name: str | None = None,
) -> GraphedFunction[P, R]:
    """Capture `fn` at its first call, or earlier by a call of its method `capture`. Arguments are as for `capture`.

    On a tape, the first call itself is recorded: its result, random draws, gradients and writes are those of eager. If
    it raises, all of that is rolled back, except for memory passed to `GraphPool.leave_unsaved`. A CUDA graph is
    captured, then replayed. Other graphs of the pool run their original code during that call.
    """
    _check_arguments(fn, warmup, first_run)
    resolved_backend = choose_backend(backend, (), fn)
    record = _new_record(fn, name, pool, resolved_backend)
    spec = GraphSpec(fn, resolved_backend, record, NO_HOOKS, guards, on_mismatch, warmup, warmup_in_pool, first_run)
    graphed: GraphedFunction[P, R] = GraphedFunction(spec, pool)
    pool.uncaptured.append(graphed)
    return graphed


def _check_arguments(fn: Any, warmup: int, first_run: Any) -> None:
    if not callable(fn):
        raise CaptureError(f"capture takes a function, got {type(fn).__name__}")
    if warmup < 1:
        raise CaptureError(f"warmup={warmup}: at least one run is needed, to find what the function writes")
    if not callable(first_run):
        raise CaptureError(f"first_run must be a function that makes a context manager, got {type(first_run).__name__}")


def _new_record(fn: Any, name: str | None, pool: GraphPool, backend: Backend) -> GraphRecord:
    name = name or callable_name(fn)
    refuse_nesting(name)
    return GraphRecord(pool.unique_name(name), backend.name)


def choose_backend(name: BackendName, arguments: Any, target: Any) -> Backend:
    """Choose the backend by name or, for "auto", by the device of the arguments and the module's parameters."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if isinstance(target, torch.nn.Module):
        tensors += list(target.parameters())
    device = next((t.device for t in tensors if t.is_cuda), None)
    resolved_backend = _backend_by_name(name, device, bool(tensors))
    observer = current_observer.get()
    if observer is not None:
        return observer.wrap_backend(resolved_backend)
    return resolved_backend


def _backend_by_name(name: BackendName, device: torch.device | None, has_tensors: bool) -> Backend:
    """`device` is the CUDA device of the tensors; None if they are on the CPU, or if there are none."""
    if name == "eager":
        return EagerBackend()
    if name == "tape" or (name == "auto" and device is None and (has_tensors or not torch.cuda.is_available())):
        return TapeBackend()
    if name == "cuda" and not torch.cuda.is_available():
        raise CaptureError("backend='cuda' needs a CUDA device; use 'tape' or 'auto' on a CPU")
    if name == "auto" and device is None:
        raise CaptureError("no tensor argument tells the device: pass backend='cuda' or backend='tape'")
    if name in ("cuda", "auto"):
        return CudaBackend(device or torch.device("cuda"))
    raise ValueError(f"backend={name!r}: expected 'auto', 'cuda', 'tape' or 'eager'")
