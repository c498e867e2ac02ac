"""Static outputs: returning a graph's static tensors without a copy, and never overwriting one still in use.

Gradients leave a backward graph as aliases of static memory that only that graph writes. Before the next
replay writes there, the reference count of each storage tells whether the program still uses it. A
gradient in `param.grad` then moves to memory of its own, unless there are views of it; any other
reference keeps its value in place, and the new result is returned as a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

# Cheaper than detach(), and with a version counter of its own: a tensor that the program keeps is never written.
_alias = attrgetter("data")
_ALIGNMENT = 256  # bytes, as PyTorch's allocator gives


class StaticOutputs:
    """The outputs of a recording, and whether the program still refers to them."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = [t for t in tensors if t is not None]
        self._absent = [t is None for t in tensors]
        self._some_absent = any(self._absent)
        self._storages = [t.untyped_storage()._cdata for t in self._tensors]
        self._own_references = self._references()
        self._preserved: dict[int, Tensor] = {}  # index -> the value that the program still uses, during a replay

    def _references(self) -> list[int]:
        return list(map(torch._C._storage_Use_Count, self._storages))

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._tensors)

    def referenced(self) -> bool:
        """Whether the program still refers to a result of an earlier replay."""
        return self._references() != self._own_references

    def preserve(self, leaves: Iterable[Tensor]) -> None:
        """Save what the program still uses from the next replay; `leaves` may have it as their gradient."""
        movable: set[int] = set()
        for tensor, now, own in zip(self._tensors, self._references(), self._own_references, strict=True):
            # A second reference is a view of the gradient and has to remain one: such a gradient stays in place.
            if now == own + 1 and tensor.numel():
                movable.add(tensor.data_ptr())
        moving = [g for leaf in leaves if (g := leaf.grad) is not None and g.data_ptr() in movable]
        for gradient, copy in zip(moving, copies(moving), strict=True):
            gradient.data = copy  # the same tensor object in other memory, for everything that refers to it
        counts = zip(self._references(), self._own_references, strict=True)
        in_place = [index for index, (now, own) in enumerate(counts) if now > own]
        values = copies([self._tensors[index] for index in in_place])
        self._preserved = dict(zip(in_place, values, strict=True))

    def take(self) -> list[Tensor | None]:
        """The results of the replay that just ran."""
        results: list[Tensor | None] = list(map(_alias, self._tensors))
        if self._preserved:
            replaced = copies([self._tensors[index] for index in self._preserved])
            for (index, value), result in zip(self._preserved.items(), replaced, strict=True):
                results[index] = result
                self._tensors[index].copy_(value)
            self._preserved = {}
        if not self._some_absent:
            return results
        supply = iter(results)
        return [None if absent else next(supply) for absent in self._absent]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, made in one launch on a GPU."""
    if len(tensors) > 1 and tensors[0].is_cuda and all(t.is_floating_point() for t in tensors):
        return list(torch._foreach_mul(list(tensors), 1))
    return [t.clone() for t in tensors]


def allocate_together(templates: Sequence[tuple[Tensor, torch.device] | None]) -> list[Tensor | None]:
    """Uninitialised tensors, one for each (meta tensor, device), in one allocation for each device.

    Separate allocations would each be rounded up. Each tensor has a storage of its own over its part.
    """
    sizes: dict[torch.device, list[int]] = {}
    for template in templates:
        if template is not None:
            meta, device = template
            sizes.setdefault(device, []).append(meta.nbytes)
    parts = {device: iter(_split(device, wanted)) for device, wanted in sizes.items()}
    tensors: list[Tensor | None] = []
    for template in templates:
        if template is None:
            tensors.append(None)
        else:
            meta, device = template
            tensors.append(_over(next(parts[device]), meta))
    return tensors


def _split(device: torch.device, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    parts: tuple[Tensor, ...] = torch.empty(sum(rounded), dtype=torch.uint8, device=device).split(rounded)
    return parts


def _over(part: Tensor, meta: Tensor) -> Tensor:
    """A tensor like `meta` in the memory of `part`."""
    own = from_dlpack(to_dlpack(part)).untyped_storage()  # a new storage, which keeps the allocation alive
    return torch.empty(0, dtype=meta.dtype, device=part.device).set_(own, 0, meta.size(), meta.stride())
