"""What a graph is bound to: the memory, the slots that name it, and the gradients it writes.

A graph reads addresses. This file knows whether the program still means the same memory by them:
a parameter re-pointed by `.data =`, replaced by `load_state_dict(assign=True)`, an optimizer state
loaded anew or a learning rate changed is found at the next replay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, gt, itemgetter, le
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph.census import Census
from rollgraph.graph.errors import CaptureError, StaleGraph
from rollgraph.graph.journal import Journal

_training = itemgetter("training")
_requires_grad = attrgetter("requires_grad")
_data_ptr, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_OTHER_VIEW = "a parameter or buffer got another shape or other strides since capture (`.data = ...`?)"

Slot = tuple[dict[Any, Any], Any, Any, str]  # container, key, what it held at capture, name


class Binding:
    """Addresses and slots as they were at capture; `check` says what moved.

    Autograd itself leaves out the gradient of a parameter that was frozen since. `trained` are those whose
    gradient it does not see.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        slots: Sequence[Slot] = (),
        modules: Iterable[torch.nn.Module] = (),
        trained: Iterable[Tensor] = (),
    ) -> None:
        self._names = {id(thing): name for _, _, thing, name in slots}
        self.tensors = self._tensors = list({id(t): t for t in tensors}.values())
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Same address, other view: autograd finds another shape of what it trains, but not other strides.
        self._sized = [t for t in self._tensors if not t.requires_grad]
        self._sizes = list(map(Tensor.size, self._sized))
        ambiguous = [t for t in self._tensors if not t.requires_grad or len(set(t.shape)) < t.dim()]
        self._contiguous = [t for t in ambiguous if t.is_contiguous()]  # this and its shape fix the strides
        self._strided = [t for t in ambiguous if not t.is_contiguous()]
        self._strides = list(map(Tensor.stride, self._strided))
        # Captured with gradients off, a graph has none to leave out.
        self._frozen = [t for t in self._sized if t.is_leaf] if torch.is_grad_enabled() else []
        self._trained = list(trained)
        self._slots = slots
        containers = {id(container): container for container, _, _, _ in slots}
        self._containers = list(containers.values())
        self._contents = [dict(container) for container in self._containers]
        # One comparison for all of them: the same objects are equal without a look at their values. Numbers in
        # tensors could be equal though the tensors are not the same.
        self._numbers = [(c, k, t) for c, k, t, _ in slots if isinstance(t, Tensor) and t.numel() < 2]
        self._modules = [module.__dict__ for module in modules]
        self._training = list(map(_training, self._modules))
        self._lists = [held for _, _, held, _ in slots if isinstance(held, list)]
        self._lengths = list(map(len, self._lists))
        self._more = any((self._sized, self._strided, self._numbers, self._frozen, self._trained, self._lists))

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
        if list(map(_training, self._modules)) != self._training:
            raise StaleGraph("a sub-module was switched between train() and eval() since capture")
        if self._more:
            self._check_more()

    def _check_more(self) -> None:
        """What most graphs have nothing of."""
        if (
            list(map(Tensor.size, self._sized)) != self._sizes
            or list(map(Tensor.stride, self._strided)) != self._strides
        ):
            raise StaleGraph(_OTHER_VIEW)
        if any(container.get(key) is not tensor for container, key, tensor in self._numbers):
            self._check_slots()
        if any(map(_requires_grad, self._frozen)) or not all(map(_requires_grad, self._trained)):
            raise StaleGraph(self._requires_grad())
        if list(map(len, self._lists)) != self._lengths:
            raise StaleGraph("a parameter group was added to an optimizer since capture")

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
        for container, key, held, name in self._slots:
            found = container.get(key)
            if found is held:
                continue
            if not isinstance(held, (Tensor, dict, list, torch.nn.Module, type(None))):
                if type(found) is type(held) and found == held:
                    continue
                raise StaleGraph(
                    f"{name} was {held!r} at capture and is {found!r} now; a graph needs it as a tensor to follow it"
                )
            raise StaleGraph(
                f"{name} was replaced by another object since capture (load_state_dict?): copy into it instead"
            )

    def _requires_grad(self) -> str:
        changed = [t for t in self._frozen if t.requires_grad] + [t for t in self._trained if not t.requires_grad]
        return f"requires_grad of {', '.join(map(self._name, changed[:3]))} changed since capture"


def module_slots(modules: Iterable[torch.nn.Module]) -> list[Slot]:
    """Where the modules keep their parameters, buffers and children, empty places included."""
    return [
        (container, key, held, f"{type(module).__name__}.{key}")
        for module in modules
        for container in (module._parameters, module._buffers, module._modules)
        for key, held in container.items()
    ]


def holders_of(tensors: Iterable[Tensor], modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that keep one of the tensors."""
    ids = set(map(id, tensors))
    return [m for m in modules if any(id(t) in ids for d in (m._parameters, m._buffers) for t in d.values())]


def optimizer_slots(census: Census, journal: Journal) -> list[Slot]:
    """State and hyper-parameters of the optimizers that stepped while the journal watched."""
    slots: list[Slot] = []
    for optimizer in census.optimizers:
        stepped = [p for p in optimizer.state if any(map(journal.wrote, _tensors(optimizer.state[p])))]
        updated = [p for group in optimizer.param_groups for p in group["params"] if journal.wrote(p)]
        if not stepped and not updated:
            continue
        name = type(optimizer).__name__
        if stepped:
            slots.append((optimizer.__dict__, "state", optimizer.state, f"the state of {name}"))
        for parameter in stepped:
            state = optimizer.state[parameter]
            slots.append((optimizer.state, parameter, state, f"the state of {name}"))
            slots += [(state, key, value, f"{name} state {key!r}") for key, value in state.items()]
        slots.append((optimizer.__dict__, "param_groups", optimizer.param_groups, f"{name}.param_groups"))
        for index, group in enumerate(optimizer.param_groups):
            slots += [(group, key, value, f"{name}.param_groups[{index}][{key!r}]") for key, value in group.items()]
    return slots


def _tensors(state: dict[Any, Any]) -> Iterable[Tensor]:
    return (value for value in state.values() if isinstance(value, Tensor))


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
