"""What a graph is bound to: the memory, the slots that name it, and the gradients it writes.

A graph reads addresses. This file knows whether the program still means the same memory by them:
a parameter re-pointed by `.data =`, replaced by `load_state_dict(assign=True)`, an optimizer state
loaded anew or a learning rate changed is found at the next replay. `slots.py` has the places it looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, gt, is_, le
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rollgraph.graph.errors import CaptureError, StaleGraph
from rollgraph.graph.slots import BoundSlot, HookPlace, code_of

_get = dict.get
_requires_grad = attrgetter("requires_grad")
_backward_hooks, _accumulate_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_data_ptr, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_OBJECTS = (Tensor, dict, list, torch.nn.Module)  # compared by identity
_OTHER_VIEW = "a parameter or buffer got another shape or other strides since capture (`.data = ...`?)"


class Binding:
    """Addresses and slots as they were at capture; `check` says what moved.

    Autograd itself leaves out the gradient of a parameter that was frozen since. `trained` are those whose
    gradient it does not see, and `sums` the memory it is added to. `growing` are lists of modules: what is added to
    one would run. `hooks` are the places where a new hook would run in the function, but not in a replay.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        slots: Sequence[BoundSlot] = (),
        modules: Iterable[torch.nn.Module] = (),
        trained: Iterable[Tensor] = (),
        sums: Iterable[Tensor] = (),
        growing: Iterable[torch.nn.Module] = (),
        hooks: Sequence[HookPlace] = (),
    ) -> None:
        self._names = {id(slot.held): slot.name for slot in slots}
        self.tensors = list({id(t): t for t in tensors}.values())
        self._tensors = [*self.tensors, *sums]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Same address, other view: autograd finds another shape of what it trains, but not other strides.
        self._sized = [t for t in self.tensors if not t.requires_grad]
        self._sizes = list(map(Tensor.size, self._sized))
        ambiguous = [t for t in self._tensors if not t.requires_grad or len(set(t.shape)) < t.dim()]
        self._contiguous = [t for t in ambiguous if t.is_contiguous()]  # this and its shape fix the strides
        self._strided = [t for t in ambiguous if not t.is_contiguous()]
        self._strides = list(map(Tensor.stride, self._strided))
        # Captured with gradients off, a graph has none to leave out.
        self._frozen = [t for t in self._sized if t.is_leaf] if torch.is_grad_enabled() else []
        self._trained = list(trained)
        self._modules = [module.__dict__ for module in modules]
        self._training = [attributes["training"] for attributes in self._modules]
        self._growing = [(module._modules, set(module._modules), type(module).__name__) for module in growing]
        self._remember_slots(slots)
        self._remember_hooks(hooks)
        self._more = any((self._sized, self._strided, self._frozen, self._trained, self._apart, self._lists))

    def _remember_slots(self, slots: Sequence[BoundSlot]) -> None:
        self._slots = slots
        containers = {id(slot.container): slot.container for slot in slots if not slot.apart}
        containers |= {id(container): container for container, _, _ in self._growing}
        # One comparison for all of them: the same objects are equal without a look at their values.
        self._containers = list(containers.values())
        self._contents = [dict(container) for container in self._containers]
        objects = [slot for slot in slots if isinstance(slot.held, _OBJECTS)]
        plain = [slot for slot in slots if slot.apart and not isinstance(slot.held, _OBJECTS)]
        self._owners = [*self._modules, *(slot.container for slot in plain)]
        self._attributes = ["training"] * len(self._modules) + [slot.key for slot in plain]
        self._values = [*self._training, *(slot.held for slot in plain)]
        # By identity: numbers in tensors could be equal though the tensors are not the same.
        apart = [slot for slot in objects if slot.apart or (isinstance(slot.held, Tensor) and slot.held.numel() < 2)]
        self._apart = [slot.container for slot in apart]
        self._keys = [slot.key for slot in apart]
        self._held = [slot.held for slot in apart]
        lists = [slot for slot in slots if isinstance(slot.held, list)]
        self._lists = [slot.held for slot in lists]
        self._entries = [list(slot.held) for slot in lists]
        self._list_names = [slot.name for slot in lists]

    def _remember_hooks(self, places: Sequence[HookPlace]) -> None:
        self._hooks = places
        self._hooks_added = RemovableHandle.next_id  # of every hook in the process, by which a new one is noticed
        self._known_hooks = {_identity(hook) for _, hook, _ in self._all_hooks()}

    def check(self) -> None:
        """Raise StaleGraph if a replay would read or write something else than the program means."""
        if list(map(_data_ptr, self._tensors)) != self._addresses:
            raise StaleGraph(self._moved())
        if not all(map(_is_contiguous, self._contiguous)):
            raise StaleGraph(_OTHER_VIEW)
        try:
            if self._containers != self._contents:
                self._check_slots()
        except (RuntimeError, ValueError):  # two tensors that are not the same were compared
            self._check_slots()
        if list(map(_get, self._owners, self._attributes)) != self._values:
            self._check_attributes()
        if RemovableHandle.next_id != self._hooks_added:
            self._check_hooks()
            self._hooks_added = RemovableHandle.next_id
        if self._more:
            self._check_more()

    def _check_attributes(self) -> None:
        if [attributes["training"] for attributes in self._modules] != self._training:
            raise StaleGraph("a sub-module was switched between train() and eval() since capture")
        self._check_slots()

    def _check_more(self) -> None:
        """What most graphs have nothing of."""
        if (
            list(map(Tensor.size, self._sized)) != self._sizes
            or list(map(Tensor.stride, self._strided)) != self._strides
        ):
            raise StaleGraph(_OTHER_VIEW)
        if any(map(_requires_grad, self._frozen)) or not all(map(_requires_grad, self._trained)):
            raise StaleGraph(self._requires_grad())
        if self._apart and not all(map(is_, map(_get, self._apart, self._keys), self._held)):
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
        for container, key, held, name, _, may_go in self._slots:
            found = container.get(key)
            if found is held or (may_go and key not in container):
                continue
            if not isinstance(held, _OBJECTS) and not isinstance(found, _OBJECTS):
                if type(found) is type(held) and found == held:
                    continue
                raise StaleGraph(
                    f"{name} was {held!r} at capture and is {found!r} now; a graph needs it as a tensor to follow it",
                    frozen_value=True,
                )
            remedy = "capture again" if isinstance(held, torch.nn.Module) else "copy into it instead"
            raise StaleGraph(f"{name} was replaced by another object since capture (load_state_dict?): {remedy}")
        for container, keys, name in self._growing:
            added = [f"{key} ({type(container[key]).__name__})" for key in container if key not in keys]
            if added:
                raise StaleGraph(
                    f"{', '.join(added[:3])} was added to a {name} since capture: a replay runs the modules that were "
                    "there. Capture again"
                )

    def _check_lists(self) -> None:
        try:
            if self._lists == self._entries:
                return
        except (RuntimeError, ValueError):  # two tensors that are not the same were compared
            pass
        for held, entries, name in zip(self._lists, self._entries, self._list_names, strict=True):
            if len(held) != len(entries) or any(map(_differ, held, entries)):
                raise StaleGraph(
                    f"{name} has other entries than at capture ({len(entries)} then, {len(held)} now): capture again"
                )

    def _check_hooks(self) -> None:
        for kind, hook, owner in self._all_hooks():
            if _identity(hook) not in self._known_hooks:
                name = getattr(hook, "__qualname__", None) or type(hook).__name__
                raise StaleGraph(
                    f"the {kind} {name} was added to {owner} since capture, and a replay does not run it: capture "
                    "again, or add it to the module that is graphed or to its GraphHooks"
                )

    def _all_hooks(self) -> Iterator[tuple[str, Any, str]]:
        """(kind, function, owner) of the hooks there are now."""
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
    """The same for each registration of one function, as hooks are taken off and put on again."""
    return code_of(hook) or id(hook)


