"""Copies between the host and buffers on a device that overlap with the device's work.

Reads and writes have a CUDA stream each, so both directions are busy at once. Nothing waits on the host. On a CPU every
copy is made at once, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Copies = Iterable[tuple[Tensor, Tensor]]  # from, to


class CopyStreams:
    """Copies into and out of a number of buffers. A buffer is read into, used and written out, again and again.

    Between `wait_for_read` and `write` it belongs to the current stream.
    """

    def __init__(self, buffers: int, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._reads = torch.cuda.Stream(device)
            self._writes = torch.cuda.Stream(device)
            self._is_read = [torch.cuda.Event() for _ in range(buffers)]
            self._is_used = [torch.cuda.Event() for _ in range(buffers)]
            self._is_written = [torch.cuda.Event() for _ in range(buffers)]
            torch.cuda.current_stream(device).synchronize()  # the buffers were just allocated there

    def read(self, buffer: int, copies: Copies) -> None:
        """Start copies from the host, after what the buffer had before is written."""
        if not self._cuda:
            _copy(copies)
            return
        self._reads.wait_event(self._is_written[buffer])
        with torch.cuda.stream(self._reads):
            _copy(copies)
        self._is_read[buffer].record(self._reads)

    def wait_for_read(self, buffer: int) -> None:
        """Let the current stream wait for the copies into a buffer."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._is_read[buffer])

    def write(self, buffer: int, copies: Copies) -> None:
        """Start copies to the host, after what the current stream has been given so far."""
        if not self._cuda:
            _copy(copies)
            return
        self._is_used[buffer].record(torch.cuda.current_stream(self._device))
        self._writes.wait_event(self._is_used[buffer])
        with torch.cuda.stream(self._writes):
            _copy(copies)
        self._is_written[buffer].record(self._writes)

    def synchronize(self) -> None:
        """Wait, on the host, until all copies are made."""
        if self._cuda:
            self._writes.synchronize()
            self._reads.synchronize()


def _copy(copies: Copies) -> None:
    for source, target in copies:
        target.copy_(source, non_blocking=True)
