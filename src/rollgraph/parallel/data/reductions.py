"""Gradient reductions: each bucket is reduced as soon as its last gradient has arrived, in one order on all ranks.

Owns the gradients of the current optimizer step, from their arrival until the optimizer has used them or the step is
aborted. Before its first reduction, a rank starts all gathers that it has not needed, so that all ranks start the same
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import CHUNK
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.data.flat_buffer import FlatBuckets
from rollgraph.parallel.data.gathers import BucketSync, ParameterGathers
from rollgraph.parallel.data.together import StepAborted, StepAborts
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers


class GradientReductions:
    """The gradients of the current optimizer step. `buckets` are those with trained parameters."""

    def __init__(
        self,
        flat: FlatBuckets,
        buckets: Sequence[BucketSync],
        gathers: ParameterGathers,
        world: World,
        collectives: Collectives,
        *,
        overlap: bool,
        aborts: StepAborts | None,
        tensor: TensorPeers | None = None,
    ) -> None:
        self._flat = flat
        self.buckets = buckets
        self._gathers = gathers
        self._world = world
        self._collectives = collectives
        self._overlap = overlap
        self._aborts = aborts  # None with a single rank
        self._tensor = tensor  # the tensor parallel group
        self._members = {bucket.index: set(bucket.parameters) for bucket in buckets}
        self._arrived: set[Tensor] = set()
        self._synchronize = True
        self._joining_abort = False
        self._unfinished = False  # whether there are gradients that finish() has not reduced
        self._finished = False  # whether the gradients are reduced and wait for the optimizer
        self._lent = False  # whether their memory is lent for another use

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated, but not reduced."""
        before = self._synchronize
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = before

    # -- arrival -----------------------------------------------------------------------------------

    def accumulate(self, parameter: Tensor) -> None:
        """Autograd has left a gradient in `parameter.grad`: move it to the flat buffer."""
        if self._move_to_buffer(parameter):
            self.mark_arrived(parameter)

    def _move_to_buffer(self, parameter: Tensor) -> bool:
        buffer = self._flat.grad_buffers.get(parameter)
        if parameter.grad is None or buffer is None:  # finish() refuses a parameter that has no buffer
            return False
        self.join_abort()
        self.raise_if_lent()
        self._prepare_to_add(parameter)
        buffer.add_(parameter.grad)
        parameter.grad = None
        return True

    def mark_arrived(self, parameter: Tensor) -> None:
        """A gradient is in the flat buffer. If it is the last one of its bucket, start the reduction."""
        self.raise_if_lent()
        self._prepare_to_add(parameter)
        self._unfinished = True
        if not self._synchronize:
            return
        self._arrived.add(parameter)
        if self._overlap:
            self._reduce_complete_buckets()

    def expect_all(self) -> None:
        """Call this before a graph of a whole step adds gradients of all parameters to the flat buffer.

        It replaces the calls of `mark_arrived`.
        """
        self.join_abort()
        self.raise_if_lent()
        self._unfinished = True

    def _reduce_complete_buckets(self) -> None:
        """Start reductions in bucket order: all ranks must start their collectives in the same order."""
        for bucket in self.buckets:
            if not bucket.reduction_started:
                if not self._members[bucket.index] <= self._arrived:
                    return
                self._gathers.start()  # of buckets that this rank has not read
                self._start_reduction(bucket)

    def _start_reduction(self, bucket: BucketSync) -> None:
        if self._aborts is not None:
            self._aborts.announce_reduction()
        bucket.start_reduction()

    def _prepare_to_add(self, parameter: Tensor) -> None:
        """Before a gradient is added to the buffer: raise if that is too late."""
        bucket = self._gathers.bucket_of[parameter]
        if bucket.reduction_started:
            raise RuntimeError(
                f"a gradient of {bucket.name} arrived after its reduction had started: run all microbatches but the "
                "last inside gradients.no_sync(), then call gradients.finish() and the optimizer's step"
            )

    # -- the end of a step -------------------------------------------------------------------------

    def finish(self, *, tokens: Tensor | None = None, average: bool = True) -> None:
        """Reduce the remaining gradients, wait, and average over ranks or, if given, over the `tokens` of all ranks.

        Without `average` the gradients stay sums, for a loss whose weights add up over all ranks.
        """
        self.join_abort()
        self.raise_if_lent()
        if self._finished:
            raise RuntimeError("the gradients are finished already: call the optimizer's step or gradients.drop() next")
        self._flat.check_memory()
        self._check_all_known()
        self._collect_missed()
        try:
            self._reduce_remaining()
            self.wait()
            if self._aborts is not None:
                self._aborts.agree_to_finish()
        except StepAborted:
            self.drop()
            raise
        if average:
            count = self._world.size if tokens is None else self._collectives.sum(tokens)
            for shard in self.shards():
                shard.div_(count)
        self._unfinished = False
        self._finished = True

    def _reduce_remaining(self) -> None:
        """Start the reductions of this step that have not started yet."""
        self._gathers.start()
        for bucket in self.buckets:
            self._start_reduction(bucket)

    def wait(self) -> None:
        """Wait for all reductions in flight."""
        for bucket in self.buckets:
            bucket.wait_for_reduction()

    def raise_if_unfinished(self) -> None:
        """Raise if there are gradients that were not reduced: a step with them would make the ranks diverge."""
        self.join_abort()
        self.raise_if_lent()
        if self._unfinished or any(parameter.grad is not None for parameter in self._flat.grad_buffers):
            raise RuntimeError(
                "there are gradients that were not reduced over the ranks: call gradients.finish() first"
            )

    def before_zeroing(self) -> None:
        self.join_abort()
        self.wait()
        if self._finished:  # the optimizer has used them
            self._reset()
            if self._aborts is not None:
                self._aborts.next_step()

    def _collect_missed(self) -> None:
        """Add gradients that no hook has moved: of a backward in a pause, or of a parameter that was unfrozen since."""
        for parameter in self._flat.grad_buffers:
            if self._move_to_buffer(parameter):
                self._unfinished = True
                if self._synchronize:
                    self._arrived.add(parameter)

    def _check_all_known(self) -> None:
        """Raise if a parameter was added or unfrozen later: it has no gradient buffer, and the ranks would diverge."""
        known = self._flat.grad_buffers
        unknown = [name for name, p in self._flat.model.named_parameters() if p.requires_grad and p not in known]
        if unknown:
            raise RuntimeError(
                f"{', '.join(unknown[:3])} requires grad but did not when the ShardedModel was created, so its "
                "gradient would stay on this rank: create the ShardedModel after the model is final"
            )

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset_reduction()
        self._arrived.clear()
        self._unfinished = False
        self._finished = False

    # -- aborted steps -----------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        """Whether this rank aborted a step that not all others have aborted yet."""
        return self._aborts is not None and self._aborts.aborted

    def drop(self) -> None:
        """Drop the gradients of a step that will not be finished, for example after an exception.

        This does not wait for other ranks. The next collective of this rank waits until all ranks have dropped the same
        step (`join_abort`); ranks that call `finish()` instead raise `StepAborted`. A second call before anything else
        refers to the same step.
        """
        for parameter in self._flat.grad_buffers:
            parameter.grad = None
        if self._aborts is None:
            self._forget()
        else:
            self._aborts.abort(self._describe_started())

    def _describe_started(self) -> str:
        """The collectives started in this step, if their order depends on what this rank has run."""
        return ""

    def join_abort(self) -> None:
        """If this rank aborted a step: join collectives that others may wait for, until all ranks have aborted it."""
        if self._aborts is None or not self._aborts.aborted or self._joining_abort:
            return
        self._joining_abort = True
        try:
            self._catch_up(self._aborts)
            self._forget()
            self._aborts.next_step()
        finally:
            self._joining_abort = False

    def _catch_up(self, aborts: StepAborts) -> None:
        """Start the collectives that other ranks have started, until all ranks have aborted the step."""
        self._gathers.start()
        aborts.wait_until_all_reached()
        for bucket in self.buckets:
            bucket.start_reduction()
        aborts.wait_until_all_aborted()

    def rejoin(self, make_aborts: Callable[[], StepAborts | None]) -> None:
        """Drop the gradients and the aborts of this step, and agree with the ranks of the next attempt."""
        self._aborts = None
        for parameter in self._flat.grad_buffers:
            parameter.grad = None
        self._forget()
        self._aborts = make_aborts()

    def _forget(self) -> None:
        for bucket in self.buckets:
            bucket.discard_reduction()
        self._reset()
        if not self._lent:  # otherwise `take_back` zeroes them
            self._flat.zero_gradients()

    # -- lending their memory ----------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether the flat buffer has gradients that the optimizer has not used, or a reduction is in flight."""
        started = any(bucket.reduction_started for bucket in self.buckets)
        return self._unfinished or self._finished or started or self.aborted

    def lend(self) -> None:
        """Lend `flat.gradient_memory` for another use. Until `take_back`, every use of gradients raises."""
        if self.has_pending:
            raise RuntimeError("there are gradients that the optimizer has not used: they would be overwritten")
        self._lent = True

    def take_back(self) -> None:
        """Take the memory back if it was lent, and zero it."""
        if not self._lent:
            return
        self._flat.zero_gradients()
        self._lent = False

    def raise_if_lent(self) -> None:
        if self._lent:
            raise RuntimeError(
                "the memory of the gradients holds the key/value cache now: compute and use gradients inside "
                '`with policy.phases.enter("train"):`'
            )

    # -- the result --------------------------------------------------------------------------------

    def shards(self) -> list[Tensor]:
        """This rank's gradient shards, one per bucket."""
        self.join_abort()
        self.raise_if_lent()
        return [bucket.bucket.gradient_shard(self._world.rank) for bucket in self.buckets]

    def norm(self) -> Tensor:
        """The global gradient norm, over all ranks, after `finish()`."""
        parts = self.shards() if self._tensor is None else self._counted_parts(self._tensor)
        nothing = torch.zeros((), dtype=torch.float64, device=self._flat.gradient_memory.device)
        squares = torch.stack([_sum_of_squares(part) for part in parts] or [nothing]).sum()
        total = self._collectives.sum(squares)
        if self._tensor is not None:
            total = self._tensor.sum(total, "the norm of all gradients")
        return total.sqrt().float()

    def _counted_parts(self, tensor: TensorPeers) -> list[Tensor]:
        """This rank's gradient shards, without elements that another rank of the tensor parallel group counts."""
        parts = []
        for bucket, shard in zip(self.buckets, self.shards(), strict=True):
            for start, stop in tensor.counted_spans(bucket.bucket.plan, self._world.rank):
                parts.append(shard[start:stop])
        return parts

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`. Returns the norm before clipping."""
        norm = self.norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self.shards():
            shard.mul_(factor)
        return norm


def _sum_of_squares(shard: Tensor) -> Tensor:
    """In fp64, chunk by chunk: an fp64 copy of a large shard would take more memory than anything else in a step."""
    return torch.stack([part.double().square_().sum() for part in shard.split(CHUNK)]).sum()
