"""The objects: what Python state is alive in the process, and what it looked like before a capture.

A function reaches its model through closures, globals or attributes; the garbage collector is the
one place that knows them all. Values in memory are the undo log's; names, flags and slots are here.
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
_IDLE = 200  # collections without a capture, after which live objects are followed no longer; an import has dozens
_MANY = 50_000  # objects: with fewer, to look at all of them is as cheap
_FOLLOWS = sys.version_info < (3, 14)  # later collectors have no generations to tell new objects by


class _Witness:
    """An object to look for."""


class LiveObjects:
    """The tensors, modules and optimizers of the process, for captures that come in bursts.

    Asking the garbage collector for every object takes a tenth of a second. That is done for the first capture.
    After it, a new object is in a young generation, or this callback saw it there before it grew old.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._following = False
        self._expected = 0  # what the collector counts, if this callback has seen every collection
        self._idle = 0
        self._witness = (
            _Witness()
        )  # made with each look: whatever hides it, as gc.freeze() does, hides other new objects
        self._saw_witness = False

    def find(self) -> list[Any]:
        self._idle = 0
        if self._is_following():
            self._note(_young_objects())
        if not self._is_following() or not self._saw_witness:
            self._known.clear()
            self._follow()  # first, so that nothing grows old unseen during the walk
            objects = gc.get_objects()
            self._note(objects)
            if len(objects) < _MANY or gc.get_freeze_count():  # what is thawed later would come in unseen
                self._leave()
        self._witness, self._saw_witness = _Witness(), False
        self._forget_dead()
        return [thing for ref in list(self._known.values()) if (thing := ref()) is not None]

    def _forget_dead(self) -> None:
        dead = [key for key, ref in list(self._known.items()) if ref() is None]
        for key in dead:
            if self._known[key]() is None:  # a collection in between may have given the key to a new object
                del self._known[key]

    def _is_following(self) -> bool:
        return self._following and self._on_collection in gc.callbacks and _collections() == self._expected

    def _follow(self) -> None:
        if self._on_collection not in gc.callbacks and _FOLLOWS:
            gc.callbacks.append(self._on_collection)
        self._following = _FOLLOWS
        self._expected = _collections()

    def _leave(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self._following = False

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 0:
            return
        if phase == "start":
            self._note(_young_objects())
            return
        self._expected += 1
        self._idle += 1
        if self._idle > _IDLE or not self._saw_witness:
            self._leave()
        self._witness, self._saw_witness = _Witness(), False

    def _note(self, objects: Sequence[Any]) -> None:
        kinds = _subclasses(_KINDS) | {_Witness}
        # By type, never isinstance: a lazy proxy's __class__ may run code.
        wanted = map(kinds.__contains__, map(type, objects))
        for thing in compress(objects, wanted):
            if thing is self._witness:
                self._saw_witness = True
            elif type(thing) is not _Witness:
                self._known[id(thing)] = weakref.ref(thing)


def _young_objects() -> list[Any]:
    return gc.get_objects(generation=0) + gc.get_objects(generation=1)


def _collections() -> int:
    """Those after which objects have grown old."""
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


# The one thing here that all of a process shares, because the collector that it follows is one as well.
_live_objects = LiveObjects()


class ProgramObjects:
    """Every trainable leaf, module and optimizer alive. `roots` are found even if gc.freeze() hides them."""

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
    except RuntimeError:  # a view that autograd has given up on is nobody's parameter
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
    """Flags, hooks and slots of the modules and leaves of a objects, and how to put them back."""

    def __init__(self, objects: ProgramObjects) -> None:
        self._training = [(module, module.training) for module in objects.modules]
        self._hooks = [(d, dict(d)) for m in objects.modules for d in _hook_dicts(m)]
        self._tensor_hooks = [(t, dict(t._backward_hooks or {})) for t in objects.leaves]
        self._slots: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
            (m, d, dict(d)) for m in objects.modules for d in (m._parameters, m._buffers)
        ]
        tensors = {id(t): t for _, _, saved in self._slots for t in saved.values() if t is not None}
        self._memory = [(t, t.data_ptr(), t.detach()) for t in tensors.values() if t.layout is torch.strided]
        self._requires_grad = [(t, t.requires_grad) for t in (*objects.leaves, *tensors.values()) if _is_leaf(t)]
        self._numbers = [
            (type(optimizer).__name__, state, dict(state))
            for optimizer in objects.optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict)
        ]

    def rebound(self) -> Iterator[str]:
        """What the program gave another object or other memory since, which a replay would not do again."""
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
        """After a failure: the objects and the memory that modules and optimizers had."""
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
