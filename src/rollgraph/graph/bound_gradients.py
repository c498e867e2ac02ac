"""The gradients that a captured function writes, made equal to eager's at each replay.

A recording accumulates into fixed buffers; a program sets gradients to None, zeroes them or keeps them.
Owns how the two meet before and after each replay. Knows nothing of recordings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import gt, le

import torch
from torch import Tensor

from rollgraph.graph.errors import CaptureError, StaleGraph


@dataclass
class BoundGradient:
    """The gradient of one leaf.

    The recording accumulates into `buffer`. If the buffer is a part of the program's memory (a flat buffer of all
    gradients) and the leaf has no gradient, a replay uses that memory only for its own duration: the leaf gets a new
    gradient, as in eager. If the function drops the gradient it finds (`zero_grad(set_to_none=True)` inside it), the
    recording leaves its own gradient in the buffer: `result` is that buffer, or None.
    """

    leaf: Tensor
    buffer: Tensor
    owned: bool  # the buffer is ours, not a gradient that existed at capture
    accumulates: bool = True
    result: Tensor | None = None
    own_references: tuple[int, int] = (0, 0)  # to the buffer and to its memory, without any of the program's
    overwritten: Tensor | None = None  # the value of the program's memory, while a replay uses that memory

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
        if self.owned and _only_gradient(self.leaf):
            return  # nothing else refers to that tensor: its value moves into the buffer
        found = self.leaf.grad
        if found.data_ptr() != self.buffer.data_ptr() or found.stride() != self.buffer.stride():
            raise StaleGraph(
                f"the gradient of a parameter of shape {tuple(self.leaf.shape)} is not the tensor that the graph "
                "accumulates into: zero gradients or set them to None, do not assign them"
            )

    def enter(self) -> None:
        """Before a replay: make the buffer the gradient of the leaf."""
        if not self.accumulates or self.leaf.grad is self.buffer:
            return
        if self.leaf.grad is None:
            if not self.owned and _is_part(self.buffer):
                self.overwritten = self.buffer.clone()
            self.buffer.zero_()
            self.leaf.grad = self.buffer
        elif self.owned:
            self.buffer.copy_(self.leaf.grad)
            self.leaf.grad = self.buffer

    def _is_referenced(self) -> bool:
        """Whether the program kept the gradient that `zero_grad(set_to_none=True)` took from the leaf."""
        return any(map(gt, self._references(), self.own_references))

    def count_own_references(self) -> None:
        bound = self.leaf.grad is self.buffer
        if bound:
            self.leaf.grad = None
        self.own_references = self._references()
        if bound:
            self.leaf.grad = self.buffer

    def _references(self) -> tuple[int, int]:
        """References to the buffer and to its memory. The memory counts only if it is ours: a flat buffer has many."""
        to_memory = 0
        if self.owned:
            to_memory = torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)
        return sys.getrefcount(self.buffer), to_memory

    def leave(self) -> None:
        """After a replay: give the leaf the gradient that eager would."""
        if self.overwritten is not None:
            self.leaf.grad = self.buffer.clone()
            self.buffer.copy_(self.overwritten)
            self.overwritten = None
        if not self.accumulates and self.leaf.grad is not self.result:
            self.leaf.grad = self.result


def _is_part(tensor: Tensor) -> bool:
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
                self._bound.append(BoundGradient(leaf, torch.zeros_like(leaf), owned=True))
            else:
                self._bound.append(BoundGradient(leaf, leaf.grad, owned=False))
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
        """After warm-up: give the function a decoy wherever it drops the gradient that it finds.

        The gradient it makes then goes to a buffer of ours. A decoy that is read shows that it needed the old value.
        """
        for bound in self._bound:
            if bound.leaf.grad is not bound.buffer:
                self._decoys.append(torch.zeros_like(bound.leaf))
                bound.leaf.grad = self._decoys[-1]
                if not bound.owned:
                    bound.buffer = torch.zeros_like(bound.leaf)
                    bound.owned = True

    def keep_results(self) -> None:
        """Inside the recording: copy the gradients out of the pool's memory, which other graphs reuse."""
        for bound in self._bound:
            found = bound.leaf.grad
            bound.accumulates = found is bound.buffer
            bound.result = None if found is None else bound.buffer
            if found is not None and not bound.accumulates:
                bound.buffer.copy_(found)

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

    def count_own_references(self) -> None:
        """After the capture: any further reference to a buffer is the program's."""
        for bound in self._bound:
            bound.count_own_references()

    def check(self) -> None:
        for bound in self._bound:
            bound.check()

    def enter(self) -> None:
        for bound in self._bound:
            bound.enter()

    def leave(self) -> None:
        for bound in self._bound:
            bound.leave()
