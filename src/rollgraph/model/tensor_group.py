"""The ranks that divide each layer among themselves, as the model sees them.

Owns the two places where their results meet, and what autograd makes of them: a sum of what each rank has computed, and
the entry of what all ranks have into layers that are divided. Sums are taken in the order of ranks, in fp32 or more,
and rounded once. So all ranks have the same bits, whatever the number of rows, and generation agrees with training.

A large sum of more than two ranks is taken in parts: each rank adds up one of them, and gathers the others. That moves
as little as a sum by the library would, and gives the bits that a rank would get by itself from the tensors of all.

An exchange is one operation of PyTorch: a tape records it, and a CUDA graph captures what it launches. Knows no process
groups: whoever makes a group gives it functions that exchange tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from rollgraph.model.operators import operator

Gather = Callable[[Tensor], Tensor]  # from a contiguous tensor to those of all ranks, [ranks, ...]
Spread = Callable[[Tensor], Tensor]  # from a row for each rank to those that all ranks have for this one, [ranks, ...]
LARGE_SUM = 1 << 20  # bytes from which on two exchanges of parts take less time than one of everything


class TensorGroup:
    """One rank among the `size` ranks that divide each layer. All of them call the same methods in the same order."""

    def __init__(self, rank: int, size: int, gather: Gather, spread: Spread) -> None:
        if size < 2 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: a group has two ranks or more")
        self.rank = rank
        self.size = size
        self.exchanges = {"gather": gather, "spread": spread}
        self._number = next(_numbers)
        _groups[self._number] = self

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # a copy of a model is divided among the same ranks

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks. Its gradient is the same on all of them, and that of each part."""
        if not (torch.is_grad_enabled() and partial.requires_grad):
            return self.total(partial)
        summed: Tensor = _Sum.apply(partial, self)  # type: ignore[no-untyped-call]
        return summed

    def enter(self, x: Tensor) -> Tensor:
        """What all ranks have alike, for a computation that each does a part of: its gradients are added up."""
        return self._enter(x, 0, range(self.size))

    def enter_rows(self, x: Tensor, first: int, ranks: range) -> Tensor:
        """The same for the rows from `first` on, which only these ranks have alike."""
        return self._enter(x, first, ranks)

    def _enter(self, x: Tensor, first: int, ranks: range) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        entered: Tensor = _Enter.apply(x, self, first, ranks)  # type: ignore[no-untyped-call]
        return entered

    def first(self, x: Tensor) -> Tensor:
        """What the first rank has."""
        return self.gather(x)[0]

    def total(self, x: Tensor, ranks: Sequence[int] | None = None) -> Tensor:
        """The sum over the ranks, or over some of them, without a gradient."""
        chosen = range(self.size) if ranks is None else ranks
        if len(chosen) == self.size > 2 and x.nbytes >= LARGE_SUM:
            return self._total_of_parts(x)
        return _add_up(self.gather(x), chosen)

    def _total_of_parts(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1)
        part = -(-len(flat) // self.size)
        rows = functional.pad(flat, (0, part * self.size - len(flat))).view(self.size, part)
        spread = group_exchange(rows, self._number, "spread")
        total = self.gather(_add_up(spread, range(self.size)))
        return total.view(-1)[: len(flat)].view(x.shape)

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [ranks, ...], in their order, without a gradient."""
        return group_exchange(x.detach(), self._number, "gather")


def _add_up(parts: Tensor, ranks: Sequence[int]) -> Tensor:
    """The sum of what these ranks have, from the first to the last, rounded once."""
    total = parts[ranks[0]].to(torch.promote_types(parts.dtype, torch.float32))
    for rank in ranks[1:]:
        total = total + parts[rank]
    return total.to(parts.dtype)


# An operation is given numbers and tensors, so it finds its group here. A group belongs to the model that it divides.
_groups: WeakValueDictionary[int, TensorGroup] = WeakValueDictionary()
_numbers = itertools.count()


def _exchanged_shape(x: Tensor, group: int, how: str) -> Tensor:
    return x.new_empty((_groups[group].size, *x.shape) if how == "gather" else x.shape)


@operator(shaped=_exchanged_shape)
def group_exchange(x: Tensor, group: int, how: str) -> Tensor:
    return _groups[group].exchanges[how](x.contiguous())


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorGroup) -> Tensor:
        return group.total(partial)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        return d_total, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, first: int, ranks: range) -> Tensor:
        ctx.group = group
        ctx.first = first
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        group: TensorGroup = ctx.group
        if ctx.first == 0:
            return group.total(d_x, ctx.ranks), None, None, None
        d_x = d_x.clone()
        d_x[ctx.first :] = group.total(d_x[ctx.first :], ctx.ranks)
        return d_x, None, None, None
