"""The tensor parallel group, as the model sees it: collectives between the ranks that share each layer.

Owns the two collectives of a tensor parallel layer, with their gradients: the all-reduce after a row parallel matmul,
and its counterpart before a column parallel one (identity forward, all-reduce backward). Sums are taken in the order of
ranks, in fp32 or more, and rounded once. So all ranks have the same bits, whatever the number of rows, and generation
agrees with training.

A large all-reduce among more than two ranks is a reduce-scatter (by all-to-all) and an all-gather. It moves no more
bytes than NCCL's, and gives the bits that one rank would get from the tensors of all.

A collective is one PyTorch operation: a tape records it, and a CUDA graph captures what it launches. Knows no process
groups: the functions that exchange tensors are arguments.
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

AllGather = Callable[[Tensor], Tensor]  # from a contiguous tensor to those of all ranks, [ranks, ...]
AllToAll = Callable[[Tensor], Tensor]  # from [ranks, ...], row i for rank i, to the rows that all ranks have for us
LARGE_ALL_REDUCE = 1 << 20  # bytes from which two exchanges of parts take less time than one of everything


class TensorParallelGroup:
    """This rank among the `size` ranks of the group. All of them call the same methods in the same order."""

    def __init__(self, rank: int, size: int, all_gather: AllGather, all_to_all: AllToAll) -> None:
        if size < 2 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: a group has two ranks or more")
        self.rank = rank
        self.size = size
        self.collectives = {"all_gather": all_gather, "all_to_all": all_to_all}
        self._number = next(_numbers)
        _groups[self._number] = self

    def __deepcopy__(self, memo: Any) -> TensorParallelGroup:
        return self  # a copy of a model belongs to the same ranks

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks. The gradient of each addend is that of the sum, which all ranks have alike."""
        if not (torch.is_grad_enabled() and partial.requires_grad):
            return self.all_reduce_no_grad(partial)
        summed: Tensor = _AllReduce.apply(partial, self)  # type: ignore[no-untyped-call]
        return summed

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """A replicated tensor as the input of column parallel layers: gradients are summed over the ranks."""
        return self._copy_to_ranks(x, 0, range(self.size))

    def copy_rows_to_ranks(self, x: Tensor, first: int, ranks: range) -> Tensor:
        """The same for the rows from `first` on, which only these ranks replicate."""
        return self._copy_to_ranks(x, first, ranks)

    def _copy_to_ranks(self, x: Tensor, first: int, ranks: range) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        copied: Tensor = _CopyToRanks.apply(x, self, first, ranks)  # type: ignore[no-untyped-call]
        return copied

    def from_first_rank(self, x: Tensor) -> Tensor:
        """The tensor of the first rank."""
        return self.all_gather(x)[0]

    def all_reduce_no_grad(self, x: Tensor, ranks: Sequence[int] | None = None) -> Tensor:
        """The sum over the ranks, or over some of them, without a gradient."""
        summed_ranks = range(self.size) if ranks is None else ranks
        if len(summed_ranks) == self.size > 2 and x.nbytes >= LARGE_ALL_REDUCE:
            return self._reduce_scatter_and_gather(x)
        return _add_up(self.all_gather(x), summed_ranks)

    def _reduce_scatter_and_gather(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1)
        part = -(-len(flat) // self.size)
        rows = functional.pad(flat, (0, part * self.size - len(flat))).view(self.size, part)
        received = group_collective(rows, self._number, "all_to_all")
        total = self.all_gather(_add_up(received, range(self.size)))
        return total.view(-1)[: len(flat)].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [ranks, ...], in their order, without a gradient."""
        return group_collective(x.detach(), self._number, "all_gather")


def _add_up(parts: Tensor, ranks: Sequence[int]) -> Tensor:
    """The sum of the tensors of these ranks, from the first to the last, rounded once."""
    total = parts[ranks[0]].to(torch.promote_types(parts.dtype, torch.float32))
    for rank in ranks[1:]:
        total = total + parts[rank]
    return total.to(parts.dtype)


# The arguments of an operation are numbers and tensors, so it looks its group up here. The model keeps a group alive.
_groups: WeakValueDictionary[int, TensorParallelGroup] = WeakValueDictionary()
_numbers = itertools.count()


def _collective_shape(x: Tensor, group: int, kind: str) -> Tensor:
    return x.new_empty((_groups[group].size, *x.shape) if kind == "all_gather" else x.shape)


@operator(shaped=_collective_shape)
def group_collective(x: Tensor, group: int, kind: str) -> Tensor:
    return _groups[group].collectives[kind](x.contiguous())


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.all_reduce_no_grad(partial)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        return d_total, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, first: int, ranks: range) -> Tensor:
        ctx.group = group
        ctx.first = first
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        group: TensorParallelGroup = ctx.group
        if ctx.first == 0:
            return group.all_reduce_no_grad(d_x, ctx.ranks), None, None, None
        d_x = d_x.clone()
        d_x[ctx.first :] = group.all_reduce_no_grad(d_x[ctx.first :], ctx.ranks)
        return d_x, None, None, None
