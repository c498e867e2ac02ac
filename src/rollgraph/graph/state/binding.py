"""Bindings: the memory that a graph reads, and the gradients that it writes.

A graph reads fixed addresses. Before each replay, a binding checks that the program still uses the same memory. It
notices a parameter re-pointed by `.data =` or replaced by `load_state_dict(assign=True)`, a reloaded optimizer state,
and a changed learning rate. `slots.py` finds the slots to check. The second half of the file is about gradients.
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
from rollgraph.graph.state.slots import BoundSlot, HookDict, code_of

# -- memory, and the slots that refer to it --------------------------------------------------------

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

    `trained` are leaves whose gradient autograd does not see, so the binding must notice if they are frozen; `sums` are
    the buffers to which their gradients are added. A module added to one of the `growable` lists, or a hook added to
    one of the `hooks` dicts, would run in the function but not in a replay.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        slots: Sequence[BoundSlot] = (),
        modules: Iterable[torch.nn.Module] = (),
        trained: Iterable[Tensor] = (),
        sums: Iterable[Tensor] = (),
        growable: Iterable[torch.nn.Module] = (),
        hooks: Sequence[HookDict] = (),
    ) -> None:
        self._names = {id(slot.value): slot.name for slot in slots}
        self.tensors = list({id(t): t for t in tensors}.values())
        self._tensors = [*self.tensors, *sums]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # A tensor can become another view of the same address. For trained tensors, autograd notices a changed shape,
        # but not changed strides.
        self._sized = [t for t in self.tensors if not t.requires_grad]
        self._sizes = list(map(Tensor.size, self._sized))
        ambiguous = [t for t in self._tensors if not t.requires_grad or len(set(t.shape)) < t.dim()]
        # Contiguity and shape together fix the strides.
        self._contiguous = [t for t in ambiguous if t.is_contiguous()]
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
        """Prepare the slots for `check`, which runs before each replay: as few and as large comparisons as possible."""
        self._slots = slots
        # Dictionaries of which every entry is bound.
        containers = {id(slot.container): slot.container for slot in slots if not slot.single}
        containers |= {id(container): container for container, _, _ in self._growable}
        # One comparison for all entries: Python treats identical objects as equal without comparing their values.
        self._containers = list(containers.values())
        self._contents = [dict(container) for container in self._containers]
        # Plain values that are the only bound entry of their container.
        plain = [slot for slot in slots if slot.single and not isinstance(slot.value, _OBJECTS)]
        self._owners = [*self._modules, *(slot.container for slot in plain)]
        self._attributes = ["training"] * len(self._modules) + [slot.key for slot in plain]
        self._values = [*self._training, *(slot.value for slot in plain)]
        # Objects to compare by identity, one by one: single entries of a container, and tensors of one element, which
        # could be equal without being the same tensor.
        by_identity = [slot for slot in slots if _needs_identity(slot)]
        self._identity_containers = [slot.container for slot in by_identity]
        self._identity_keys = [slot.key for slot in by_identity]
        self._identity_values = [slot.value for slot in by_identity]
        lists = [slot for slot in slots if isinstance(slot.value, list)]
        self._lists = [slot.value for slot in lists]
        self._entries = [list(slot.value) for slot in lists]
        self._list_names = [slot.name for slot in lists]

    def _remember_hooks(self, hook_dicts: Sequence[HookDict]) -> None:
        self._hooks = hook_dicts
        self._hooks_added = RemovableHandle.next_id  # counts all hooks of the process, so a new hook changes it
        self._known_hooks = {_hook_identity(hook) for _, hook, _ in self._all_hooks()}

    def check(self) -> None:
        """Raise StaleGraph if a replay would read or write other memory than the function would now."""
        if list(map(_data_ptr, self._tensors)) != self._addresses:
            raise StaleGraph(self._describe_moved())
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
            raise StaleGraph(self._describe_requires_grad())
        if self._identity_containers:
            current = map(_get, self._identity_containers, self._identity_keys)
            if not all(map(is_, current, self._identity_values)):
                self._check_slots()
        if self._lists:
            self._check_lists()

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")

    def _describe_moved(self) -> str:
        pairs = zip(self._tensors, self._addresses, strict=True)
        moved = [self._name(t) for t, address in pairs if t.data_ptr() != address]
        return (
            f"{', '.join(moved[:3])} moved to another address since capture (`.data = ...`?): "
            "copy into the existing tensor instead, or capture again"
        )

    def _check_slots(self) -> None:
        for container, key, value, name, _, may_be_deleted in self._slots:
            current = container.get(key)
            if current is value or (may_be_deleted and key not in container):
                continue
            if not isinstance(value, _OBJECTS) and not isinstance(current, _OBJECTS):
                if type(current) is type(value) and current == value:
                    continue
                raise StaleGraph(
                    f"{name} was {value!r} at capture and is {current!r} now; a graph needs it as a tensor to follow "
                    "it",
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
            if _hook_identity(hook) not in self._known_hooks:
                name = getattr(hook, "__qualname__", None) or type(hook).__name__
                raise StaleGraph(
                    f"the {kind} {name} was added to {owner} since capture, and a replay does not run it: capture "
                    "again, or add it to the graphed module itself or to its GraphHooks"
                )

    def _all_hooks(self) -> Iterator[tuple[str, Any, str]]:
        """(kind, function, owner) of every hook that is registered now."""
        for hook_dict in self._hooks:
            for hook in hook_dict.hooks.values():
                yield hook_dict.kind, hook, hook_dict.owner
        for tensor in self._trained:
            for hooks in (_backward_hooks, _accumulate_hooks):
                for hook in (hooks(tensor) or {}).values():
                    yield "tensor hook", hook, self._name(tensor)

    def _describe_requires_grad(self) -> str:
        changed = [t for t in self._frozen if t.requires_grad] + [t for t in self._trained if not t.requires_grad]
        return f"requires_grad of {', '.join(map(self._name, changed[:3]))} changed since capture"


def _hook_identity(hook: Any) -> Any:
    """A key that is the same for every registration of a function: programs remove hooks and add them again."""
    return code_of(hook) or id(hook)


def _needs_identity(slot: BoundSlot) -> bool:
    if not isinstance(slot.value, _OBJECTS):
        return False
    return slot.single or (isinstance(slot.value, Tensor) and slot.value.numel() < 2)


def _differ(now: Any, before: Any) -> bool:
    return now is not before and (isinstance(before, Tensor) or now != before)


# -- gradients -------------------------------------------------------------------------------------
# A recording accumulates into fixed buffers, but a program sets gradients to None, zeroes them or keeps them. Owns the
# steps before and after each replay that reconcile the two. Knows nothing of recordings.


@dataclass
class BoundGradient:
    """The gradient of one leaf.

    The recording accumulates into `buffer`. The buffer may be part of the program's memory (a flat buffer of all
    gradients). If the leaf then has no gradient, a replay borrows that memory and restores it; the leaf gets a new
    gradient, as in eager. If the function drops the existing gradient (`zero_grad(set_to_none=True)` inside it), the
    recording puts its new gradient into the buffer: `result` is that buffer, or None.
    """

    leaf: Tensor
    buffer: Tensor
    owns_buffer: bool  # we allocated the buffer; otherwise it is the program's gradient, which existed at capture
    accumulates: bool = True
    result: Tensor | None = None
    baseline_references: tuple[int, int] = (0, 0)  # to the buffer and to its memory, without those of the program
    saved_program_values: Tensor | None = None  # what the program's buffer held before this replay borrowed it

    def check(self) -> None:
        if not self.accumulates or self.leaf.grad is self.buffer:
            return
        if self.leaf.grad is None:
            if self._is_referenced():
                raise StaleGraph(
                    f"the gradient of shape {tuple(self.leaf.shape)} that the graph accumulates into is still "
                    "referenced after it was set to None: a replay would overwrite it. Keep a clone instead"
                )
            return
        if self.owns_buffer and _only_gradient(self.leaf):
            return  # nothing else refers to that gradient: its value moves into the buffer
        gradient = self.leaf.grad
        if gradient.data_ptr() != self.buffer.data_ptr() or gradient.stride() != self.buffer.stride():
            raise StaleGraph(
                f"the gradient of a parameter of shape {tuple(self.leaf.shape)} is not the tensor that the graph "
                "accumulates into: zero gradients or set them to None, do not assign them"
            )

    def enter(self) -> None:
        """Before a replay: move the gradient of the leaf into the buffer, or zeros if it has none.

        `check` has refused a gradient that lies elsewhere and cannot be moved.
        """
        if not self.accumulates or self.leaf.grad is self.buffer:
            return
        if self.leaf.grad is None:
            # The program may still read the buffer through a flat tensor that contains it: `leave` restores the values.
            if not self.owns_buffer and _is_partial_view(self.buffer):
                self.saved_program_values = self.buffer.clone()
            self.buffer.zero_()
            self.leaf.grad = self.buffer
        elif self.owns_buffer:  # otherwise the leaf's gradient lies in the buffer's memory already
            self.buffer.copy_(self.leaf.grad)
            self.leaf.grad = self.buffer

    def _is_referenced(self) -> bool:
        """Whether the program kept the gradient that `zero_grad(set_to_none=True)` removed from the leaf."""
        return any(map(gt, self._references(), self.baseline_references))

    def record_baseline_references(self) -> None:
        bound = self.leaf.grad is self.buffer
        if bound:
            self.leaf.grad = None
        self.baseline_references = self._references()
        if bound:
            self.leaf.grad = self.buffer

    def _references(self) -> tuple[int, int]:
        """References to the buffer and to its memory. The memory counts only if we own it: a flat buffer has many."""
        to_memory = 0
        if self.owns_buffer:
            to_memory = torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)
        return sys.getrefcount(self.buffer), to_memory

    def leave(self) -> None:
        """After a replay: give the leaf the gradient that it would have in eager."""
        if self.saved_program_values is not None:
            self.leaf.grad = self.buffer.clone()
            self.buffer.copy_(self.saved_program_values)
            self.saved_program_values = None
        if not self.accumulates and self.leaf.grad is not self.result:
            self.leaf.grad = self.result


def _is_partial_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view, or shares its memory with others."""
    return tensor._is_view() or tensor.untyped_storage().nbytes() != tensor.nbytes


