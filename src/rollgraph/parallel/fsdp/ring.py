"""The ring of slots into which layers are gathered, and the reduction of their gradients.

Owns the unit and version that each slot holds, and the collectives in flight to and from it. A layer is gathered into
its slot before its forward and again before its backward, and the next layers in that direction are prefetched. Its
gradients are reduced from the slot after each backward. Nothing keeps a layer in its slot, so a graph checks
`unready_reason` before it runs.

All ranks must run the same layers in the same order, because each rank starts collectives as it reaches a layer.
`started` has the collectives of this step in order, so that ranks that abort it at different places can catch up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rollgraph.parallel.data.collectives import Collectives, PendingCollective
from rollgraph.parallel.data.flat_buffer import Bucket, FlatBuckets
from rollgraph.parallel.data.gathers import ParameterGathers, StaleWeights
from rollgraph.parallel.data.reductions import GradientReductions
from rollgraph.parallel.data.together import StepAborts
from rollgraph.parallel.fsdp.layout import FrozenTensors, RingPlan
from rollgraph.parallel.ranks.world import World

# -- the ring --------------------------------------------------------------------------------------

FORWARD, BACKWARD = 1, -1  # the direction in which layers are prefetched
_GATHER, _REDUCE = "gather", "reduce"  # kinds of collectives in `started`


@dataclass(eq=False)
class Slot:
    """Memory for the full parameters of one unit at a time, and for its gradients."""

    index: int
    owner: Unit | None = None  # the unit whose parameters it holds, or will hold when `gathers` are complete
    version: int = 0  # of the owner's shards when they were gathered
    gathers: list[PendingCollective] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)  # version counters of the owner's tensors after the gather
    gradients_of: Unit | None = None
    arrived: set[Tensor] = field(default_factory=set)  # parameters whose gradients are in the slot and not reduced
    reductions: list[PendingCollective] = field(default_factory=list)


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together, and frozen tensors that are gathered with them.

    A unit is a layer, or the root: the parameters outside of layers.
    """

    index: int
    name: str
    slot: Slot
    buckets: Sequence[Bucket]  # of the parameters, then of the frozen tensors
    parameters: Sequence[Tensor]
    trained: frozenset[Tensor]
    frozen: FrozenTensors
    refresh: Callable[[], object]  # called when the unit has been gathered into its slot
    version: int = 0  # of the shards: increases whenever they are written

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the slot."""
        return [*self.parameters, *(tensor for views in self.frozen.values() for tensor in views)]


class Ring:
    """The slots of a model whose parameters are sharded.

    `overlap` says whether to prefetch the next layers, and whether reductions overlap with the computation of others.
    `frozen` has the frozen tensors of each layer, and `refreshes` the functions to call when a layer has been gathered.
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
        self._prefetch, self._overlap_reductions = overlap
        self.slots = [Slot(index) for index in range(plan.num_slots)]
        self.units: list[Unit] = []
        buckets = iter(flat.buckets)
        frozen_buckets = iter(flat.frozen_buckets)
        for index, unit_plan in enumerate(plan.units):
            unit_buckets = [next(buckets) for _ in unit_plan.buckets]
            parameters = [parameter for bucket in unit_buckets for parameter in flat.parameters_of(bucket)]
            trained = frozenset(parameter for parameter in parameters if parameter in flat.grad_buffers)
            unit_buckets += [next(frozen_buckets) for _ in unit_plan.frozen]
            frozen_tensors = frozen[index] if index < len(frozen) else {}
            refresh = refreshes[index] if index < len(refreshes) else _do_nothing
            slot = self.slots[unit_plan.slot]
            self.units.append(
                Unit(index, unit_plan.name, slot, unit_buckets, parameters, trained, frozen_tensors, refresh)
            )
        for root in self.units[plan.num_layers :]:  # its shard is a part of its slot
            root.slot.owner = root
        self.unit_of: dict[Tensor, Unit] = {}
        for unit in self.units:
            self.unit_of |= dict.fromkeys(unit.tensors, unit)
        self.started: list[str] = []  # the collectives of this step
        self.while_waiting: Callable[[], None] = _do_nothing  # may raise to end a wait, see `Collectives.while_waiting`

    @property
    def layers(self) -> Sequence[Unit]:
        """The units that share slots, in the order of a forward: all but the root."""
        return self.units[: self._plan.num_layers]

    @property
    def full_nbytes(self) -> int:
        """Bytes of all layers, unsharded."""
        return self._plan.full_nbytes

    # -- parameters --------------------------------------------------------------------------------

    def ensure_gathered(self, unit: Unit, direction: int = 0) -> None:
        """Gather a unit into its slot, and prefetch the next layers if there is a `direction`."""
        self._start_gather(unit)
        if direction and self._prefetch and unit.index < self._plan.num_layers:
            for distance in range(1, self._plan.layer_slots):
                following = unit.index + direction * distance
                if 0 <= following < self._plan.num_layers:
                    self._start_gather(self.units[following])
        self._finish_gathers(unit.slot)

    def ensure_parameters_gathered(self, parameters: Iterable[Tensor]) -> None:
        needed = {self.unit_of[parameter].index for parameter in parameters}
        for index in sorted(needed):
            self.ensure_gathered(self.units[index])

    def ensure_root_gathered(self) -> None:
        """Gather the parameters outside of layers into their slot."""
        for unit in self.units[self._plan.num_layers :]:
            self.ensure_gathered(unit)

    def unready_reason_of_root(self) -> str | None:
        """Why the parameters outside of layers must not be read now; None if they may."""
        for unit in self.units[self._plan.num_layers :]:
            reason = self.unready_reason(unit)
            if reason is not None:
                return reason
        return None

    def unready_reason(self, unit: Unit) -> str | None:
        """Why a unit must not run now; None if it may. As a guard of graphs, it also works while hooks are paused."""
        slot = unit.slot
        if slot.owner is not unit:
            owner = "nothing" if slot.owner is None else slot.owner.name
            return f"slot {slot.index} holds {owner}, not {unit.name}"
        if slot.version != unit.version:
            return (
                f"slot {slot.index} holds {unit.name} of version {slot.version}, but the shards have version "
                f"{unit.version}"
            )
        if slot.gathers:
            return f"slot {slot.index} is still being filled with {unit.name}"
        if _in_backward() and unit.trained and (slot.gradients_of is not unit or slot.reductions):
            current = "none" if slot.gradients_of is None else f"those of {slot.gradients_of.name}"
            return f"the gradients in slot {slot.index} are {current}, and cannot be those of {unit.name} yet"
        return None

    def raise_if_stale(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            reason = self.unready_reason(self.unit_of[parameter])
            if reason is not None:
                raise StaleWeights(f"{reason}: hooks gather it, and they are off")

    def wait(self) -> None:
        """Wait for all gathers in flight. Shards may be written afterwards."""
        for slot in self.slots:
            self._finish_gathers(slot)
            self._raise_if_write_lost(slot)

    def after_writing(self) -> None:
        """The shards of all ranks were written: everything that was gathered before is stale."""
        for unit in self.units:
            unit.version += 1
            increment_version(unit.parameters)  # the backward of an earlier forward must raise
        for slot in self.slots:
            slot.writes = _count_writes(slot)

    def _start_gather(self, unit: Unit) -> None:
        slot = unit.slot
        if slot.owner is unit and slot.version == unit.version:
            return
        self._finish_gathers(slot)
        self._raise_if_write_lost(slot)
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

    def _raise_if_write_lost(self, slot: Slot) -> None:
        """Raise if parameters were written in a slot that is about to be overwritten."""
        unit = slot.owner
        if slot.index < self._plan.layer_slots and unit is not None and _count_writes(slot) != slot.writes:
            slot.owner = None
            raise RuntimeError(
                f"a parameter of {unit.name} was written, and the write is lost, because slot {slot.index} is only a "
                "copy of the shards: use flat.load()"
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

    def claim_gradients(self, unit: Unit) -> None:
        """Make the slot's gradient memory this unit's and zero it, for a backward that adds to it.

        Gradients that are still in the slot are reduced first, whether they are another unit's or this unit's from an
        earlier microbatch. Around a capture, autograd is not in a backward yet, and nothing is claimed, because the
        capture rolls its gradients back.
        """
        slot = unit.slot
        is_claimed = slot.gradients_of is unit and not slot.reductions
        if is_claimed or not _in_backward():
            return
        if slot.gradients_of is not None and slot.arrived:
            self._start_reductions(slot.gradients_of)  # overdue: some parameters of that unit got no gradient
        self._finish_reductions(slot)
        for bucket in unit.buckets:
            if bucket.gradients is not None:
                bucket.gradients.zero_()
        slot.gradients_of = unit

    def mark_arrived(self, parameter: Tensor) -> None:
        """A gradient is in the slot. If it is the last one of its unit, start the reduction."""
        unit = self.unit_of[parameter]
        slot = unit.slot
        if slot.gradients_of is not unit or slot.reductions:
            raise RuntimeError(f"a gradient of {unit.name} was added to slot {slot.index} while the slot was in use")
        slot.arrived.add(parameter)
        if slot.arrived == unit.trained:
            self._start_reductions(unit)

    def reduce_remaining(self) -> None:
        """Reduce the units in which only some parameters got a gradient."""
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
        if not self._overlap_reductions:
            self._finish_reductions(slot)

    def _reduce(self, unit: Unit, number: int) -> None:
        """Start the reduction of a bucket's gradients from the slot of its unit to the shard."""
        bucket = unit.buckets[number]
        assert bucket.gradients is not None
        what = f"the reduce-scatter of {unit.name}"
        shard = bucket.gradient_shard(self._rank)
        unit.slot.reductions.append(self._collectives.reduce(bucket.gradients, shard, what, accumulate=True))
        self.started.append(f"{_REDUCE} {unit.index} {number}")

    def _finish_reductions(self, slot: Slot) -> None:
        while slot.reductions:
            self._complete(slot.reductions[0])
            slot.reductions.pop(0)
            if not slot.reductions:
                slot.gradients_of = None

    # -- aborted steps -----------------------------------------------------------------------------

    def catch_up(self, started: Sequence[str]) -> None:
        """Start the collectives of this step that another rank has started and this one has not.

        The step is dropped, so their contents do not matter.
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
        """Wait for collectives in flight, and forget the gradients of this step. Zero their memory next."""
        for slot in self.slots:
            for pending in (*slot.gathers, *slot.reductions):
                pending.wait()
        self.abandon()

    def abandon(self) -> None:
        """Forget the collectives in flight, without waiting, and the contents of the layers' slots."""
        for slot in self.slots:
            if slot.gathers or slot.index < self._plan.layer_slots:
                slot.owner = None
            slot.gathers.clear()
            slot.reductions.clear()
            slot.arrived.clear()
            slot.gradients_of = None
        self.started.clear()


def _count_writes(slot: Slot) -> list[int]:
    return [] if slot.owner is None else [tensor._version for tensor in slot.owner.tensors]


def _in_backward() -> bool:
    """Whether autograd is running a backward; False around a capture, which runs one by itself."""
    return torch._C._current_graph_task_id() != -1


def _do_nothing() -> None:
    pass


# -- gradient reductions with a ring ---------------------------------------------------------------
# Owns the gradients of the current optimizer step, as `parallel/data/reductions.py` does for replicated parameters.
# Each microbatch is reduced into this rank's gradient shards, which accumulate, so `no_sync` makes no difference.


class RingReductions(GradientReductions):
    """The gradients of the current optimizer step, reduced from the slots of a ring."""

    def __init__(
        self, flat: FlatBuckets, ring: Ring, world: World, collectives: Collectives, aborts: StepAborts | None
    ) -> None:
        super().__init__(flat, [], ParameterGathers([]), world, collectives, overlap=True, aborts=aborts)
        self._ring = ring
        ring.while_waiting = self._end_wait_if_aborted

    def _end_wait_if_aborted(self) -> None:
        """A rank that aborted starts nothing that this rank waits for until this rank has aborted, too."""
        if self._aborts is not None and not self._joining_abort:
            self._aborts.raise_if_aborted()

    def _prepare_to_add(self, parameter: Tensor) -> None:
        self._ring.claim_gradients(self._ring.unit_of[parameter])

    def mark_arrived(self, parameter: Tensor) -> None:
        self.raise_if_lent()
        self._unfinished = True
        self._ring.mark_arrived(parameter)

    def _collect_missed(self) -> None:
        for parameter in self._flat.grad_buffers:
            if parameter.grad is not None:
                unit = self._ring.unit_of[parameter].name
                raise RuntimeError(
                    f"a gradient of {unit} was computed while hooks were paused, so it was not reduced with the others "
                    "of its layer: gradients.drop(), and run backward with the hooks on"
                )

    def _reduce_remaining(self) -> None:
        self._ring.reduce_remaining()

    def wait(self) -> None:
        self._ring.wait_for_reductions()

    def _reset(self) -> None:
        super()._reset()
        self._ring.started.clear()

    def _describe_started(self) -> str:
        return "\n".join(self._ring.started)

    def _catch_up(self, aborts: StepAborts) -> None:
        aborts.wait_until_all_aborted()
        started = [text.splitlines() for text in aborts.read_started()]
        self._ring.catch_up(max(started, key=len))

    def _forget(self) -> None:
        self._ring.forget_step()
        super()._forget()

    def shards(self) -> list[Tensor]:
        self.join_abort()
        self.raise_if_lent()
        rank = self._world.rank
        return [bucket.gradient_shard(rank) for bucket in self._flat.buckets if bucket.gradients is not None]
