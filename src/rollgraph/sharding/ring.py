"""The ring: a few slots in which units of a model take turns, and what is in each of them now.

Owns which unit a slot holds, at which version, and what is in flight to it or from it. A unit is gathered into its slot
before its forward and again before its backward, with the next one in the direction of travel; its gradients are
reduced out of the slot after each backward. Nothing keeps a unit there, so a graph asks `refusal` before it reads.

All ranks must run the same units in the same order: each starts its collectives as it reaches them. `started` has them
in that order, so that ranks that abort a step at different places can catch up with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rollgraph.distributed.world import World
from rollgraph.sharding.bucket_sync import StaleWeights
from rollgraph.sharding.collectives import Collectives, PendingCollective
from rollgraph.sharding.flat_buffer import Bucket, FlatBuckets
from rollgraph.sharding.frozen_parts import FrozenTensors
from rollgraph.sharding.ring_plan import RingPlan

FORWARD, BACKWARD = 1, -1  # directions of travel through the units
_GATHER, _REDUCE = "gather", "reduce"  # kinds of collectives in `started`


@dataclass(eq=False)
class Slot:
    """Memory for one unit at a time, and for its gradients."""

    index: int
    owner: Unit | None = None  # the unit whose parameters it holds, or will hold when `gathers` are complete
    version: int = 0  # of these parameters
    gathers: list[PendingCollective] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)  # version counters of the owner's parameters since they are there
    gradients_of: Unit | None = None
    arrived: set[Tensor] = field(default_factory=set)  # parameters whose gradients are in it and not reduced
    reductions: list[PendingCollective] = field(default_factory=list)


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together, and frozen tensors that are gathered with them."""

    index: int
    name: str
    slot: Slot
    buckets: Sequence[Bucket]  # those of frozen tensors are last
    parameters: Sequence[Tensor]
    trained: frozenset[Tensor]
    frozen: FrozenTensors
    refresh: Callable[[], object]  # called when the unit has been gathered into its slot
    version: int = 0  # of the shards: it grows whenever they are written

    @property
    def tensors(self) -> list[Tensor]:
        """All that are in the slot."""
        return [*self.parameters, *(tensor for views in self.frozen.values() for tensor in views)]


