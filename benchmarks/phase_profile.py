"""Shows where device time goes in each phase of a step, by kind of kernel.

A kernel counts from its start, even while the previous kernel is still running. So the kinds can add up to slightly
more than the time the device was busy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from common import synchronize, table
from torch.profiler import ProfilerActivity, profile

# Parts of kernel names, by kind; the first match counts.
KINDS = {
    "GEMMs": ("gemm", "nvjet", "cutlass", "_matmul_kernel"),
    "attention, backward": ("_query_kernel", "_key_kernel", "_sum_copies_kernel"),
    "attention": ("_packed_kernel", "_decode_kernel"),
    "SwiGLU": ("swiglu",),
    "norms": ("norm",),
    "heads": ("heads",),
    "log-probabilities": ("_part_kernel", "_gradient_kernel", "_combine_kernel"),
    "sampling": ("sample", "logit_sums"),
}
REST = "the rest"
GAPS = "between kernels"


class PhaseProfile:
    """Milliseconds of each kind in each phase."""

    def __init__(self) -> None:
        self._phases: dict[str, Counter[str]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            begin = time.perf_counter()
            yield
            synchronize()
            wall = 1e3 * (time.perf_counter() - begin)
        spent: Counter[str] = Counter()
        for event in found.key_averages():
            spent[_kind(event.key)] += event.self_device_time_total / 1e3
        spent[GAPS] = wall - sum(spent.values())
        self._phases[name] = spent

    def print(self) -> None:
        rows = []
        for kind in (*KINDS, REST, GAPS):
            rows.append((kind, *(self._phases[phase][kind] for phase in self._phases)))
        rows.append(("all", *(sum(spent.values()) for spent in self._phases.values())))
        table("where the time goes, ms", ("", *self._phases), rows)


def _kind(kernel: str) -> str:
    for kind, names in KINDS.items():
        if any(name in kernel.lower() for name in names):
            return kind
    return REST
