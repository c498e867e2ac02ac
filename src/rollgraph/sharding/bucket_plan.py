"""The layout of flat buffers: which parameter lies where, in which bucket, and which part of it a rank owns.

Owns the plan and touches no memory. `flat_buffer.py` allocates what is planned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256  # bytes: every parameter and every shard starts at a multiple of this
ALIGNED_ELEMENTS = 64  # and of this many elements, whatever their dtype

BUCKET_BYTES = 64 * 2**20  # the default size of a bucket


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know about a parameter. A tied parameter has several `names`."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ParameterSlice:
    """Where a parameter lies in its bucket, in elements."""

    parameter: ParameterSpec
    start: int

    @property
    def numel(self) -> int:
        return self.parameter.shape.numel()


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: parameters in the order in which their gradients arrive, padded so that all shards are equal."""

    slots: tuple[ParameterSlice, ...]
    dtype: torch.dtype
    trainable: bool
    numel: int
    ranks: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks

    def owned(self, rank: int) -> Iterator[tuple[ParameterSlice, int, int]]:
        """The parts of parameters in a rank's shard, each with where it starts and ends in the shard."""
        first = rank * self.shard_numel
        for slot in self.slots:
            start = max(slot.start - first, 0)
            end = min(slot.start + slot.numel - first, self.shard_numel)
            if start < end:
                yield slot, start, end

    def nbytes(self, grad_dtype: torch.dtype) -> int:
        """Bytes of parameters and gradients on each rank."""
        itemsize = self.dtype.itemsize
        if self.trainable:
            itemsize += grad_dtype.itemsize
        return self.numel * itemsize


def specs_of(model: nn.Module, order: Sequence[str] = ()) -> list[ParameterSpec]:
    """Each parameter of a model once: those named in `order` first, then the others as they were registered."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    specs = [
        ParameterSpec(tuple(own_names), parameter.shape, parameter.dtype, parameter.requires_grad)
        for parameter, own_names in names.items()
    ]
    position = {name: index for index, name in enumerate(order)}
    last = len(position)
    return sorted(specs, key=lambda spec: min(position.get(name, last) for name in spec.names))


def execution_order(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The names of the parameters in the order in which a forward reaches their modules."""
    reached: dict[nn.Module, None] = {}

    def note(module: nn.Module, _: Any) -> None:
        reached.setdefault(module)

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    module_names = {module: name for name, module in model.named_modules()}
    order = []
    for module in reached:
        for name, _ in module.named_parameters(recurse=False):
            order.append(f"{module_names[module]}.{name}".removeprefix("."))
    return order


def plan_buckets(parameters: Sequence[ParameterSpec], *, ranks: int, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Divide parameters, given in the order of execution, into buckets in the order in which backward reaches them.

    All parameters of a bucket have one dtype. A bucket is closed once it has `bucket_bytes`. Frozen parameters have
    buckets of their own.
    """
    if ranks < 1 or bucket_bytes < 1:
        raise ValueError(f"ranks={ranks}, bucket_bytes={bucket_bytes}: both must be positive")
    open_buckets: dict[tuple[torch.dtype, bool], list[ParameterSlice]] = {}
    closed: list[BucketPlan] = []
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.trainable)
        slots = open_buckets.setdefault(key, [])
        start = 0
        if slots:
            start = _round_up(slots[-1].start + slots[-1].numel, _aligned_elements(parameter.dtype))
        slots.append(ParameterSlice(parameter, start))
        if (start + parameter.shape.numel()) * parameter.dtype.itemsize >= bucket_bytes:
            closed.append(_close_bucket(open_buckets.pop(key), ranks))
    for slots in open_buckets.values():
        closed.append(_close_bucket(slots, ranks))
    return tuple(closed)


def _close_bucket(slots: list[ParameterSlice], ranks: int) -> BucketPlan:
    last = slots[-1]
    dtype = last.parameter.dtype
    used = max(1, last.start + last.numel)
    numel = _round_up(used, ranks * _aligned_elements(dtype))
    return BucketPlan(tuple(slots), dtype, last.parameter.trainable, numel, ranks)


def _aligned_elements(dtype: torch.dtype) -> int:
    return max(ALIGNED_ELEMENTS, ALIGNMENT // dtype.itemsize)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
