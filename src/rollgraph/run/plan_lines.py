"""The values of a memory plan: its lines, their sums by phase, and how a size is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["generate", "score", "train"]
Place = Literal["device", "host"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train")
GIB = 2**30


@dataclass(frozen=True)
class PlanLine:
    """One kind of memory, e.g. PlanLine("parameters", 3087428608, "device", ("generate", "score", "train"))."""

    name: str
    nbytes: int
    where: Place
    phases: tuple[Phase, ...]  # that need it; other phases use the same memory for something else

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "phases": list(self.phases)}


def total(lines: Sequence[PlanLine], phase: Phase, where: Place = "device") -> int:
    """The bytes that a phase needs."""
    return sum(line.nbytes for line in lines if line.where == where and phase in line.phases)


def peak_phase(lines: Sequence[PlanLine], where: Place = "device") -> Phase:
    return max(PHASES, key=lambda phase: total(lines, phase, where))


def peak(lines: Sequence[PlanLine], where: Place = "device") -> int:
    """The bytes of the phase that needs most."""
    return total(lines, peak_phase(lines, where), where)


def gib(nbytes: float) -> str:
    """A size in words, e.g. "13.25 GiB".

    >>> gib(3 * 2**29), gib(5 * 2**20)
    ('1.50 GiB', '5.0 MiB')
    """
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
