"""When buckets are all-gathered: after an optimizer step, in forward order, ahead of the modules that read them.

All ranks start their gathers in the same order, whichever module asks first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from rollgraph.sharding.bucket_sync import BucketSync, StaleWeights

_PREFETCH = 2  # how many buckets are gathered before they are needed


class ParameterGathers:
    """The gathers of all buckets, which are given in the order of a backward."""

    def __init__(self, buckets: Sequence[BucketSync]) -> None:
        self._buckets = buckets
        self._forward_order = buckets[::-1]
        self.bucket_of: dict[Tensor, BucketSync] = {}
        for bucket in buckets:
            self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)

    def start(self) -> None:
        """Start the gathers of all stale buckets."""
        for bucket in self._forward_order:
            bucket.start_gather()

    def wait(self) -> None:
        """Wait for all gathers in flight."""
        for bucket in self._forward_order:
            bucket.wait_for_gather()

    def ensure(self, parameters: Sequence[Tensor]) -> None:
        """Wait for the buckets of these parameters, and start those that a forward needs next."""
        if not parameters:
            return
        needed = {self.bucket_of[parameter].index for parameter in parameters}
        last = min(needed) - _PREFETCH
        for bucket in self._forward_order:
            if bucket.index >= last:
                bucket.start_gather()
        for index in needed:
            self._buckets[index].wait_for_gather()

    def after_update(self, trained: Iterable[BucketSync]) -> None:
        """The optimizer has written the shards of these buckets."""
        for bucket in trained:
            bucket.after_update()
            increment_version(bucket.parameters)  # so that the backward of an earlier forward raises, as it should

    def prefetch(self) -> None:
        """Start the gathers that the next forward needs first."""
        for bucket in self._forward_order[:_PREFETCH]:
            bucket.start_gather()

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
