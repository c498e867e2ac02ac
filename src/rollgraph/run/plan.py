"""The plan of a run: its memory by phase, what was chosen and why, and the least time of a step.

What `rollgraph plan` shows, and what a run is checked by before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config
from rollgraph.run.memory_choice import Choice, MemoryBudget, choose
from rollgraph.run.memory_remedies import Remedy, describe_misfit, find_remedies
from rollgraph.run.plan_lines import PHASES, Phase, Place, PlanLine, peak_phase, total
from rollgraph.run.run_shape import Device, shape_run
from rollgraph.run.step_floor import Floor, Speed, step_floor, written_floor


@dataclass(frozen=True)
class Plan:
    """The memory of one rank, and the least time of its step."""

    choice: Choice
    floor: Floor | None  # None: nothing is known about the speed of the device
    notes: tuple[str, ...] = ()  # assumptions
    device: Device = "cuda"
    remedies: tuple[Remedy, ...] = ()  # what would fit, if the run does not

    @property
    def lines(self) -> tuple[PlanLine, ...]:
        return self.choice.settings.lines

    @property
    def device_bytes(self) -> int | None:
        """That the device has; None if unknown."""
        return self.choice.budget.device if self.device == "cuda" else None

    def total(self, phase: Phase, where: Place = "device") -> int:
        return total(self.lines, phase, where)

    @property
    def peak_phase(self) -> Phase:
        return peak_phase(self.lines)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        return None if self.choice.budget.device is None else self.choice.fits

    @property
    def misfit(self) -> str:
        """Why it does not fit, and what would."""
        return "" if self.choice.fits else describe_misfit(self.choice, list(self.remedies))

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.choice.to_dict(),
            "lines": [line.to_dict() for line in self.lines],
            "phases": {phase: self.total(phase) for phase in PHASES},
            "host": max(self.total(phase, "host") for phase in PHASES),
            "peak": {"phase": self.peak_phase, "bytes": self.peak},
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "remedies": [{"setting": remedy.setting, "bytes": remedy.needed} for remedy in self.remedies],
            **(self.floor.to_dict() if self.floor is not None else {}),
            "notes": list(self.notes),
        }


def make_plan(
    config: Config,
    *,
    ranks: int = 1,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    device: Device = "cuda",
    speed: Speed | None = None,
) -> Plan:
    """The plan of one rank out of `ranks`. Reads config.json at most: no weights, and nothing on a device.

    Without a speed, that of one H200 is assumed for `cuda`, and there is no floor for `cpu`.
    """
    shape = shape_run(config, ranks=ranks, device=device)
    if device == "cuda":
        speed = speed or Speed()
    budget = MemoryBudget(device_bytes, host_bytes)
    choice = choose(config, shape, budget, speed)
    remedies = [] if choice.fits else find_remedies(config, shape, budget)
    floor = None
    if speed is not None:
        least = written_floor if shape.samples_nothing else step_floor
        floor = least(choice.config, shape, shape.limits(choice.config), speed)
    return Plan(choice, floor, shape.notes, device, tuple(remedies))
