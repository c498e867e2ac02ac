"""The layout of sharded parameters: the units of a model, the slot of each, and its frozen tensors.

Owns the plan and touches no memory. A unit, as in FSDP, is a set of parameters that are gathered and reduced together.
Each layer is a unit, and layers share a ring of a few slots. The parameters outside of layers (embedding, last norm,
head) form the root unit, which has its own slot. Frozen tensors of a layer are gathered with it, and never reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollgraph.parallel.data.bucket_plan import (
    BucketPlan,
    MemoryPlan,
    Offload,
    ParameterSpec,
    StateFormat,
    plan_buckets,
    plan_optimizer,
)

# -- frozen tensors --------------------------------------------------------------------------------
# Frozen tensors, such as the base weights under LoRA, are gathered with the parameters. They have no gradients and no
# optimizer state, and checkpoints do not contain them: whoever creates the model loads them. Sharding knows nothing
# about their use; the caller, who knows the model, passes `FrozenParts`.

FrozenTensors = Mapping[str, Sequence[Tensor]]  # by name: a tensor, followed by views of it, which move with it


class FrozenParts(NamedTuple):
    """Two functions of a layer, or of a copy of a layer."""

    tensors: Callable[[nn.Module], FrozenTensors]
    # Returns a function that is called whenever the layer has been gathered: it recomputes values derived from its
    # parameters, in place.
    refresh: Callable[[nn.Module], Callable[[], object]]


def find_frozen(parts: FrozenParts | None, units: Sequence[nn.Module]) -> list[FrozenTensors]:
    """The frozen tensors of each layer, by names that are unique among all layers and parameters."""
    if parts is None:
        return [{} for _ in units]
    frozen: list[FrozenTensors] = []
    for index, unit in enumerate(units):
        frozen.append({f"layer {index}: {name}": tensors for name, tensors in parts.tensors(unit).items()})
    return frozen


def frozen_specs(frozen: FrozenTensors) -> list[ParameterSpec]:
    """The specs of frozen tensors, which may be on the meta device."""
    specs = []
    for name, (tensor, *_) in frozen.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: it cannot be sharded")
        specs.append(ParameterSpec((name,), tensor.shape, tensor.dtype, trainable=False))
    return specs


def views_of(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of `memory` with the layouts of these tensors: the first one, whose size it has, and views of that one."""
    start = memory.storage_offset() - tensors[0].storage_offset()
    return [memory.as_strided(view.shape, view.stride(), start + view.storage_offset()) for view in tensors]


# -- units and slots -------------------------------------------------------------------------------

SLOTS = 2  # the default: one layer is computed while the next one is gathered
_ROOT = "the parameters outside of layers"


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered and reduced together, one bucket per dtype, and their slot."""

    name: str
    slot: int
    buckets: tuple[BucketPlan, ...]
    frozen: tuple[BucketPlan, ...] = ()  # tensors that are not parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters and frozen tensors."""
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in (*self.buckets, *self.frozen))

    @property
    def gradients(self) -> int:
        """The number of elements of all gradients."""
        return sum(bucket.numel for bucket in self.buckets if bucket.trainable)


@dataclass(frozen=True)
class RingPlan:
    """Units in the order of a forward: `num_layers` layers, which share `layer_slots` slots, then the root, if any."""

    units: tuple[UnitPlan, ...]
    num_layers: int
    layer_slots: int

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """The buckets of all parameters."""
        return tuple(bucket for unit in self.units for bucket in unit.buckets)

    @property
    def frozen(self) -> tuple[BucketPlan, ...]:
        return tuple(bucket for unit in self.units for bucket in unit.frozen)

    @property
    def num_slots(self) -> int:
        return max(unit.slot for unit in self.units) + 1

    def slot_nbytes(self, slot: int) -> int:
        """Bytes of a slot: those of its largest unit."""
        return max(unit.nbytes for unit in self.units if unit.slot == slot)

    def slot_gradients(self, slot: int) -> int:
        """The number of gradient elements in a slot."""
        return max(unit.gradients for unit in self.units if unit.slot == slot)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of a rank's shards of the layers' parameters."""
        return sum(_shard_nbytes(unit.buckets) for unit in self.units[: self.num_layers])

    @property
    def frozen_shard_nbytes(self) -> int:
        """Bytes of a rank's shards of the frozen tensors."""
        return _shard_nbytes(self.frozen)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full (unsharded) layers. The root is not counted: it is in the ring's memory."""
        return sum(unit.nbytes for unit in self.units[: self.num_layers])


def _shard_nbytes(buckets: Iterable[BucketPlan]) -> int:
    return sum(bucket.shard_numel * bucket.dtype.itemsize for bucket in buckets)


def names_in(model: nn.Module, units: Sequence[nn.Module]) -> list[set[str]]:
    """The names of the parameters in each layer of a model, which may be on the meta device."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    names_by_unit = []
    for unit in units:
        names_by_unit.append(set().union(*(names.get(id(parameter), ()) for parameter in unit.parameters())))
    return names_by_unit


def plan_units(
    parameters: Sequence[ParameterSpec],
    units: Sequence[Collection[str]],
    *,
    ranks: int,
    slots: int = SLOTS,
    frozen: Sequence[Sequence[ParameterSpec]] = (),
) -> RingPlan:
    """Lay out parameters, given in the order of execution. `units` has the parameter names of each layer, in order.

    `frozen` has the frozen tensors of each layer, if there are any.
    """
    if slots < 1:
        raise ValueError(f"slots={slots}: a ring has at least one slot")
    groups: list[list[ParameterSpec]] = [[] for _ in units]
    root: list[ParameterSpec] = []
    for spec in parameters:
        layers = [index for index, names in enumerate(units) if any(name in names for name in spec.names)]
        if len(layers) > 1:
            raise ValueError(f"{spec.name} is in layers {layers[0]} and {layers[1]}: they cannot be gathered apart")
        if layers and not spec.trainable:
            raise ValueError(f"{spec.name} is frozen: with sharded parameters, all parameters of a layer are trained")
        (groups[layers[0]] if layers else root).append(spec)
    if not groups or not all(groups):
        raise ValueError("sharded parameters need layers, and each layer needs its own parameters")
    layer_slots = min(slots, len(groups))
    planned = []
    for index, group in enumerate(groups):
        buckets = plan_buckets(group, ranks=ranks, bucket_bytes=sys.maxsize)
        frozen_buckets = plan_buckets(frozen[index], ranks=ranks, bucket_bytes=sys.maxsize) if frozen else ()
        planned.append(UnitPlan(f"layer {index}", index % layer_slots, buckets, frozen_buckets))
    if root:
        planned.append(UnitPlan(_ROOT, layer_slots, plan_buckets(root, ranks=ranks, bucket_bytes=sys.maxsize)))
    return RingPlan(tuple(planned), len(groups), layer_slots)


def plan_ring(
    plan: RingPlan, grad_dtype: torch.dtype, state: StateFormat = "fp32", offload: Offload = "none"
) -> MemoryPlan:
    """The memory of one rank: shards, the slots of the ring, and AdamW. Full parameters are not included."""
    slots = range(plan.num_slots)
    parameters = sum(map(plan.slot_nbytes, slots))  # the shard of the root is a part of its slot
    parameters += plan.shard_nbytes + plan.frozen_shard_nbytes
    gradients = sum(map(plan.slot_gradients, slots))
    gradients += sum(bucket.shard_numel for bucket in plan.buckets if bucket.trainable)
    return MemoryPlan(parameters, gradients * grad_dtype.itemsize, plan_optimizer(plan.buckets, state, offload))