def _differ(now: Any, then: Any) -> bool:
    return now is not then and (isinstance(then, Tensor) or now != then)


@dataclass
class BoundGradient:
    """The gradient of one leaf that a captured function writes.

    `buffer` is what the recording accumulates into. If it lies in memory of the program's (a flat buffer of all
    gradients) and the leaf has no gradient, it is only borrowed: the leaf gets a new one, as in eager. If the function
    drops the gradient it finds (`zero_grad(set_to_none=True)` inside it), the recording leaves its own in the buffer:
    `result`, or None.
    """

    leaf: Tensor
    buffer: Tensor
    owned: bool
    accumulates: bool = True
    result: Tensor | None = None
    holders: tuple[int, int] = (0, 0)
    borrowed: Tensor | None = None  # the value of somebody's memory, while a replay uses it

    def check(self) -> None:
        if not self.accumulates or self.leaf.grad is self.buffer:
            return
        if self.leaf.grad is None:
            if self.others_hold_it():
                raise StaleGraph(
                    f"a gradient of shape {tuple(self.leaf.shape)} that the graph accumulates into is still held after "
                    "it was set to None: a replay would overwrite it. Keep a clone instead"
                )
            return
        if self.owned and _only_gradient(self.leaf):
            return  # nobody else sees that tensor: its value moves into the buffer
        found = self.leaf.grad
        if found.data_ptr() != self.buffer.data_ptr() or found.stride() != self.buffer.stride():
            raise StaleGraph(
                f"the gradient of a parameter of shape {tuple(self.leaf.shape)} is another tensor than the one the "
                "graph accumulates into: zero gradients or set them to None, do not assign them"
            )

    def enter(self) -> None:
        if not self.accumulates or self.leaf.grad is self.buffer:
            return
        if self.leaf.grad is None:
            if not self.owned and _is_part(self.buffer):
                self.borrowed = self.buffer.clone()
            self.buffer.zero_()
            self.leaf.grad = self.buffer
        elif self.owned:
            self.buffer.copy_(self.leaf.grad)
            self.leaf.grad = self.buffer

    def others_hold_it(self) -> bool:
        """Somebody kept the gradient that `zero_grad(set_to_none=True)` took from the leaf."""
        return any(map(gt, self._holders(), self.holders))

    def count_holders(self) -> None:
        bound = self.leaf.grad is self.buffer
        if bound:
            self.leaf.grad = None
        self.holders = self._holders()
        if bound:
            self.leaf.grad = self.buffer

    def _holders(self) -> tuple[int, int]:
        """References to the tensor and to its memory (not if that is somebody's flat buffer, with many users)."""
        storage = torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata) if self.owned else 0
        return sys.getrefcount(self.buffer), storage

    def leave(self) -> None:
        if self.borrowed is not None:
            self.leaf.grad = self.buffer.clone()
            self.buffer.copy_(self.borrowed)
            self.borrowed = None
        if not self.accumulates and self.leaf.grad is not self.result:
            self.leaf.grad = self.result


