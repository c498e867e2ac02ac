"""The gathers of sharded parameters, and the full (unsharded) parameters that generation reads.

With replicated parameters, as in ZeRO-2, each rank has all parameters, and `ParameterGathers` gathers a bucket that is
stale after an update. With sharded parameters, as in FSDP or ZeRO-3, each rank keeps shards, and `RingGathers` gathers
layers into a ring of slots. Generation, scoring and export read all parameters at once, so they use `FullParameters`, a
second set of layers. `ShardedModel` uses either through the protocol `Gathers`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollgraph.graph.hooks import Guard
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.data.flat_buffer import Bucket
from rollgraph.parallel.data.gathers import BucketSync, StaleWeights
from rollgraph.parallel.fsdp.layout import FrozenParts, views_of
from rollgraph.parallel.fsdp.ring import BACKWARD, Ring, Unit
from rollgraph.parallel.ranks.world import World

# -- full parameters -------------------------------------------------------------------------------
# Owns the memory of the full parameters and the version of the shards that they hold. They form a second model, whose
# layers are views of that memory. The parameters outside of layers, and buffers that are not sharded, are the same
# tensors as in the trained model.

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class FullParameters:
    """A copy of the model with all layers unsharded, empty until the first `gather`. `units` are the layers."""

    def __init__(
        self,
        model: nn.Module,
        ring: Ring,
        world: World,
        collectives: Collectives,
        allocate: Allocate,
        units: Sequence[nn.Module] = (),
        parts: FrozenParts | None = None,
    ) -> None:
        self._ring = ring
        self._rank = world.rank
        self._collectives = collectives
        self._memory: dict[Unit, list[Tensor]] = {}
        self._versions: dict[Unit, int] = {}  # of the layers that are in it
        # The memo of `deepcopy`, by id: the objects that the copy has in place of copies. `deepcopy` adds the modules.
        replacements: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        for unit in ring.layers:
            parameters = iter(unit.parameters)  # in the order of the slots of their buckets
            self._memory[unit] = [_allocate(allocate, bucket, ring) for bucket in unit.buckets]
            for bucket, memory in zip(unit.buckets, self._memory[unit], strict=True):
                for slot in bucket.plan.slots:
                    view = memory.narrow(0, slot.start, slot.numel).view(slot.parameter.shape)
                    frozen = unit.frozen.get(slot.parameter.name)
                    if frozen is None:
                        replacements[id(next(parameters))] = nn.Parameter(view, requires_grad=False)
                    else:
                        replacements |= zip(map(id, frozen), views_of(view, frozen), strict=True)
        self.model = copy.deepcopy(model, replacements)
        self._refreshes: dict[Unit, Callable[[], object]] = {}  # called when a layer has been gathered
        if parts is not None:
            full_layers = (replacements[id(module)] for module in units)
            self._refreshes = dict(zip(ring.layers, map(parts.refresh, full_layers), strict=True))

    def gather(self) -> None:
        """Gather the layers whose shards have changed."""
        pending = []
        stale = [unit for unit in self._memory if self._versions.get(unit) != unit.version]
        for unit in stale:
            self._versions.pop(unit, None)
            for bucket, memory in zip(unit.buckets, self._memory[unit], strict=True):
                what = f"the all-gather of {unit.name} into the full parameters"
                pending.append(self._collectives.gather(memory, bucket.shard(self._rank), what))
        for collective in pending:
            collective.complete()
        self._mark_current(stale)

    def _mark_current(self, units: Iterable[Unit]) -> None:
        """These layers are up to date now."""
        for unit in units:
            if unit in self._refreshes:
                self._refreshes[unit]()
            self._versions[unit] = unit.version

    def update_shards(self) -> None:
        """Copy this rank's part to its shards, after all ranks have written the same values to the full parameters."""
        for unit, memory in self._memory.items():
            for bucket, memory_of_bucket in zip(unit.buckets, memory, strict=True):
                shard = bucket.shard(self._rank)
                shard.copy_(memory_of_bucket.narrow(0, self._rank * len(shard), len(shard)))
        self._ring.after_writing()
        self._mark_current(self._memory)

    def invalidate(self) -> None:
        """Call this before the memory is used for something else: all layers have to be gathered again."""
        self._versions.clear()

    def stale(self) -> str | None:
        """Why the full parameters must not be read now; None if they may."""
        for unit in self._memory:
            version = self._versions.get(unit)
            if version is None:
                return f"the full parameters do not hold {unit.name}: gather() first"
            if version != unit.version:
                return (
                    f"the full parameters hold {unit.name} of version {version}, but the shards have version "
                    f"{unit.version}"
                )
        return None


def _allocate(allocate: Allocate, bucket: Bucket, ring: Ring) -> Tensor:
    try:
        return allocate((bucket.plan.numel,), bucket.plan.dtype, bucket.parameters.device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"there is no memory for the full (unsharded) layers ({ring.full_nbytes / 2**30:.1f} GiB), which "
            "generation and scoring read: use tensor parallelism (tensor_parallel), or free memory elsewhere"
        ) from error


