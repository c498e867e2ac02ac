"""One bucket between the ranks: its all-gather, its reduce-scatter, and the optimizer step that its parameters reflect.

Owns the versions and the collectives in flight. Does not decide when they start: `parameter_gathers.py` and
`gradient_reductions.py` do.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.sharding.collectives import Collectives, CommunicationError, PendingCollective
from rollgraph.sharding.flat_buffer import Bucket


class StaleWeights(RuntimeError):
    """Parameters were about to be read that have not been gathered since the last optimizer step."""


class BucketSync:
    """The communication of one bucket."""

    def __init__(
        self, index: int, bucket: Bucket, parameters: Sequence[Tensor], world: World, collectives: Collectives
    ) -> None:
        self.index = index
        self.bucket = bucket
        self.parameters = parameters
        self._world = world
        self._collectives = collectives
        self.version = 0  # the optimizer step of the full parameters
        self.shard_version = 0  # the optimizer step of this rank's shard
        self._gather: PendingCollective | None = None
        self._writes_at_start: list[int] = []  # version counters of the parameters when the gather started
        self._reduction: PendingCollective | None = None
        self.reduction_started = False  # since the last reset_reduction()
        self._reduced = False

    @property
    def name(self) -> str:
        slots = self.bucket.plan.slots
        first = slots[-1].parameter.name
        last = slots[0].parameter.name
        if first == last:
            return f"bucket {self.index} ({first})"
        return f"bucket {self.index} ({first} to {last})"

    # -- parameters --------------------------------------------------------------------------------

    @property
    def stale(self) -> str | None:
        """Why the full parameters must not be read now; None if they may."""
        if self.version == self.shard_version:
            return None
        return f"{self.name} holds the parameters of step {self.version}, the model is at step {self.shard_version}"

    def after_update(self) -> None:
        """The optimizer has written this rank's shard. No gather may have been in flight."""
        assert self._gather is None, "a gather in flight would overwrite what the optimizer wrote"
        self.shard_version += 1
        if self._world.size == 1:
            self.version = self.shard_version

    def start_gather(self) -> None:
        if self.version != self.shard_version and self._gather is None:
            shard = self.bucket.shard(self._world.rank)
            self._writes_at_start = self._count_writes()
            self._gather = self._collectives.gather(self.bucket.parameters, shard, f"the all-gather of {self.name}")

    def wait_for_gather(self) -> None:
        """Call this before the full parameters are read or written."""
        if self._gather is None:
            return
        pending = self._gather
        self._gather = None
        pending.complete()
        self.version = self.shard_version
        if self._count_writes() != self._writes_at_start:
            raise RuntimeError(
                f"a parameter of {self.name} was written while it was gathered, and the write is lost: "
                "call gather() before you write to parameters"
            )

    def _count_writes(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    # -- gradients ---------------------------------------------------------------------------------

    def start_reduction(self) -> None:
        assert self.bucket.gradients is not None
        if not self.reduction_started:
            shard = self.bucket.gradient_shard(self._world.rank)
            what = f"the reduce-scatter of {self.name}"
            self._reduction = self._collectives.reduce(self.bucket.gradients, shard, what)
            self.reduction_started = True

    def wait_for_reduction(self) -> None:
        """Call this before the gradients are read or written."""
        if self._reduction is not None:
            pending = self._reduction
            self._reduction = None
            pending.complete()
            self._reduced = True
        if self.reduction_started and not self._reduced:
            raise CommunicationError(f"the reduce-scatter of {self.name} failed earlier: call drop_gradients() first")

    def discard_reduction(self) -> None:
        """Wait for the reduction in flight and ignore its result."""
        if self._reduction is not None:
            pending = self._reduction
            self._reduction = None
            pending.wait()

    def abandon(self) -> None:
        """Forget what is in flight, whose process group is gone. What is in the parameters has to be loaded anew."""
        self._gather = None
        self._reduction = None
        self.version = self.shard_version

    def reset_reduction(self) -> None:
        """The reduced gradients were used or dropped; new ones may arrive."""
        assert self._reduction is None, "a reduction in flight reads the gradients"
        self.reduction_started = False
        self._reduced = False