def _is_part(tensor: Tensor) -> bool:
    """It is a view of another tensor, or one of several in its memory."""
    return tensor._is_view() or tensor.untyped_storage().nbytes() != tensor.nbytes


def _only_gradient(leaf: Tensor) -> bool:
    """Nothing but `leaf.grad` holds that tensor and its memory."""
    alone = torch.zeros((), requires_grad=True)
    alone.grad = torch.zeros(())
    return all(map(le, _references(leaf), _references(alone)))


def _references(leaf: Tensor) -> tuple[int, int]:
    gradient = leaf.grad
    assert gradient is not None
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)


class BoundGradients:
    """The gradients a captured function writes, made equal to eager's at each replay."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._bound = [
            BoundGradient(leaf, torch.zeros_like(leaf), owned=True)
            if leaf.grad is None
            else BoundGradient(leaf, leaf.grad, owned=False)
            for leaf in leaves
        ]
        self._decoys: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        return [bound.buffer for bound in self._bound]

    @property
    def leaves(self) -> list[Tensor]:
        return [bound.leaf for bound in self._bound]

    def nbytes(self) -> int:
        return sum(bound.buffer.nbytes for bound in self._bound if bound.owned and bound.accumulates)

    def prepare_recording(self) -> None:
        """After warm-up: where the function drops the gradient it finds, give it a decoy to drop.

        Its own gradient then goes to a buffer of ours. A decoy that is read shows that it needed the old one.
        """
        for bound in self._bound:
            if bound.leaf.grad is not bound.buffer:
                self._decoys.append(torch.zeros_like(bound.leaf))
                bound.leaf.grad = self._decoys[-1]
                if not bound.owned:
                    bound.buffer, bound.owned = torch.zeros_like(bound.leaf), True

    def keep_results(self) -> None:
        """Inside the recording: out of the pool's memory, which other graphs reuse."""
        for bound in self._bound:
            found = bound.leaf.grad
            bound.accumulates = found is bound.buffer
            bound.result = None if found is None else bound.buffer
            if found is not None and not bound.accumulates:
                bound.buffer.copy_(found)

    def observe(self, read: Iterable[Tensor]) -> None:
        """After recording: a gradient that is read and then dropped cannot be followed."""
        touched = {t.data_ptr() for t in read if t.numel()}
        for decoy in self._decoys:
            if decoy.data_ptr() in touched:
                raise CaptureError(
                    f"the gradient of a parameter of shape {tuple(decoy.shape)} is read and then replaced: "
                    "change it in place"
                )
        self._decoys.clear()

    def bind(self) -> None:
        """Before a warm-up run: every leaf has the buffer as its gradient, so that the run accumulates."""
        for bound in self._bound:
            bound.leaf.grad = bound.buffer

    def settle(self) -> None:
        """After the capture: from now on, a new holder of a buffer is the user."""
        for bound in self._bound:
            bound.count_holders()

    def check(self) -> None:
        for bound in self._bound:
            bound.check()

    def enter(self) -> None:
        for bound in self._bound:
            bound.enter()

    def leave(self) -> None:
        for bound in self._bound:
            bound.leave()
