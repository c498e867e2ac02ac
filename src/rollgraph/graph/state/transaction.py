"""Transactions: after a capture attempt the process is as before, Python state included.

Owns the state around a capture that is not tensor memory: RNGs, gradients, optimizer state, modes, hooks and the
garbage collector. `undo_log.py` restores tensor memory.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rollgraph.graph.errors import CaptureError, NeedsWarmup, StateError
from rollgraph.graph.state.undo_log import UndoLog, isolated_autocast_cache, tensors_in

# -- the Python state of the process ---------------------------------------------------------------
# A function reaches its model through closures, globals or attributes: only the garbage collector knows all objects.
# Owns names, flags, hooks and slots; the undo log owns values in memory.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TRACKED_TYPES = (Tensor, nn.Module, torch.optim.Optimizer)
_MAX_IDLE_COLLECTIONS = 200  # without a capture, then tracking stops; one import causes dozens
_MANY_OBJECTS = 50_000  # with fewer, a full search is as cheap as tracking
_CAN_TRACK = sys.version_info < (3, 14)  # newer collectors do not separate new objects by generation


class _Marker:
    """A new object that must show up in a search for new objects. If it does not, the search missed others, too."""


class LiveObjects:
    """The tensors, modules and optimizers of the process, found quickly for captures in quick succession.

    Asking the garbage collector for every object takes a tenth of a second, and happens only for the first capture.
    After that, a new object is either in a young generation, or our callback saw it there before it was promoted.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._tracking = False
        self._expected = 0  # `_collections()`, if the callback saw them all
        self._idle = 0
        # A new marker for each search. Anything that hides it, such as gc.freeze(), hides other new objects, too.
        self._marker = _Marker()
        self._saw_marker = False

    def find(self) -> list[Any]:
        """Every tensor, module and optimizer that is alive."""
        self._idle = 0
        if self._is_tracking():
            self._remember(_young_objects())
        if not self._is_tracking() or not self._saw_marker:
            self._known.clear()
            self._renew_marker()  # the search itself may cause a collection, which looks for a young one
            self._start_tracking()  # first, so that no object is promoted unseen during the search
            objects = gc.get_objects()
            self._remember(objects)
            # With frozen objects tracking is unsafe: we would not see it when they are unfrozen.
            if len(objects) < _MANY_OBJECTS or gc.get_freeze_count():
                self._stop_tracking()
        self._renew_marker()
        self._forget_dead()
        return [live for ref in list(self._known.values()) if (live := ref()) is not None]

    def _renew_marker(self) -> None:
        self._marker = _Marker()
        self._saw_marker = False

    def _forget_dead(self) -> None:
        dead = [key for key, ref in list(self._known.items()) if ref() is None]
        for key in dead:
            if self._known[key]() is None:  # a collection may have put a new object under this key
                del self._known[key]

    def _is_tracking(self) -> bool:
        return self._tracking and self._on_collection in gc.callbacks and _collections() == self._expected

    def _start_tracking(self) -> None:
        if self._on_collection not in gc.callbacks and _CAN_TRACK:
            gc.callbacks.append(self._on_collection)
        self._tracking = _CAN_TRACK
        self._expected = _collections()

    def _stop_tracking(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self._tracking = False

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 0:
            return
        if phase == "start":
            self._remember(_young_objects())
            return
        self._expected += 1
        self._idle += 1
        if self._idle > _MAX_IDLE_COLLECTIONS or not self._saw_marker:
            self._stop_tracking()
        self._renew_marker()

    def _remember(self, objects: Sequence[Any]) -> None:
        kinds = _subclasses(_TRACKED_TYPES) | {_Marker}
        # By type instead of isinstance: the __class__ of a lazy proxy may run code.
        is_tracked = map(kinds.__contains__, map(type, objects))
        for candidate in compress(objects, is_tracked):
            if candidate is self._marker:
                self._saw_marker = True
            elif type(candidate) is not _Marker:
                self._known[id(candidate)] = weakref.ref(candidate)


def _young_objects() -> list[Any]:
    return gc.get_objects(generation=0) + gc.get_objects(generation=1)


def _collections() -> int:
    """How many collections promoted objects to an old generation."""
    _, middle, old = gc.get_stats()
    return int(middle["collections"] + old["collections"])


def _subclasses(kinds: Sequence[type]) -> set[type]:
    classes: set[type] = set()
    pending = list(kinds)
    while pending:
        kind = pending.pop()
        if kind not in classes:
            classes.add(kind)
            pending += type.__subclasses__(kind)
    return classes


# The only object here that the whole process shares, because there is only one garbage collector to track.
_live_objects = LiveObjects()


class ProgramObjects:
    """Every live trainable leaf, module and optimizer. `roots` are found even if gc.freeze() hides them."""

    def __init__(self, *roots: Any) -> None:
        leaves: dict[int, Tensor] = {}
        modules: dict[int, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        for candidate in _live_objects.find():
            kind = type(candidate)
            if issubclass(kind, Tensor):
                if _is_leaf(candidate) and candidate.requires_grad:
                    leaves[id(candidate)] = candidate
            elif issubclass(kind, torch.optim.Optimizer):
                self.optimizers.append(candidate)
            elif isinstance(candidate.__dict__.get("_modules"), dict):  # not a ScriptModule
                modules[id(candidate)] = candidate
        for root in roots:
            if isinstance(root, nn.Module):
                modules.update((id(m), m) for m in root.modules() if isinstance(m.__dict__.get("_modules"), dict))
        self.modules = list(modules.values())
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    leaves[id(parameter)] = parameter
        self.leaves = list(leaves.values())


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # an invalid view, which cannot be a parameter
        return False


@contextmanager
def collecting_calls(called_modules: dict[int, nn.Module]) -> Iterator[None]:
    """Collect the modules that are called inside."""

    def note(module: nn.Module, _: Any) -> None:
        called_modules[id(module)] = module

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


class PythonState:
    """Flags, hooks and slots of modules, leaves and optimizers, to compare or to restore later."""

    def __init__(self, objects: ProgramObjects) -> None:
        self._training = [(module, module.training) for module in objects.modules]
        self._hooks = [(d, dict(d)) for m in objects.modules for d in _hook_dicts(m)]
        self._tensor_hooks = [(t, dict(t._backward_hooks or {})) for t in objects.leaves]
        self._slots: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        tensors: dict[int, Tensor] = {}
        for module in objects.modules:
            for slots in (module._parameters, module._buffers):
                self._slots.append((module, slots, dict(slots)))
                tensors.update((id(t), t) for t in slots.values() if t is not None)
        self._memory = [(t, t.data_ptr(), t.detach()) for t in tensors.values() if t.layout is torch.strided]
        self._requires_grad = [(t, t.requires_grad) for t in (*objects.leaves, *tensors.values()) if _is_leaf(t)]
        # (optimizer class, state, copy of the state), because a state may contain Python numbers.
        self._python_numbers: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        for optimizer in objects.optimizers:
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    self._python_numbers.append((type(optimizer).__name__, state, dict(state)))

    def find_rebound(self) -> Iterator[str]:
        """Describe what the program replaced or re-pointed since then, which a replay would not repeat."""
        for module, slots, saved in self._slots:
            for key, tensor in saved.items():
                if slots.get(key) is not tensor:
                    yield f"{type(module).__name__}.{key} (assign with copy_ instead)"
        for tensor, address, _ in self._memory:
            if tensor.data_ptr() != address:
                yield f"the memory of a tensor of shape {tuple(tensor.shape)} (`.data =`; use copy_ instead)"
        for name, state, saved in self._python_numbers:
            for key, value in saved.items():
                if isinstance(value, (int, float)) and state.get(key) != value:
                    yield f"{name} state {key!r}, a Python number (it must be a tensor)"

    def restore(self) -> None:
        """Restore flags and hooks."""
        for module, training in self._training:
            module.training = training
        for hooks, saved in self._hooks:
            if hooks.keys() != saved.keys():
                hooks.clear()
                hooks.update(saved)
        for tensor, saved in self._tensor_hooks:
            current: dict[Any, Any] = tensor._backward_hooks or {}
            if current.keys() != saved.keys():
                current.clear()
                current.update(saved)
        for tensor, requires_grad in self._requires_grad:
            if tensor.requires_grad != requires_grad and _is_leaf(tensor):
                tensor.requires_grad_(requires_grad)

    def restore_module_slots(self) -> None:
        """After a failure: give modules and optimizers back their tensors, memory and numbers."""
        for _, slots, saved in self._slots:
            if any(slots.get(key) is not value for key, value in saved.items()) or slots.keys() != saved.keys():
                slots.clear()
                slots.update(saved)
        for tensor, address, original in self._memory:
            if tensor.data_ptr() != address:
                tensor.data = original
        for _, state, saved in self._python_numbers:
            for key, value in saved.items():
                if isinstance(value, (int, float)):
                    state[key] = value


def _hook_dicts(module: nn.Module) -> Iterator[dict[Any, Any]]:
    return (module.__dict__[name] for name in _HOOKS if name in module.__dict__)


# -- transactions ----------------------------------------------------------------------------------


class RngState:
    """The state of all global generators of the process: PyTorch's on each device, Python's and NumPy's."""

    def __init__(self) -> None:
        self._cpu = torch.default_generator.get_state()
        self._cuda: list[Tensor] | None = None
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()
        self._python = random.getstate()
        self._numpy: Any = None
        if "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Transaction:
    """A capture attempt: whatever happens inside, afterwards the process is as before.

    The function may rebind gradients (`leaf.grad = ...`); each leaf gets its old gradient back. `unsaved` has the keys
    of storages that may change (see `GraphPool.leave_unsaved`). After `commit()`, all changes stay.
    """

    def __init__(self, *roots: Any, unsaved: Container[int] = ()) -> None:
        self.undo_log = UndoLog(unsaved)
        self._roots = roots
        self._committed = False

    def __enter__(self) -> Transaction:
        self._rng = RngState()
        self._gc = gc.isenabled()
        self._grad_mode = torch.is_grad_enabled()
        self.objects = ProgramObjects(*self._roots)
        self._python = PythonState(self.objects)
        self.initial_gradients = [(leaf, leaf.grad) for leaf in self.objects.leaves]
        self._states = [(o, {p: set(s) for p, s in o.state.items()}) for o in self.objects.optimizers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_grad_enabled(self._grad_mode)
        with ExitStack() as restore:  # runs every callback, even if another one fails
            restore.callback(gc.enable if self._gc else gc.disable)
            if self._committed:
                return
            restore.callback(self._rng.restore)
            restore.callback(self._python.restore)
            if error is not None:
                restore.callback(self._drop_new_optimizer_state)
                restore.callback(self._python.restore_module_slots)
            restore.callback(self.restore_gradients)
            restore.callback(self.undo_log.rollback)

    def commit(self) -> None:
        """Keep all changes: random draws, writes, gradients and Python state."""
        self._committed = True

    @contextmanager
    def recording(self, executes: bool, was_warmed_up: bool = True) -> Iterator[None]:
        """Wraps the recording of a pass.

        `executes`: the recording runs the pass for real. `was_warmed_up`: the pass ran before, so the memory it writes
        is known.
        """
        before = PythonState(self.objects)
        self.undo_log.refuse_new_writes = was_warmed_up
        try:
            with self.undo_log.run() if executes else isolated_autocast_cache():
                yield
        finally:
            self.undo_log.refuse_new_writes = False
        for what in before.find_rebound():
            raise StateError(f"the function replaces {what}, which a replay would not do again")

    def restore_gradients(self) -> None:
        for leaf, gradient in self.initial_gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def changed_gradients(self) -> list[Tensor]:
        """Leaves whose gradient the function rebound or wrote."""
        return [
            leaf
            for leaf, gradient in self.initial_gradients
            if leaf.grad is not gradient or (gradient is not None and self.undo_log.wrote(gradient))
        ]

    def refuse_new_gradients(self) -> None:
        """Raise NeedsWarmup unless every gradient that the function wrote existed and was accumulated in place."""
        for leaf, gradient in self.initial_gradients:
            if leaf.grad is not gradient:
                raise NeedsWarmup(f"the first call makes the gradient of a parameter of shape {tuple(leaf.shape)}")

    def refuse_new_optimizer_state(self) -> None:
        """Raise NeedsWarmup if the function stepped an optimizer for the first time."""
        for optimizer, known in self._states:
            if any(set(state) - known.get(parameter, set()) for parameter, state in optimizer.state.items()):
                raise NeedsWarmup(f"the first call makes the state of {type(optimizer).__name__}")

    def create_optimizer_state(self) -> None:
        """Create the state of optimizers that the function steps for the first time, at its initial value.

        An optimizer creates its state in its first step. A graph records a later step, so the state must exist before
        the recording. We create it by a step on zero gradients, which the undo log reverts.
        """
        for optimizer, known in self._states:
            created = [p for p, state in optimizer.state.items() if set(state) - known.get(p, set())]
            if not created:
                continue
            self._drop_new_optimizer_state(optimizer)
            self._step_on_zero_gradients(optimizer, created)
            self.undo_log.adopt_state(tensors_in([optimizer.state[p] for p in created]))

    def _step_on_zero_gradients(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        name = type(optimizer).__name__
        groups = optimizer.param_groups
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        decays = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
        if any(group.get("dampening") for group in groups):
            raise CaptureError(
                f"the first step of {name} with dampening differs from the later ones: run one step first"
            )
        try:
            for group, _ in decays:
                group["weight_decay"] = 0
            for parameter, _ in gradients:
                parameter.grad = None
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            with self.undo_log.run():
                optimizer.step()
        except TypeError as error:  # a step that needs a closure
            raise CaptureError(f"{name} creates state in its first step: run one step before capturing") from error
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _drop_new_optimizer_state(self, only: torch.optim.Optimizer | None = None) -> None:
        for optimizer, known in self._states:
            if only is not None and optimizer is not only:
                continue
            for parameter in list(optimizer.state):
                if parameter not in known:
                    del optimizer.state[parameter]
                else:
                    for key in set(optimizer.state[parameter]) - known[parameter]:
                        del optimizer.state[parameter][key]


@contextmanager
def no_gc() -> Iterator[None]:
    """Disable the garbage collector: a destructor that frees CUDA memory would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