# -- gathers ---------------------------------------------------------------------------------------

_ONLY_SHARDS = "each rank has a shard of the parameters: call make_full_model() first"


class Gathers(Protocol):
    """The gathers of a model, with replicated or with sharded parameters."""

    joins_abort_first: bool  # `wait` could wait for gathers that other ranks, which aborted the step, never start

    @property
    def managed(self) -> Mapping[Tensor, Any]:
        """The parameters and frozen tensors that are gathered, each with its bucket or unit."""

    def start(self) -> None:
        """Start the gathers that precede a collective in which all ranks wait for each other."""

    def wait(self) -> None:
        """Wait for all gathers in flight. Parameters may be written afterwards."""

    def refresh_full(self) -> None:
        """After `start` and `wait`: bring the full parameters up to date."""

    def ensure_gathered(self, parameters: Sequence[Tensor]) -> None:
        """Make sure that these parameters can be read."""

    def enter(self, parameters: Sequence[Tensor], direction: int) -> None:
        """Gather the layer, or part of a layer, with these parameters, which is about to run forward or backward."""

    def stale(self) -> str | None:
        """Why not all parameters can be read now; None if they can. A guard of graphs, which also works in a pause."""

    def raise_if_stale(self, parameters: Sequence[Tensor]) -> None: ...

    def after_update(self, trained: Sequence[BucketSync], ahead: bool) -> bool:
        """The optimizer has written the shards. If `ahead`, prefetch; returns False if the caller has to gather now."""

    def after_writing(self) -> None:
        """The resident parameters of all ranks were written, or swapped for other weights."""

    def guards_of(self, module: nn.Module) -> list[Guard]:
        """Guards of a graph of this module, for `make_graphed_callables`: they check the contents of its slot."""

    def make_full_model(self, model: nn.Module, allocate: Allocate) -> nn.Module:
        """The model with full parameters."""

    def update_shards(self) -> None:
        """All ranks have written the same values to the full parameters: update the shards."""

    def invalidate_full_parameters(self) -> None:
        """The memory of the full parameters, if they have their own, is reused. The next gather fills it again."""

    def refuse_state_dict(self, instead: str) -> None:
        """Raise if the model has only shards. `instead` is advice for the error."""

    def abandon(self) -> None:
        """Forget the collectives in flight after ranks were lost: nothing waits for them any more."""


class RingGathers:
    """The gathers of a model of which every rank keeps only shards."""

    joins_abort_first = True

    def __init__(
        self,
        ring: Ring,
        world: World,
        collectives: Collectives,
        units: Sequence[nn.Module] = (),
        parts: FrozenParts | None = None,
    ) -> None:
        self._make_full = partial(
            FullParameters, ring=ring, world=world, collectives=collectives, units=units, parts=parts
        )
        self._full: FullParameters | None = None
        self.ring = ring
        self.wait = ring.wait
        self.ensure_gathered = ring.ensure_parameters_gathered
        self.raise_if_stale = ring.raise_if_stale
        self.after_writing = ring.after_writing
        self.abandon = ring.abandon

    @property
    def managed(self) -> Mapping[Tensor, Any]:
        return self.ring.unit_of

    def start(self) -> None:
        self.ring.started.clear()  # all ranks have started the same by now

    def refresh_full(self) -> None:
        if self._full is not None:
            self.ring.ensure_root_gathered()
            self._full.gather()

    def enter(self, parameters: Sequence[Tensor], direction: int) -> None:
        for unit in dict.fromkeys(self.ring.unit_of[parameter] for parameter in parameters):
            self.ring.ensure_gathered(unit, direction)
            if direction == BACKWARD:
                self.ring.claim_gradients(unit)

    def stale(self) -> str | None:
        if self._full is None:
            return _ONLY_SHARDS
        return self.ring.unready_reason_of_root() or self._full.stale()

    def after_update(self, trained: Sequence[BucketSync], ahead: bool) -> bool:
        self.ring.after_writing()
        return True  # layers are gathered when they run

    def guards_of(self, module: nn.Module) -> list[Guard]:
        tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor in self.ring.unit_of]
        units = dict.fromkeys(self.ring.unit_of[tensor] for tensor in tensors)
        return [partial(self.ring.unready_reason, unit) for unit in units]

    def make_full_model(self, model: nn.Module, allocate: Allocate) -> nn.Module:
        if self._full is None:
            self._full = self._make_full(model, allocate=allocate)
        return self._full.model

    def update_shards(self) -> None:
        if self._full is not None:
            self._full.update_shards()

    def invalidate_full_parameters(self) -> None:
        if self._full is not None:
            self._full.invalidate()

    def refuse_state_dict(self, instead: str) -> None:
        raise StaleWeights(f"{_ONLY_SHARDS}, {instead}")
