"""Lending: handing out a graph's static tensors without a copy, and never overwriting what is still held.

Gradients leave a backward graph as aliases of static memory that only that graph writes. Before the
next replay writes there, whoever still holds one is found by the reference count of its storage. A
gradient that sits in `param.grad` moves to memory of its own; anything else keeps its value where it
is, and the new result is handed out as a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, as PyTorch's allocator gives


class LentTensors:
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
        return sum({storage: t.untyped_storage().nbytes() for storage, t in self._by_storage()}.values())

    def _by_storage(self) -> Iterable[tuple[int, Tensor]]:
        return zip(self._storages, self._tensors, strict=True)

    def held(self) -> bool:
        """Somebody still has what an earlier replay left."""
        return self._holders() != self._alone

    def make_way(self, leaves: Iterable[Tensor]) -> None:
        """Take what is held out of the way of the next replay; `leaves` may hold it as their gradient."""
        places = {t.data_ptr(): i for i, t in enumerate(self._tensors) if t.numel()}
        moving = [g for leaf in leaves if (g := leaf.grad) is not None and g.data_ptr() in places]
        for gradient, copy in zip(moving, copies(moving), strict=True):
            gradient.data = copy  # the same tensor object in other memory, for all who hold it
        held = [i for i, (now, alone) in enumerate(zip(self._holders(), self._alone, strict=True)) if now > alone]
        self._kept = dict(zip(held, copies([self._tensors[i] for i in held]), strict=True))

    def lend(self) -> list[Tensor | None]:
        """The results of the replay that just ran."""
        lent: list[Tensor | None] = [t.detach() for t in self._tensors]
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
    if len(tensors) > 1 and tensors[0].is_cuda and not any(t.is_complex() for t in tensors):
        return list(torch._foreach_mul(list(tensors), 1))
    return [t.clone() for t in tensors]


def side_by_side(likes: Sequence[tuple[Tensor, torch.device] | None]) -> list[Tensor | None]:
    """Uninitialised tensors in one allocation for each device: of its own, each would be rounded up.

    Each is like a (meta tensor, device).
    """
    offsets, totals = [], dict[torch.device, int]()
    for meta, device in filter(None, likes):
        start = totals.get(device, 0)
        offsets.append(start)
        totals[device] = start + -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
    storages = {
        device: torch.empty(size, dtype=torch.uint8, device=device).untyped_storage() for device, size in totals.items()
    }
    made: list[Tensor | None] = []
    supply = iter(offsets)
    for like in likes:
        if like is None:
            made.append(None)
            continue
        meta, device = like
        tensor = torch.empty(0, dtype=meta.dtype, device=device)
        made.append(tensor.set_(storages[device], next(supply) // meta.element_size(), meta.size(), meta.stride()))
    return made
