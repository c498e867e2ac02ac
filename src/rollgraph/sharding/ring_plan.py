"""The layout of sharded parameters: which unit lies in which slot of a ring, and the memory that this takes.

Owns the plan and touches no memory. A unit is what is gathered and reduced together, usually a layer. Units take turns
in a few slots; what belongs to no unit (embedding, last norm, head) is a unit with a slot of its own. Frozen tensors of
a unit (`frozen_parts.py`) are gathered with it, and that is all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rollgraph.sharding.bucket_plan import BucketPlan, ParameterSpec, plan_buckets
from rollgraph.sharding.state_memory import MemoryPlan, Offload, StateFormat, plan_optimizer

SLOTS = 2  # by default: one unit is computed while the next one is gathered
_REST = "the parameters outside of layers"


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered and reduced together, a bucket for each dtype, and the slot where they lie."""

    name: str
    slot: int
    buckets: tuple[BucketPlan, ...]
    frozen: tuple[BucketPlan, ...] = ()  # tensors that are no parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all that is gathered."""
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in (*self.buckets, *self.frozen))

    @property
    def gradients(self) -> int:
        """Elements of all its gradients."""
        return sum(bucket.numel for bucket in self.buckets if bucket.trainable)


@dataclass(frozen=True)
class RingPlan:
    """Units in the order of a forward. The first `turning` ones take turns in `size` slots."""

    units: tuple[UnitPlan, ...]
    turning: int
    size: int

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Those of the parameters."""
        return tuple(bucket for unit in self.units for bucket in unit.buckets)

    @property
    def frozen(self) -> tuple[BucketPlan, ...]:
        return tuple(bucket for unit in self.units for bucket in unit.frozen)

    @property
    def slots(self) -> int:
        return max(unit.slot for unit in self.units) + 1

    def slot_nbytes(self, slot: int) -> int:
        """Bytes in a slot: those of the largest unit in it."""
        return max(unit.nbytes for unit in self.units if unit.slot == slot)

    def slot_gradients(self, slot: int) -> int:
        """Elements of gradients in a slot."""
        return max(unit.gradients for unit in self.units if unit.slot == slot)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of a rank's shards of the parameters that take turns."""
        return sum(_shard_nbytes(unit.buckets) for unit in self.units[: self.turning])

    @property
    def kept_frozen_nbytes(self) -> int:
        """The same of frozen tensors."""
        return _shard_nbytes(self.frozen)

    @property
    def copy_nbytes(self) -> int:
        """Bytes of a full copy, which has the parameters outside of layers in common with the ring."""
        return sum(unit.nbytes for unit in self.units[: self.turning])


def _shard_nbytes(buckets: Iterable[BucketPlan]) -> int:
    return sum(bucket.shard_numel * bucket.dtype.itemsize for bucket in buckets)


def names_in(model: nn.Module, units: Sequence[nn.Module]) -> list[set[str]]:
    """The names of the parameters in each unit of a model, which may be on the meta device."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    found = []
    for unit in units:
        found.append(set().union(*(names.get(id(parameter), ()) for parameter in unit.parameters())))
    return found


def plan_units(
    parameters: Sequence[ParameterSpec],
    units: Sequence[Collection[str]],
    *,
    ranks: int,
    slots: int = SLOTS,
    frozen: Sequence[Sequence[ParameterSpec]] = (),
) -> RingPlan:
    """Lay out parameters, given in the order of execution. `units` has the names in each unit, in that order, too.

    `frozen` has the frozen tensors of each unit, if units have any.
    """
    if slots < 1:
        raise ValueError(f"slots={slots}: a ring has at least one slot")
    groups: list[list[ParameterSpec]] = [[] for _ in units]
    rest: list[ParameterSpec] = []
    for spec in parameters:
        homes = [index for index, names in enumerate(units) if any(name in names for name in spec.names)]
        if len(homes) > 1:
            raise ValueError(f"{spec.name} is in layers {homes[0]} and {homes[1]}: they cannot be gathered apart")
        if homes and not spec.trainable:
            raise ValueError(f"{spec.name} is frozen: with sharded parameters, all parameters of a layer are trained")
        (groups[homes[0]] if homes else rest).append(spec)
    if not groups or not all(groups):
        raise ValueError("sharded parameters need layers, each with parameters of its own")
    size = min(slots, len(groups))
    planned = []
    for index, group in enumerate(groups):
        buckets = plan_buckets(group, ranks=ranks, bucket_bytes=sys.maxsize)
        beside = plan_buckets(frozen[index], ranks=ranks, bucket_bytes=sys.maxsize) if frozen else ()
        planned.append(UnitPlan(f"layer {index}", index % size, buckets, beside))
    if rest:
        planned.append(UnitPlan(_REST, size, plan_buckets(rest, ranks=ranks, bucket_bytes=sys.maxsize)))
    return RingPlan(tuple(planned), len(groups), size)


def plan_ring(
    plan: RingPlan, grad_dtype: torch.dtype, state: StateFormat = "fp32", offload: Offload = "none"
) -> MemoryPlan:
    """The memory of one rank that holds shards, the slots of the ring, and AdamW. A full copy is not in it."""
    slots = range(plan.slots)
    parameters = sum(map(plan.slot_nbytes, slots))  # the shard of the rest is a part of its slot
    parameters += plan.kept_nbytes + plan.kept_frozen_nbytes
    gradients = sum(map(plan.slot_gradients, slots))
    gradients += sum(bucket.shard_numel for bucket in plan.buckets if bucket.trainable)
    return MemoryPlan(parameters, gradients * grad_dtype.itemsize, plan_optimizer(plan.buckets, state, offload))
