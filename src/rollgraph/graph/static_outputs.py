"""Lending: handing out a graph's static tensors without a copy, and never overwriting what is still held.

Gradients leave a backward graph as aliases of static memory that only that graph writes. Before the
next replay writes there, whoever still holds one is found by the reference count of its storage. A
gradient that sits in `param.grad` moves to memory of its own, unless there are views of it; anything
else keeps its value where it is, and the new result is handed out as a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

_alias = attrgetter("data")  # cheaper than detach(), and with a version of its own: what is held is never written
_ALIGNMENT = 256  # bytes, as PyTorch's allocator gives


class StaticOutputs:
    """The outputs of a recording, lent until the next replay or for as long as somebody wants."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = [t for t in tensors if t is not None]
        self._absent = [t is None for t in tensors]
        self._some_absent = any(self._absent)
        self._storages = [t.untyped_storage()._cdata for t in self._tensors]
        self._alone = self._holders()
        self._kept: dict[int, Tensor] = {}  # place -> what somebody holds, while a replay writes over it

    def _holders(self) -> list[int]:
        return list(map(torch._C._storage_Use_Count, self._storages))

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._tensors)

    def held(self) -> bool:
        """Somebody still has what an earlier replay left."""
        return self._holders() != self._alone

    def make_way(self, leaves: Iterable[Tensor]) -> None:
        """Take what is held out of the way of the next replay; `leaves` may hold it as their gradient."""
        counts = zip(self._tensors, self._holders(), self._alone, strict=True)
        # With a second holder there is a view of the gradient, which must go on to be one: that stays where it is.
        movable = {t.data_ptr() for t, now, alone in counts if now == alone + 1 and t.numel()}
        moving = [g for leaf in leaves if (g := leaf.grad) is not None and g.data_ptr() in movable]
        for gradient, copy in zip(moving, copies(moving), strict=True):
            gradient.data = copy  # the same tensor object in other memory, for all who hold it
        held = [i for i, (now, alone) in enumerate(zip(self._holders(), self._alone, strict=True)) if now > alone]
        self._kept = dict(zip(held, copies([self._tensors[i] for i in held]), strict=True))

    def lend(self) -> list[Tensor | None]:
        """The results of the replay that just ran."""
        lent: list[Tensor | None] = list(map(_alias, self._tensors))
        if self._kept:
            results = copies([self._tensors[i] for i in self._kept])
            for (place, value), result in zip(self._kept.items(), results, strict=True):
                lent[place] = result
                self._tensors[place].copy_(value)
            self._kept = {}
        if not self._some_absent:
            return lent
        supply = iter(lent)
        return [None if absent else next(supply) for absent in self._absent]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, in one launch on a GPU."""
    if len(tensors) > 1 and tensors[0].is_cuda and all(t.is_floating_point() for t in tensors):
        return list(torch._foreach_mul(list(tensors), 1))
    return [t.clone() for t in tensors]


def side_by_side(likes: Sequence[tuple[Tensor, torch.device] | None]) -> list[Tensor | None]:
    """Uninitialised tensors in one allocation for each device: of its own, each would be rounded up.

    Each is like a (meta tensor, device), and has a storage of its own over its part of the allocation.
    """
    given = [like for like in likes if like is not None]
    parts = {
        device: iter(_split(device, [meta.nbytes for meta, other in given if other == device]))
        for device in {device for _, device in given}
    }
    return [None if like is None else _over(next(parts[like[1]]), like[0]) for like in likes]


def _split(device: torch.device, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    parts: tuple[Tensor, ...] = torch.empty(sum(rounded), dtype=torch.uint8, device=device).split(rounded)
    return parts


def _over(part: Tensor, meta: Tensor) -> Tensor:
    own = from_dlpack(to_dlpack(part)).untyped_storage()  # a new storage, which holds the allocation
    return torch.empty(0, dtype=meta.dtype, device=part.device).set_(own, 0, meta.size(), meta.stride())
