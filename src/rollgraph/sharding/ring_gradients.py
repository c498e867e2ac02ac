"""When gradients are reduced whose parameters lie in a ring: those of each layer after each of its backwards.

Owns the gradients of the current optimizer step, as `gradient_reductions.py` does for parameters that stay whole. The
sums grow in this rank's shards from microbatch to microbatch, and `no_sync` makes no difference.
"""

from __future__ import annotations

from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.sharding.collectives import Collectives
from rollgraph.sharding.flat_buffer import FlatBuckets
from rollgraph.sharding.gradient_reductions import GradientReductions
from rollgraph.sharding.parameter_gathers import ParameterGathers
from rollgraph.sharding.ring import Ring
from rollgraph.sharding.step_abort import StepAborts


class RingReductions(GradientReductions):
    """The gradients of one optimizer step after another, in the slots of a ring."""

    def __init__(
        self, flat: FlatBuckets, ring: Ring, world: World, collectives: Collectives, aborts: StepAborts | None
    ) -> None:
        super().__init__(flat, [], ParameterGathers([]), world, collectives, overlap=True, aborts=aborts)
        self._ring = ring
        ring.while_waiting = self._end_wait_if_aborted

    def _end_wait_if_aborted(self) -> None:
        """A rank that aborted does not start what this one waits for before this one has aborted, too."""
        if self._aborts is not None and not self._joining_abort:
            self._aborts.raise_if_aborted()

    def _admit(self, parameter: Tensor) -> None:
        self._ring.claim(self._ring.unit_of[parameter])

    def arrive(self, parameter: Tensor) -> None:
        self.raise_if_lent()
        self._unfinished = True
        self._ring.arrive(parameter)

    def _collect_missed(self) -> None:
        for parameter in self._flat.grad_buffers:
            if parameter.grad is not None:
                unit = self._ring.unit_of[parameter].name
                raise RuntimeError(
                    f"a gradient of {unit} was computed while hooks were paused, so it was not reduced with the others "
                    "of its layer: drop_gradients(), and run backward with the hooks on"
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
        found = [text.splitlines() for text in aborts.read_started()]
        self._ring.catch_up(max(found, key=len))

    def _forget(self) -> None:
        self._ring.forget_step()
        super()._forget()

    def shards(self) -> list[Tensor]:
        self.join_abort()
        self.raise_if_lent()
        rank = self._world.rank
        return [bucket.gradient_shard(rank) for bucket in self._flat.buckets if bucket.gradients is not None]
