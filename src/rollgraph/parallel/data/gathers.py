"""All-gathers of replicated parameters: the state of each bucket, and when it is gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rollgraph.graph.hooks import Guard
from rollgraph.parallel.data.collectives import Collectives, CommunicationError, PendingCollective
from rollgraph.parallel.data.flat_buffer import Bucket
from rollgraph.parallel.ranks.world import World

# -- the collectives of one bucket -----------------------------------------------------------------
# Owns the versions and the collectives in flight. `ParameterGathers` and `reductions.py` decide when they start.


class StaleWeights(RuntimeError):
    """Parameters were about to be read, but were not gathered since the last optimizer step."""


class BucketSync:
    """The gathers and reductions of one bucket."""

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
        """The optimizer has written this rank's shard. No gather may be in flight."""
        assert self._gather is None, "a gather in flight would overwrite the optimizer's update"
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
            raise CommunicationError(f"the reduce-scatter of {self.name} failed earlier: call gradients.drop() first")

    def discard_reduction(self) -> None:
        """Wait for the reduction in flight and ignore its result."""
        if self._reduction is not None:
            pending = self._reduction
            self._reduction = None
            pending.wait()

    def abandon(self) -> None:
        """Forget collectives in flight, whose process group is gone. The parameters have to be loaded again."""
        self._gather = None
        self._reduction = None
        self.version = self.shard_version

    def reset_reduction(self) -> None:
        """The reduced gradients were used or dropped; new ones may arrive."""
        assert self._reduction is None, "a reduction in flight reads the gradients"
        self.reduction_started = False
        self._reduced = False


# -- when buckets are gathered ---------------------------------------------------------------------
# All ranks start their gathers in the same order, whichever module needs one first.

_PREFETCH = 2  # how many buckets to gather ahead


class ParameterGathers:
    """The gathers of all buckets. `buckets` is in the order of a backward.

    The model itself has the full parameters, so the methods of `Gathers` that are about others do nothing.
    """

    joins_abort_first = False

    def __init__(self, buckets: Sequence[BucketSync]) -> None:
        self._buckets = buckets
        self._forward_order = buckets[::-1]
        self.bucket_of: dict[Tensor, BucketSync] = {}
        for bucket in buckets:
            self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)

    @property
    def managed(self) -> Mapping[Tensor, Any]:
        return self.bucket_of

    def start(self) -> None:
        """Start the gathers of all stale buckets."""
        for bucket in self._forward_order:
            bucket.start_gather()

    def wait(self) -> None:
        """Wait for all gathers in flight."""
        for bucket in self._forward_order:
            bucket.wait_for_gather()

    def ensure_gathered(self, parameters: Sequence[Tensor]) -> None:
        """Wait for the buckets of these parameters, and start the gathers that a forward needs next."""
        if not parameters:
            return
        needed = {self.bucket_of[parameter].index for parameter in parameters}
        last = min(needed) - _PREFETCH
        for bucket in self._forward_order:
            if bucket.index >= last:
                bucket.start_gather()
        for index in needed:
            self._buckets[index].wait_for_gather()

    def enter(self, parameters: Sequence[Tensor], direction: int) -> None:
        self.ensure_gathered(parameters)

    def after_update(self, trained: Sequence[BucketSync], ahead: bool) -> bool:
        """The optimizer has written the shards of these buckets. If `ahead`, start the first gathers of a forward."""
        for bucket in trained:
            bucket.after_update()
            increment_version(bucket.parameters)  # the backward of an earlier forward must raise
        if ahead:
            for bucket in self._forward_order[:_PREFETCH]:
                bucket.start_gather()
        return ahead

    def stale(self) -> str | None:
        """Why the parameters must not be read now; None if they may."""
        for bucket in self._buckets:
            reason = bucket.stale
            if reason is not None:
                return reason
        return None

    def raise_if_stale(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            reason = self.bucket_of[parameter].stale
            if reason is not None:
                raise StaleWeights(f"{reason}: call gather() first")

    def guards_of(self, module: nn.Module) -> list[Guard]:
        return []

    def abandon(self) -> None:
        """Forget the collectives in flight, without waiting for them."""
        for bucket in self._buckets:
            bucket.abandon()

    # -- full parameters: those of the model itself ------------------------------------------------

    def make_full_model(self, model: nn.Module, allocate: Callable[..., Tensor]) -> nn.Module:
        return model

    def refresh_full(self) -> None:
        pass

    def after_writing(self) -> None:
        pass

    def update_shards(self) -> None:
        pass

    def invalidate_full_parameters(self) -> None:
        pass

    def refuse_state_dict(self, instead: str) -> None:
        pass
