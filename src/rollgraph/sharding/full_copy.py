"""A full copy of a model whose parameters are sharded, for what reads all of them at once: generation and scoring.

Owns the memory of the copy and which version of the shards is in it. The copy is a model of its own, whose layers are
views of that memory; what is outside of layers, and every buffer that is not sharded, it has in common with the trained
model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.distributed.world import World
from rollgraph.sharding.collectives import Collectives
from rollgraph.sharding.flat_buffer import Bucket
from rollgraph.sharding.frozen_parts import FrozenParts, views_of
from rollgraph.sharding.ring import Ring, Unit

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class FullCopy:
    """The copy, which is empty until the first `gather`. `units` are the modules of the units that take turns."""

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
        self._versions: dict[Unit, int] = {}  # of the units that are in the copy
        replaced: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        for unit in ring.turning:
            parameters = iter(unit.parameters)
            self._memory[unit] = [_allocate(allocate, bucket, ring) for bucket in unit.buckets]
            for bucket, memory in zip(unit.buckets, self._memory[unit], strict=True):
                for slot in bucket.plan.slots:
                    view = memory.narrow(0, slot.start, slot.numel).view(slot.parameter.shape)
                    frozen = unit.frozen.get(slot.parameter.name)
                    if frozen is None:
                        replaced[id(next(parameters))] = nn.Parameter(view, requires_grad=False)
                    else:
                        replaced |= zip(map(id, frozen), views_of(view, frozen), strict=True)
        self.model = copy.deepcopy(model, replaced)
        self._refreshes: dict[Unit, Callable[[], object]] = {}  # to be called when a unit has been gathered
        if parts is not None:
            copied = (replaced[id(module)] for module in units)
            self._refreshes = dict(zip(ring.turning, map(parts.refresh, copied), strict=True))

    def gather(self) -> None:
        """Bring the copy up to date with the shards of all ranks."""
        pending = []
        stale = [unit for unit in self._memory if self._versions.get(unit) != unit.version]
        for unit in stale:
            self._versions.pop(unit, None)
            for bucket, memory in zip(unit.buckets, self._memory[unit], strict=True):
                what = f"the all-gather of {unit.name} for the full copy"
                pending.append(self._collectives.gather(memory, bucket.shard(self._rank), what))
        for collective in pending:
            collective.complete()
        self._hold(stale)

    def _hold(self, units: Iterable[Unit]) -> None:
        """These units are in the copy now."""
        for unit in units:
            if unit in self._refreshes:
                self._refreshes[unit]()
            self._versions[unit] = unit.version

    def keep(self) -> None:
        """Take the shards of this rank from the copy, which was written on all ranks alike."""
        for unit, memory in self._memory.items():
            for bucket, full in zip(unit.buckets, memory, strict=True):
                shard = bucket.shard(self._rank)
                shard.copy_(full.narrow(0, self._rank * len(shard), len(shard)))
        self._ring.after_writing()
        self._hold(self._memory)

    def forget(self) -> None:
        """Something else uses the memory of the copy: what is in it does not count any more."""
        self._versions.clear()

    def stale(self) -> str | None:
        """Why the copy must not be read now; None if it may."""
        for unit in self._memory:
            found = self._versions.get(unit)
            if found is None:
                return f"the full copy does not hold {unit.name}: gather() it first"
            if found != unit.version:
                return (
                    f"the full copy holds {unit.name} as it was after change {found} of its parameters, but there were "
                    f"{unit.version}"
                )
        return None


def _allocate(allocate: Allocate, bucket: Bucket, ring: Ring) -> Tensor:
    try:
        return allocate((bucket.plan.numel,), bucket.plan.dtype, bucket.parameters.device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"there is no memory for a full copy of all layers ({ring.copy_nbytes / 2**30:.1f} GiB), which generation "
            "and scoring read: divide each layer among ranks (tensor_parallel), or take more memory from somewhere else"
        ) from error
