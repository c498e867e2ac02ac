"""Outputs of a graph: its static tensors, without a copy, in the structure that the function returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack, to_dlpack

from rollgraph.graph.errors import CaptureError, NeedsWarmup
from rollgraph.graph.surface import TensorSpec, same_constant

# -- static tensors, never overwritten while in use ------------------------------------------------
# Gradients leave a backward graph as aliases of static memory that only this graph writes. Before the next replay
# writes there, the reference count of each storage tells whether the program still uses it. If so, a gradient in
# `param.grad` moves to new memory, unless views of it exist. Any other reference keeps its value in place, and the new
# result is returned as a copy.

# Cheaper than detach(), and with a new version counter. That is right: a tensor the program keeps is never written.
_alias = attrgetter("data")
_ALIGNMENT = 256  # bytes, as in PyTorch's allocators


class StaticOutputs:
    """The outputs of a recording, and whether the program still refers to them."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = [t for t in tensors if t is not None]
        self._is_none = [t is None for t in tensors]
        self._has_nones = any(self._is_none)
        self._storages = [t.untyped_storage()._cdata for t in self._tensors]
        self._baseline_references = self._references()
        self._preserved: dict[int, Tensor] = {}  # during a replay: index -> value that the program still uses

    def _references(self) -> list[int]:
        return list(map(torch._C._storage_Use_Count, self._storages))

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._tensors)

    def is_referenced(self) -> bool:
        """Whether the program still refers to an output of an earlier replay."""
        return self._references() != self._baseline_references

    def preserve(self, leaves: Iterable[Tensor]) -> None:
        """Save values that the program still uses from the next replay. `leaves` may have them as their `.grad`."""
        movable: set[int] = set()
        for tensor, count, baseline in zip(self._tensors, self._references(), self._baseline_references, strict=True):
            # A second reference is a view of the gradient, and must stay one: such a gradient stays in place.
            if count == baseline + 1 and tensor.numel():
                movable.add(tensor.data_ptr())
        moving = [g for leaf in leaves if (g := leaf.grad) is not None and g.data_ptr() in movable]
        for gradient, copy in zip(moving, copies(moving), strict=True):
            gradient.data = copy  # the tensor object stays the same, its memory is new
        counts = zip(self._references(), self._baseline_references, strict=True)
        in_place = [index for index, (count, baseline) in enumerate(counts) if count > baseline]
        values = copies([self._tensors[index] for index in in_place])
        self._preserved = dict(zip(in_place, values, strict=True))

    def collect_results(self) -> list[Tensor | None]:
        """Return the outputs of the replay that just ran."""
        results: list[Tensor | None] = list(map(_alias, self._tensors))
        if self._preserved:
            copied = copies([self._tensors[index] for index in self._preserved])
            for (index, value), result in zip(self._preserved.items(), copied, strict=True):
                results[index] = result
                self._tensors[index].copy_(value)
            self._preserved = {}
        if not self._has_nones:
            return results
        remaining = iter(results)
        return [None if is_none else next(remaining) for is_none in self._is_none]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors, on a GPU in one launch."""
    if len(tensors) > 1 and tensors[0].is_cuda and all(t.is_floating_point() for t in tensors):
        return list(torch._foreach_mul(list(tensors), 1))
    return [t.clone() for t in tensors]


def allocate_together(templates: Sequence[tuple[Tensor, torch.device] | None]) -> list[Tensor | None]:
    """Uninitialised tensors, one per (meta tensor, device), in one allocation per device.

    Separate allocations would each be rounded up. Each tensor gets a separate storage over its part.
    """
    sizes: dict[torch.device, list[int]] = {}
    for template in templates:
        if template is not None:
            meta, device = template
            sizes.setdefault(device, []).append(meta.nbytes)
    parts = {device: iter(_split(device, byte_counts)) for device, byte_counts in sizes.items()}
    tensors: list[Tensor | None] = []
    for template in templates:
        if template is None:
            tensors.append(None)
        else:
            meta, device = template
            tensors.append(_tensor_over(next(parts[device]), meta))
    return tensors


def _split(device: torch.device, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    parts: tuple[Tensor, ...] = torch.empty(sum(rounded), dtype=torch.uint8, device=device).split(rounded)
    return parts


def _tensor_over(part: Tensor, meta: Tensor) -> Tensor:
    """A tensor like `meta` in the memory of `part`."""
    storage = from_dlpack(to_dlpack(part)).untyped_storage()  # a new storage, which keeps the allocation alive
    return torch.empty(0, dtype=meta.dtype, device=part.device).set_(storage, 0, meta.size(), meta.stride())


# -- the structure around them ---------------------------------------------------------------------
# Owns the containers and constants around output tensors. A replay returns constants unchanged, so constants that vary
# from run to run are refused. Knows nothing of recordings.

_REPLAYABLE = (type(None), bool, int, float, str)


class OutputTree:
    """An output split into tensors, constants and the containers around them."""

    def __init__(self, output: Any) -> None:
        leaves, self._tree = pytree.tree_flatten(output)
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # One entry for each leaf: None stands for a tensor, (value,) for a constant, which may itself be None.
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self.is_tensor = isinstance(output, Tensor)
        self._is_tuple = type(output) is tuple and all(isinstance(leaf, Tensor) for leaf in output)
        self.differentiable: list[int] = []  # indexes of the tensors that require grad
        self.non_differentiable: list[int] = []
        for index, tensor in enumerate(self.tensors):
            if tensor.requires_grad:
                self.differentiable.append(index)
            else:
                self.non_differentiable.append(index)
        self.specs = [TensorSpec.of(tensor) for tensor in self.tensors]

    def refuse_objects(self, graph: str) -> None:
        """Raise CaptureError for a leaf that is neither a tensor nor a plain constant."""
        for constant in self._constants:
            if constant is not None and not isinstance(constant[0], _REPLAYABLE):
                raise CaptureError(
                    f"{graph} returns a {type(constant[0]).__name__}, which every replay would return unchanged: "
                    "return tensors, or containers of tensors"
                )

    def refuse_constants(self, graph: str) -> None:
        """Raise NeedsWarmup for a number or string: another call may return another one, but a replay cannot."""
        for constant in self._constants:
            if constant is not None and constant[0] is not None:
                raise NeedsWarmup(f"{graph} returns {constant[0]!r} besides tensors")

    def refuse_change(self, last: OutputTree, graph: str) -> None:
        """Raise CaptureError if the structure or a constant differs from the run before.

        A replay returns both unchanged, so they must be the same in every run.
        """
        tensor_positions = [constant is None for constant in self._constants]
        last_positions = [constant is None for constant in last._constants]
        if self._tree != last._tree or tensor_positions != last_positions:
            raise CaptureError(f"the structure of the output of {graph} changes from call to call: keep it the same")
        for constant, previous in zip(self._constants, last._constants, strict=True):
            if constant is None or previous is None or same_constant(constant[0], previous[0]):
                continue
            raise CaptureError(
                f"{graph} returns {previous[0]!r} in one call and {constant[0]!r} in the next, which a replay would "
                "not follow: return it as a tensor, or compute it outside"
            )

    def drop_tensors(self) -> OutputTree:
        """Drop the tensors, and with them the autograd graph behind them."""
        self.tensors = []
        return self

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """An output of this structure that holds `tensors`."""
        if self.is_tensor:
            return tensors[0]
        if self._is_tuple:
            return tuple(tensors)
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant[0] for constant in self._constants]
        return pytree.tree_unflatten(leaves, self._tree)