class Ring:
    """The slots of a model whose parameters are sharded.

    `overlap` says whether the next units are gathered ahead, and whether reductions go on while others are computed.
    `frozen` has the frozen tensors of each unit that takes turns, and `refreshes` what to call when it was gathered.
    """

    def __init__(
        self,
        plan: RingPlan,
        flat: FlatBuckets,
        world: World,
        collectives: Collectives,
        overlap: tuple[bool, bool],
        frozen: Sequence[FrozenTensors] = (),
        refreshes: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._plan = plan
        self._rank = world.rank
        self._collectives = collectives
        self._prefetches, self._overlaps = overlap
        self.slots = [Slot(index) for index in range(plan.slots)]
        self.units: list[Unit] = []
        buckets = iter(flat.buckets)
        frozen_buckets = iter(flat.frozen_buckets)
        for index, unit in enumerate(plan.units):
            own = [next(buckets) for _ in unit.buckets]
            parameters = [parameter for bucket in own for parameter in flat.parameters_of(bucket)]
            trained = frozenset(parameter for parameter in parameters if parameter in flat.grad_buffers)
            own += [next(frozen_buckets) for _ in unit.frozen]
            beside = frozen[index] if index < len(frozen) else {}
            refresh = refreshes[index] if index < len(refreshes) else _do_nothing
            slot = self.slots[unit.slot]
            self.units.append(Unit(index, unit.name, slot, own, parameters, trained, beside, refresh))
        for unit_outside in self.units[plan.turning :]:  # its shard is a part of its slot
            unit_outside.slot.owner = unit_outside
        self.unit_of: dict[Tensor, Unit] = {}
        for each in self.units:
            self.unit_of |= dict.fromkeys(each.tensors, each)
        self.started: list[str] = []  # the collectives of this step
        self.while_waiting: Callable[[], None] = _do_nothing  # may end a wait, see `Collectives.while_waiting`

    @property
    def turning(self) -> Sequence[Unit]:
        """The units that share slots, in the order of a forward."""
        return self.units[: self._plan.turning]

    @property
    def copy_nbytes(self) -> int:
        """Bytes of a full copy of these units."""
        return self._plan.copy_nbytes

    # -- parameters --------------------------------------------------------------------------------

    def ensure(self, unit: Unit, toward: int = 0) -> None:
        """Bring a unit into its slot, and start to gather the next ones in the direction of travel."""
        self._start_gather(unit)
        if toward and self._prefetches and unit.index < self._plan.turning:
            for distance in range(1, self._plan.size):
                following = unit.index + toward * distance
                if 0 <= following < self._plan.turning:
                    self._start_gather(self.units[following])
        self._finish_gathers(unit.slot)

    def ensure_parameters(self, parameters: Iterable[Tensor]) -> None:
        needed = {self.unit_of[parameter].index for parameter in parameters}
        for index in sorted(needed):
            self.ensure(self.units[index])

    def ensure_outside(self) -> None:
        """Bring what is outside of layers into its slot."""
        for unit in self.units[self._plan.turning :]:
            self.ensure(unit)

    def refusal_outside(self) -> str | None:
        """Why what is outside of layers must not be read now; None if it may."""
        for unit in self.units[self._plan.turning :]:
            reason = self.refusal(unit)
            if reason is not None:
                return reason
        return None

    def refusal(self, unit: Unit) -> str | None:
        """Why a unit must not run now; None if it may. As a guard of a graph, no pause switches it off."""
        slot = unit.slot
        if slot.owner is not unit:
            held = "nothing" if slot.owner is None else slot.owner.name
            return f"slot {slot.index} holds {held}, not {unit.name}"
        if slot.version != unit.version:
            return (
                f"slot {slot.index} holds {unit.name} as it was after change {slot.version} of its parameters, "
                f"but there were {unit.version}"
            )
        if slot.gathers:
            return f"slot {slot.index} is still being filled with {unit.name}"
        if _in_backward() and unit.trained and (slot.gradients_of is not unit or slot.reductions):
            held = "none" if slot.gradients_of is None else f"those of {slot.gradients_of.name}"
            return f"the gradients in slot {slot.index} are {held}, and cannot be those of {unit.name} yet"
        return None

    def raise_if_stale(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            reason = self.refusal(self.unit_of[parameter])
            if reason is not None:
                raise StaleWeights(f"{reason}: hooks bring it there, and they are off")

    def wait(self) -> None:
        """Wait for all gathers in flight: shards may be written afterwards."""
        for slot in self.slots:
            self._finish_gathers(slot)
            self._refuse_lost_writes(slot)

    def after_writing(self) -> None:
        """The shards of this rank were written, as those of all other ranks: nothing that was gathered counts."""
        for unit in self.units:
            unit.version += 1
            increment_version(unit.parameters)  # so that the backward of an earlier forward raises, as it should
        for slot in self.slots:
            slot.writes = _count_writes(slot)

    def _start_gather(self, unit: Unit) -> None:
        slot = unit.slot
        if slot.owner is unit and slot.version == unit.version:
            return
        self._finish_gathers(slot)
        self._refuse_lost_writes(slot)
        slot.owner = None
        for number in range(len(unit.buckets)):
            self._gather(unit, number)
        slot.owner = unit
        slot.version = unit.version
        slot.writes = _count_writes(slot)

    def _gather(self, unit: Unit, number: int) -> None:
        """Start the gather of a bucket into the slot of its unit."""
        bucket = unit.buckets[number]
        what = f"the all-gather of {unit.name}"
        unit.slot.gathers.append(self._collectives.gather(bucket.parameters, bucket.shard(self._rank), what))
        self.started.append(f"{_GATHER} {unit.index} {number}")

    def _refuse_lost_writes(self, slot: Slot) -> None:
        """Raise if somebody wrote to parameters in a slot whose contents are about to be replaced."""
        unit = slot.owner
        if slot.index < self._plan.size and unit is not None and _count_writes(slot) != slot.writes:
            slot.owner = None
            raise RuntimeError(
                f"a parameter of {unit.name} was written, and the write is lost, because slot {slot.index} is not "
                "where it is kept: use flat.load()"
            )

    def _finish_gathers(self, slot: Slot) -> None:
        if not slot.gathers:
            return
        try:
            while slot.gathers:
                self._complete(slot.gathers[0])
                slot.gathers.pop(0)
            if slot.owner is not None:
                slot.owner.refresh()
        except BaseException:
            slot.owner = None
            raise

    def _complete(self, pending: PendingCollective) -> None:
        self._collectives.while_waiting = self.while_waiting
        try:
            pending.complete()
        finally:
            self._collectives.while_waiting = _do_nothing

    # -- gradients ---------------------------------------------------------------------------------

    def claim(self, unit: Unit) -> None:
        """Make the gradients in the slot of a unit its own, and zero, for a backward that adds to them.

        Those of a capture are rolled back, so it claims nothing.
        """
        slot = unit.slot
        if (slot.gradients_of is unit and not slot.reductions) or not _in_backward():
            return
        if slot.gradients_of is not None and slot.arrived:
            self._start_reductions(slot.gradients_of)  # some of its parameters got no gradient
        self._finish_reductions(slot)
        for bucket in unit.buckets:
            if bucket.gradients is not None:
                bucket.gradients.zero_()
        slot.gradients_of = unit

    def arrive(self, parameter: Tensor) -> None:
        """A gradient is in the slot: reduce all gradients of its unit if it was the last one."""
        unit = self.unit_of[parameter]
        slot = unit.slot
        if slot.gradients_of is not unit or slot.reductions:
            raise RuntimeError(f"a gradient of {unit.name} was added to slot {slot.index} while that was in use")
        slot.arrived.add(parameter)
        if slot.arrived == unit.trained:
            self._start_reductions(unit)

    def reduce_remaining(self) -> None:
        """Reduce units of which only some parameters got a gradient."""
        for unit in self.units:
            if unit.slot.gradients_of is unit and unit.slot.arrived:
                self._start_reductions(unit)

    def wait_for_reductions(self) -> None:
        for slot in self.slots:
            self._finish_reductions(slot)

    def _start_reductions(self, unit: Unit) -> None:
        slot = unit.slot
        slot.arrived.clear()
        for number, bucket in enumerate(unit.buckets):
            if bucket.gradients is not None:
                self._reduce(unit, number)
        if not self._overlaps:
            self._finish_reductions(slot)

    def _reduce(self, unit: Unit, number: int) -> None:
        """Start the reduction of a bucket's gradients out of the slot of its unit."""
        bucket = unit.buckets[number]
        assert bucket.gradients is not None
        what = f"the reduce-scatter of {unit.name}"
        shard = bucket.gradient_shard(self._rank)
        unit.slot.reductions.append(self._collectives.reduce(bucket.gradients, shard, what, onto=True))
        self.started.append(f"{_REDUCE} {unit.index} {number}")

    def _finish_reductions(self, slot: Slot) -> None:
        while slot.reductions:
            self._complete(slot.reductions[0])
            slot.reductions.pop(0)
            if not slot.reductions:
                slot.gradients_of = None

    # -- aborted steps -----------------------------------------------------------------------------

    def catch_up(self, started: Sequence[str]) -> None:
        """Start the collectives that another rank has started in this step and this one has not.

        What they move is of a step that is dropped, so it does not matter.
        """
        for entry in started[len(self.started) :]:
            kind, index, number = entry.split()
            unit = self.units[int(index)]
            if kind == _GATHER:
                unit.slot.owner = None
                self._gather(unit, int(number))
            else:
                self._reduce(unit, int(number))

    def forget_step(self) -> None:
        """Wait for what is in flight, and forget the gradients of this step. Their memory has to be zeroed next."""
        for slot in self.slots:
            for pending in (*slot.gathers, *slot.reductions):
                pending.wait()
        self.abandon()

    def abandon(self) -> None:
        """Forget what is in flight, without a wait, and what is in the slots of layers."""
        for slot in self.slots:
            if slot.gathers or slot.index < self._plan.size:
                slot.owner = None
            slot.gathers.clear()
            slot.reductions.clear()
            slot.arrived.clear()
            slot.gradients_of = None
        self.started.clear()


def _count_writes(slot: Slot) -> list[int]:
    return [] if slot.owner is None else [tensor._version for tensor in slot.owner.tensors]


def _in_backward() -> bool:
    """Whether autograd runs a backward now. Around a capture, which runs one by itself, it does not."""
    return torch._C._current_graph_task_id() != -1


def _do_nothing() -> None:
    pass
