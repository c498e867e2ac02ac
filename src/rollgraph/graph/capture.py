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

from rollgraph.graph.backend import Backend, EagerBackend
from rollgraph.graph.captured import (
    Captured,
    FirstRun,
    GraphSpec,
    OnMismatch,
    callable_name,
    identity,
    refuse_nesting,
)
from rollgraph.graph.cuda_backend import CudaBackend
from rollgraph.graph.errors import CaptureError
from rollgraph.graph.function_recorder import FunctionRecorder
from rollgraph.graph.function_variant import FunctionVariant, eager_variant
from rollgraph.graph.hooks import NO_HOOKS, GraphHooks, Guard
from rollgraph.graph.observer import current_observer
from rollgraph.graph.pool import Arena, GraphPool
from rollgraph.graph.pool_memory import PoolHandle
from rollgraph.graph.report import GraphRecord
from rollgraph.graph.surface import Surface
from rollgraph.graph.tape import TapeBackend

P = ParamSpec("P")
R = TypeVar("R")
BackendName = Literal["auto", "cuda", "tape", "eager"]


class GraphedFunction(Captured[P, R, FunctionVariant], Generic[P, R]):
    """A captured function: call it like the original, and it replays.

    The next replay in its pool overwrites what it returns.
    """

    def _capture(self, surface: Surface, arena: Arena) -> FunctionVariant:
        if not self._records:
            return eager_variant(self._spec, surface, arena)
        return FunctionRecorder(self._spec, surface, arena).capture()

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], arena: Arena) -> None:
        """Capture one call in `arena`. On an error nothing has changed."""
        self.adopt(self._capture(Surface(args, kwargs), arena))

    def __reduce__(self) -> Any:
        """A copy or pickle is the function itself, ungraphed."""
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

    With `warmup_in_pool`, warm-up takes its memory on a GPU from the pool and leaves it to the recording; otherwise the
    two need their memory side by side. A function that keeps something it makes in warm-up is then refused.

    The first run of warm-up is in the context that `first_run` makes. What it computes there need not be right, so that
    it can leave out what has yet to be compiled, for example.
    """
    if not callable(fn):
        raise CaptureError(f"capture takes a function, got {type(fn).__name__}")
    if isinstance(example_inputs, Tensor) or not isinstance(example_inputs, (tuple, list)):
        raise CaptureError(f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}")
    if warmup < 1:
        raise CaptureError(f"warmup={warmup}: at least one run is needed, to find what the function writes")
    if not callable(first_run):
        raise CaptureError(f"first_run must be a function that makes a context manager, got {type(first_run).__name__}")
    hooks = hooks or NO_HOOKS
    if hooks.pre_backward or hooks.post_backward:
        raise CaptureError("a captured function has no backward of its own: use make_graphed_callables")
    kwargs = example_kwargs or {}
    chosen = choose_backend(backend, (example_inputs, kwargs), fn)
    pool = GraphPool.of(pool)
    name = name or callable_name(fn)
    refuse_nesting(name)
    record = GraphRecord(pool.unique_name(name), chosen.name)
    spec = GraphSpec(fn, chosen, record, hooks, guards, on_mismatch, warmup, warmup_in_pool, first_run)
    graphed: GraphedFunction[P, R] = GraphedFunction(spec)
    graphed.capture(tuple(example_inputs), kwargs, pool.arena)
    pool.add(graphed)
    return graphed


def choose_backend(name: BackendName, arguments: Any, target: Any) -> Backend:
    """The backend by name, or by the device of the arguments and of the module's parameters."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if isinstance(target, torch.nn.Module):
        tensors += list(target.parameters())
    device = next((t.device for t in tensors if t.is_cuda), None)
    chosen = _choose(name, device, bool(tensors))
    observer = current_observer.get()
    if observer is not None:
        return observer.backend(chosen)
    return chosen


def _choose(name: BackendName, device: torch.device | None, given: bool) -> Backend:
    if name == "eager":
        return EagerBackend()
    if name == "tape" or (name == "auto" and device is None and (given or not torch.cuda.is_available())):
        return TapeBackend()
    if name == "cuda" and not torch.cuda.is_available():
        raise CaptureError("backend='cuda' needs a CUDA device; use 'tape' or 'auto' on a CPU")
    if name == "auto" and device is None:
        raise CaptureError("no tensor argument tells the device: pass backend='cuda' or backend='tape'")
    if name in ("cuda", "auto"):
        return CudaBackend(device or torch.device("cuda"))
    raise ValueError(f"backend={name!r}: expected 'auto', 'cuda', 'tape' or 'eager'")