def _only_gradient(leaf: Tensor) -> bool:
    """Whether nothing but `leaf.grad` refers to the gradient and its memory."""
    reference = torch.zeros((), requires_grad=True)
    reference.grad = torch.zeros(())
    return all(map(le, _gradient_references(leaf), _gradient_references(reference)))


def _gradient_references(leaf: Tensor) -> tuple[int, int]:
    gradient = leaf.grad
    assert gradient is not None
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)


class BoundGradients:
    """The gradients of all leaves that a captured function writes."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._bound: list[BoundGradient] = []
        for leaf in leaves:
            if leaf.grad is None:
                self._bound.append(BoundGradient(leaf, torch.zeros_like(leaf), owns_buffer=True))
            else:
                self._bound.append(BoundGradient(leaf, leaf.grad, owns_buffer=False))
        self._decoys: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        return [bound.buffer for bound in self._bound]

    @property
    def leaves(self) -> list[Tensor]:
        return [bound.leaf for bound in self._bound]

    def nbytes(self) -> int:
        return sum(bound.buffer.nbytes for bound in self._bound if bound.owns_buffer and bound.accumulates)

    def prepare_recording(self) -> None:
        """After warm-up: set a decoy as the gradient wherever the function drops the existing gradient.

        The new gradient then goes to a buffer that we own. If the recording reads the decoy, it needed the old value.
        """
        for bound in self._bound:
            if bound.leaf.grad is not bound.buffer:
                self._decoys.append(torch.zeros_like(bound.leaf))
                bound.leaf.grad = self._decoys[-1]
                if not bound.owns_buffer:
                    bound.buffer = torch.zeros_like(bound.leaf)
                    bound.owns_buffer = True

    def copy_gradients_out_of_pool(self) -> None:
        """Inside the recording: copy new gradients out of the pool, whose memory other graphs reuse."""
        for bound in self._bound:
            gradient = bound.leaf.grad
            bound.accumulates = gradient is bound.buffer
            bound.result = None if gradient is None else bound.buffer
            if gradient is not None and not bound.accumulates:
                bound.buffer.copy_(gradient)

    def refuse_reads(self, read: Iterable[Tensor]) -> None:
        """After the recording: raise CaptureError if the function read a gradient and then dropped it."""
        addresses = {t.data_ptr() for t in read if t.numel()}
        for decoy in self._decoys:
            if decoy.data_ptr() in addresses:
                raise CaptureError(
                    f"the gradient of a parameter of shape {tuple(decoy.shape)} is read and then replaced: "
                    "change it in place"
                )
        self._decoys.clear()

    def bind(self) -> None:
        """Before a warm-up run: make each buffer the gradient of its leaf, so that the run accumulates."""
        for bound in self._bound:
            bound.leaf.grad = bound.buffer

    def record_baseline_references(self) -> None:
        """After the capture: from now on, additional references to a buffer belong to the program."""
        for bound in self._bound:
            bound.record_baseline_references()

    def check(self) -> None:
        for bound in self._bound:
            bound.check()

    def enter(self) -> None:
        for bound in self._bound:
            bound.enter()

    def leave(self) -> None:
        for bound in self._bound:
            bound.leave()
