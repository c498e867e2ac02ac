"""Live objects: the Python state of the process, and what it looked like before a capture.

A function reaches its model through closures, globals or attributes, and only the garbage collector
knows them all. Owns names, flags, hooks and slots; the undo log owns values in memory.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KINDS = (Tensor, nn.Module, torch.optim.Optimizer)
_IDLE = 200  # collections without a capture after which tracking stops; an import causes dozens
_MANY = 50_000  # objects; with fewer, looking at all of them costs no more than tracking
_CAN_TRACK = sys.version_info < (3, 14)  # later collectors do not tell new objects by generation


class _Marker:
    """A new object that has to show up among the new objects."""


class LiveObjects:
    """The tensors, modules and optimizers of the process, found quickly for captures in quick succession.

    Asking the garbage collector for every object takes a tenth of a second, and happens for the first capture only.
    After that, a new object is in a young generation, or a callback has seen it there before it grew old.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._tracking = False
        self._expected = 0  # the collector's count of collections, if the callback has seen all of them
        self._idle = 0
        # A new one for each search. What hides it, such as gc.freeze(), hides other new objects, too.
        self._marker = _Marker()
        self._saw_marker = False

    def find(self) -> list[Any]:
        """Every tensor, module and optimizer that is alive."""
        self._idle = 0
        if self._is_tracking():
            self._note(_young_objects())
        if not self._is_tracking() or not self._saw_marker:
            self._known.clear()
            self._start_tracking()  # first, so that no object grows old unseen during the search
            objects = gc.get_objects()
            self._note(objects)
            if len(objects) < _MANY or gc.get_freeze_count():  # objects that are unfrozen later would stay unseen
                self._stop_tracking()
        self._renew_marker()
        self._forget_dead()
        return [thing for ref in list(self._known.values()) if (thing := ref()) is not None]

    def _renew_marker(self) -> None:
        self._marker = _Marker()
        self._saw_marker = False

    def _forget_dead(self) -> None:
        dead = [key for key, ref in list(self._known.items()) if ref() is None]
        for key in dead:
            if self._known[key]() is None:  # a collection may have given the key to a new object meanwhile
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
            self._note(_young_objects())
            return
        self._expected += 1
        self._idle += 1
        if self._idle > _IDLE or not self._saw_marker:
            self._stop_tracking()
        self._renew_marker()

    def _note(self, objects: Sequence[Any]) -> None:
        kinds = _subclasses(_KINDS) | {_Marker}
        # By type instead of isinstance: the __class__ of a lazy proxy may run code.
        wanted = map(kinds.__contains__, map(type, objects))
        for thing in compress(objects, wanted):
            if thing is self._marker:
                self._saw_marker = True
            elif type(thing) is not _Marker:
                self._known[id(thing)] = weakref.ref(thing)


def _young_objects() -> list[Any]:
    return gc.get_objects(generation=0) + gc.get_objects(generation=1)


def _collections() -> int:
    """How many collections have promoted objects to an old generation."""
    _, middle, old = gc.get_stats()
    return int(middle["collections"] + old["collections"])


def _subclasses(kinds: Sequence[type]) -> set[type]:
    found: set[type] = set()
    pending = list(kinds)
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.add(kind)
            pending += type.__subclasses__(kind)
    return found


# The only object here that the whole process shares, because there is only one garbage collector to track.
_live_objects = LiveObjects()


class ProgramObjects:
    """Every live trainable leaf, module and optimizer. `roots` are found even if gc.freeze() hides them."""

    def __init__(self, *roots: Any) -> None:
        leaves: dict[int, Tensor] = {}
        modules: dict[int, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        for thing in _live_objects.find():
            kind = type(thing)
            if issubclass(kind, Tensor):
                if _is_leaf(thing) and thing.requires_grad:
                    leaves[id(thing)] = thing
            elif issubclass(kind, torch.optim.Optimizer):
                self.optimizers.append(thing)
            elif isinstance(thing.__dict__.get("_modules"), dict):  # not a ScriptModule
                modules[id(thing)] = thing
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
def noting_calls(called: dict[int, nn.Module]) -> Iterator[None]:
    """Collect the modules that are called inside."""

    def note(module: nn.Module, _: Any) -> None:
        called[id(module)] = module

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


class PythonState:
    """Flags, hooks and slots of modules, leaves and optimizers, to compare with later or to restore."""

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
        self._numbers: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []  # states with Python numbers in them
        for optimizer in objects.optimizers:
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    self._numbers.append((type(optimizer).__name__, state, dict(state)))

    def rebound(self) -> Iterator[str]:
        """What the program has replaced or re-pointed since, which a replay would not do again."""
        for module, slots, saved in self._slots:
            for key, tensor in saved.items():
                if slots.get(key) is not tensor:
                    yield f"{type(module).__name__}.{key} (assign with copy_ instead)"
        for tensor, address, _ in self._memory:
            if tensor.data_ptr() != address:
                yield f"the memory of a tensor of shape {tuple(tensor.shape)} (`.data =`; use copy_ instead)"
        for name, state, saved in self._numbers:
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

    def restore_slots(self) -> None:
        """After a failure: give modules and optimizers back their objects and their memory."""
        for _, slots, saved in self._slots:
            if any(slots.get(key) is not value for key, value in saved.items()) or slots.keys() != saved.keys():
                slots.clear()
                slots.update(saved)
        for tensor, address, original in self._memory:
            if tensor.data_ptr() != address:
                tensor.data = original
        for _, state, saved in self._numbers:
            for key, value in saved.items():
                if isinstance(value, (int, float)):
                    state[key] = value


def _hook_dicts(module: nn.Module) -> Iterator[dict[Any, Any]]:
    return (module.__dict__[name] for name in _HOOKS if name in module.__dict__)
