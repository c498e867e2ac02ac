"""The memory that each phase of a step took, and the most that the process has used at all."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch


class MemoryMeter:
    """On a GPU, the most that a phase had allocated; on a CPU, what was resident at its end, if the system tells.

    A graph allocates when it is captured, and replays in that memory ever after: what was allocated meanwhile counts
    for the phase that the graph is of.
    """

    def __init__(self, device: str) -> None:
        self.by_phase: dict[str, int] = {}  # bytes, of the step in progress
        self._on_gpu = device.startswith("cuda")
        self._peak = 0  # before the phase in progress
        self._captured: dict[str, int] = {}  # the most bytes during captures, by phase
        self._capturing: str | None = None

    @property
    def peak(self) -> int:
        """The most bytes this process has used, on its GPU or else on the host."""
        if self._on_gpu:
            return max(self._peak, torch.cuda.max_memory_allocated())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def begin(self) -> None:
        if self._on_gpu:
            self._peak = self.peak
            torch.cuda.reset_peak_memory_stats()

    def end(self, phase: str) -> None:
        used = torch.cuda.max_memory_allocated() if self._on_gpu else resident()
        if used is not None:
            self.by_phase[phase] = max(used, self.by_phase.get(phase, 0), self._captured.get(phase, 0))

    def capture(self, phase: str) -> None:
        """A graph of this phase is captured next."""
        if self._on_gpu and phase != self._capturing:
            self.end_captures()
            self._capturing = phase
            self.begin()

    def end_captures(self) -> None:
        if self._capturing is not None:
            self._captured[self._capturing] = torch.cuda.max_memory_allocated()
            self._capturing = None


def resident() -> int | None:
    """The bytes of main memory that this process has now; None where only the peak is known."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
