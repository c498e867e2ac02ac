"""Exchanging weights with pinned host memory on two CUDA streams: one bucket goes out while the next one comes in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class HostExchange:
    """A bucket that goes out waits in one of two buffers on the device. The host waits for nothing here."""

    def __init__(self, buckets: Sequence[Tensor]) -> None:
        self._device = buckets[0].device
        largest = max(bucket.nbytes for bucket in buckets)
        self._inward = torch.cuda.Stream(self._device)
        self._outward = torch.cuda.Stream(self._device)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Run the exchanges inside after what the current stream has queued, and before what it is given afterwards."""
        current = torch.cuda.current_stream(self._device)
        self._inward.wait_stream(current)
        self._inward.wait_stream(self._outward)  # a slot may still be being written
        try:
            yield
        finally:
            current.wait_stream(self._inward)

    def exchange(self, index: int, bucket: Tensor, slot: Tensor) -> None:
        turn = index % len(self._buffers)
        kept = self._buffers[turn][: bucket.nbytes].view(bucket.dtype)
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(self._free[turn])
            kept.copy_(bucket)
            try:
                bucket.copy_(slot, non_blocking=True)
                self._outward.wait_stream(self._inward)
                with torch.cuda.stream(self._outward):
                    slot.copy_(kept, non_blocking=True)
            except BaseException:
                bucket.copy_(kept)
                raise
        self._free[turn].record(self._outward)

    def synchronize(self) -> None:
        """Block the host until no slot is being written."""
        self._outward.synchronize()
