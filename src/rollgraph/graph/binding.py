"""What a graph is bound to: the memory it reads, and the places where the program refers to that memory.

A graph reads addresses. A binding finds out, before each replay, whether the program still means the same
memory: a parameter re-pointed by `.data =` or replaced by `load_state_dict(assign=True)`, a reloaded
optimizer state, a changed learning rate. `slots.py` finds the places, `bound_gradients.py` follows gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rollgraph.graph.errors import StaleGraph
from rollgraph.graph.slots import BoundSlot, HookPlace, code_of

_get = dict.get
_requires_grad = attrgetter("requires_grad")
_backward_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
_data_ptr = Tensor.data_ptr
_is_contiguous = Tensor.is_contiguous
_OBJECTS = (Tensor, dict, list, torch.nn.Module)  # compared by identity
_OTHER_VIEW = "the shape or the strides of a parameter or buffer changed since capture (`.data = ...`?)"


class Binding:
    """Addresses and slots as they were at capture; `check` raises if one of them changed.

    `trained` are leaves whose gradient autograd does not see, so that a binding has to notice when they are frozen;
    `sums` are the buffers that their gradients are added to. `growable` are lists of modules: a module added to one
    would run in the function. `hooks` are the places where a new hook would run in the function, but not in a replay.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        slots: Sequence[BoundSlot] = (),
        modules: Iterable[torch.nn.Module] = (),
        trained: Iterable[Tensor] = (),
        sums: Iterable[Tensor] = (),
        growable: Iterable[torch.nn.Module] = (),
        hooks: Sequence[HookPlace] = (),
    ) -> None:
        self._names = {id(slot.value): slot.name for slot in slots}
        self.tensors = list({id(t): t for t in tensors}.values())
        self._tensors = [*self.tensors, *sums]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # A tensor can become another view of the same address. For what it trains, autograd notices another shape,
        # but not other strides.
        self._sized = [t for t in self.tensors if not t.requires_grad]
        self._sizes = list(map(Tensor.size, self._sized))
        ambiguous = [t for t in self._tensors if not t.requires_grad or len(set(t.shape)) < t.dim()]
        self._contiguous = [
            t for t in ambiguous if t.is_contiguous()
        ]  # together with the shape, that fixes the strides
        self._strided = [t for t in ambiguous if not t.is_contiguous()]
        self._strides = list(map(Tensor.stride, self._strided))
        self._frozen: list[Tensor] = []  # must not require grad later: their gradient was not recorded
        if torch.is_grad_enabled():
            self._frozen = [t for t in self._sized if t.is_leaf]
        self._trained = list(trained)
        self._modules = [module.__dict__ for module in modules]
        self._training = [attributes["training"] for attributes in self._modules]
        self._growable = [(module._modules, set(module._modules), type(module).__name__) for module in growable]
        self._remember_slots(slots)
        self._remember_hooks(hooks)
        self._has_rare_checks = any(
            (self._sized, self._strided, self._frozen, self._trained, self._identity_containers, self._lists)
        )

    def _remember_slots(self, slots: Sequence[BoundSlot]) -> None:
        self._slots = slots
        containers = {id(slot.container): slot.container for slot in slots if not slot.single}
        containers |= {id(container): container for container, _, _ in self._growable}
        # All of them take one comparison: Python finds identical objects equal without looking at their values.
        self._containers = list(containers.values())
        self._contents = [dict(container) for container in self._containers]
        # Plain values that are the only bound entry of their container.
        plain = [slot for slot in slots if slot.single and not isinstance(slot.value, _OBJECTS)]
        self._owners = [*self._modules, *(slot.container for slot in plain)]
        self._attributes = ["training"] * len(self._modules) + [slot.key for slot in plain]
        self._values = [*self._training, *(slot.value for slot in plain)]
        # Objects that have to be compared by identity, one by one: such entries of a container, and tensors of one
        # element, which could be equal without being the same tensor.
        by_identity = [slot for slot in slots if _needs_identity(slot)]
        self._identity_containers = [slot.container for slot in by_identity]
        self._identity_keys = [slot.key for slot in by_identity]
        self._identity_values = [slot.value for slot in by_identity]
        lists = [slot for slot in slots if isinstance(slot.value, list)]
        self._lists = [slot.value for slot in lists]
        self._entries = [list(slot.value) for slot in lists]
        self._list_names = [slot.name for slot in lists]

    def _remember_hooks(self, places: Sequence[HookPlace]) -> None:
        self._hooks = places
        self._hooks_added = RemovableHandle.next_id  # counts every hook of the process, so that a new one is noticed
        self._known_hooks = {_identity(hook) for _, hook, _ in self._all_hooks()}

    def check(self) -> None:
        """Raise StaleGraph if a replay would read or write other memory than the program now would."""
        if list(map(_data_ptr, self._tensors)) != self._addresses:
            raise StaleGraph(self._moved())
        if not all(map(_is_contiguous, self._contiguous)):
            raise StaleGraph(_OTHER_VIEW)
        try:
            if self._containers != self._contents:
                self._check_slots()
        except (RuntimeError, ValueError):  # two different tensors were compared by value
            self._check_slots()
        if list(map(_get, self._owners, self._attributes)) != self._values:
            self._check_attributes()
        if RemovableHandle.next_id != self._hooks_added:
            self._check_hooks()
            self._hooks_added = RemovableHandle.next_id
        if self._has_rare_checks:
            self._check_rare()

    def _check_attributes(self) -> None:
        if [attributes["training"] for attributes in self._modules] != self._training:
            raise StaleGraph("a sub-module was switched between train() and eval() since capture")
        self._check_slots()

    def _check_rare(self) -> None:
        """The checks that most graphs do not need."""
        if (
            list(map(Tensor.size, self._sized)) != self._sizes
            or list(map(Tensor.stride, self._strided)) != self._strides
        ):
            raise StaleGraph(_OTHER_VIEW)
        if any(map(_requires_grad, self._frozen)) or not all(map(_requires_grad, self._trained)):
            raise StaleGraph(self._requires_grad())
        if self._identity_containers:
            found = map(_get, self._identity_containers, self._identity_keys)
            if not all(map(is_, found, self._identity_values)):
                self._check_slots()
        if self._lists:
            self._check_lists()

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")

    def _moved(self) -> str:
        pairs = zip(self._tensors, self._addresses, strict=True)
        moved = [self._name(t) for t, address in pairs if t.data_ptr() != address]
        return (
            f"{', '.join(moved[:3])} moved to another address since capture (`.data = ...`?): "
            "copy into the existing tensor instead, or capture again"
        )

    def _check_slots(self) -> None:
        for container, key, value, name, _, may_vanish in self._slots:
            found = container.get(key)
            if found is value or (may_vanish and key not in container):
                continue
            if not isinstance(value, _OBJECTS) and not isinstance(found, _OBJECTS):
                if type(found) is type(value) and found == value:
                    continue
                raise StaleGraph(
                    f"{name} was {value!r} at capture and is {found!r} now; a graph needs it as a tensor to follow it",
                    frozen_value=True,
                )
            remedy = "capture again" if isinstance(value, torch.nn.Module) else "copy into it instead"
            raise StaleGraph(f"{name} was replaced by another object since capture (load_state_dict?): {remedy}")
        for container, keys, name in self._growable:
            added = [f"{key} ({type(container[key]).__name__})" for key in container if key not in keys]
            if added:
                raise StaleGraph(
                    f"{', '.join(added[:3])} was added to a {name} since capture, and a replay does not run it: "
                    "capture again"
                )

    def _check_lists(self) -> None:
        try:
            if self._lists == self._entries:
                return
        except (RuntimeError, ValueError):  # two different tensors were compared by value
            pass
        for now, before, name in zip(self._lists, self._entries, self._list_names, strict=True):
            if len(now) != len(before) or any(map(_differ, now, before)):
                raise StaleGraph(
                    f"the entries of {name} changed since capture ({len(before)} then, {len(now)} now): capture again"
                )

    def _check_hooks(self) -> None:
        for kind, hook, owner in self._all_hooks():
            if _identity(hook) not in self._known_hooks:
                name = getattr(hook, "__qualname__", None) or type(hook).__name__
                raise StaleGraph(
                    f"the {kind} {name} was added to {owner} since capture, and a replay does not run it: capture "
                    "again, or add it to the graphed module itself or to its GraphHooks"
                )

    def _all_hooks(self) -> Iterator[tuple[str, Any, str]]:
        """(kind, function, owner) of every hook that is registered now."""
        for place in self._hooks:
            for hook in place.hooks.values():
                yield place.kind, hook, place.owner
        for tensor in self._trained:
            for hooks in (_backward_hooks, _accumulate_hooks):
                for hook in (hooks(tensor) or {}).values():
                    yield "tensor hook", hook, self._name(tensor)

    def _requires_grad(self) -> str:
        changed = [t for t in self._frozen if t.requires_grad] + [t for t in self._trained if not t.requires_grad]
        return f"requires_grad of {', '.join(map(self._name, changed[:3]))} changed since capture"


def _identity(hook: Any) -> Any:
    """A key that is the same for every registration of a function: programs remove hooks and add them again."""
    return code_of(hook) or id(hook)


def _needs_identity(slot: BoundSlot) -> bool:
    if not isinstance(slot.value, _OBJECTS):
        return False
    return slot.single or (isinstance(slot.value, Tensor) and slot.value.numel() < 2)


def _differ(now: Any, before: Any) -> bool:
    return now is not before and (isinstance(before, Tensor) or now != before)
