"""The plan of a run: its memory by phase, what was chosen and why, the time of a step, and which layout suits it.

What `rollgraph plan` shows, and what a run is checked by before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config, ConfigError, ConfigProblem
from rollgraph.run.communication import Network
from rollgraph.run.layout import Layout, has_prompts
from rollgraph.run.layout_choice import LayoutOption, compare_layouts, describe_proposal
from rollgraph.run.memory_choice import Choice, MemoryBudget, choose
from rollgraph.run.memory_remedies import Remedy, describe_misfit, find_remedies
from rollgraph.run.plan_lines import PHASES, Phase, Place, PlanLine, peak_phase, total
from rollgraph.run.run_shape import Device, shape_run
from rollgraph.run.scaling import Scaling, Work, scale_run
from rollgraph.run.step_floor import Floor, Speed, step_floor, written_floor


@dataclass(frozen=True)
class Plan:
    """The memory of one rank, and the least time of its step."""

    choice: Choice
    floor: Floor | None  # None: nothing is known about the speed of the device
    notes: tuple[str, ...] = ()  # assumptions
    device: Device = "cuda"
    remedies: tuple[Remedy, ...] = ()  # what would fit, if the run does not
    layouts: tuple[LayoutOption, ...] = ()  # compared on request, and if the run does not fit
    scaling: Scaling | None = None  # on request

    @property
    def layout(self) -> Layout:
        return self.choice.settings.shape.layout

    @property
    def proposal(self) -> str:
        """Which other layout to use, in one sentence; empty if none was found to be better."""
        return describe_proposal(self.choice, self.layouts)

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
        time = self.choice.settings.time
        return {
            **self.choice.to_dict(),
            "layout": {
                "ranks": self.layout.ranks,
                "nodes": self.layout.nodes,
                "shard": self.layout.shard,
                "tensor_parallel": self.layout.tensor,
            },
            "phase_seconds": {phase: time.of_phase(phase) for phase in PHASES},
            "communication": [exchange.to_dict() for exchange in time.exchanges],
            "layouts": [option.to_dict() for option in self.layouts],
            "proposal": self.proposal,
            "lines": [line.to_dict() for line in self.lines],
            "phases": {phase: self.total(phase) for phase in PHASES},
            "host": max(self.total(phase, "host") for phase in PHASES),
            "peak": {"phase": self.peak_phase, "bytes": self.peak},
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "remedies": [{"setting": remedy.setting, "bytes": remedy.needed} for remedy in self.remedies],
            **(self.floor.to_dict() if self.floor is not None else {}),
            **({"scaling": self.scaling.to_dict()} if self.scaling is not None else {}),
            "notes": list(self.notes),
        }


def make_plan(
    config: Config,
    *,
    ranks: int = 1,
    nodes: int = 1,
    network: Network | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    device: Device = "cuda",
    speed: Speed | None = None,
    layouts: bool = False,
    scale: Work | None = None,
) -> Plan:
    """The plan of one rank out of `ranks`. Reads config.json at most: no weights, and nothing on a device.

    Without a speed, that of one H200 is assumed for `cuda`, and there is no floor for `cpu`. With `layouts`, other
    layouts are compared even if the run fits, and `scale` asks for the same layout with other numbers of GPUs.
    """
    shape = shape_run(config, ranks=ranks, nodes=nodes, network=network, device=device)
    if device == "cuda":
        speed = speed or Speed()
    if not has_prompts(config, shape.layout):
        wrong = f"{config.data.prompts_per_step}, but each of {shape.layout.data} ranks needs at least one per step"
        raise ConfigError([ConfigProblem(wrong, "data.prompts_per_step")])
    budget = MemoryBudget(device_bytes, host_bytes)
    choice = choose(config, shape, budget, speed)
    options: list[LayoutOption] = []
    if layouts or not choice.fits:
        options = compare_layouts(config, shape, budget, speed)
    remedies = [] if choice.fits else find_remedies(config, shape, budget, options)
    floor = None
    if speed is not None:
        least = written_floor if shape.samples_nothing else step_floor
        floor = least(choice.config, shape, shape.limits(choice.config), speed)
    scaling = None if scale is None else scale_run(config, shape, budget, speed or Speed(), scale)
    return Plan(choice, floor, shape.notes, device, tuple(remedies), tuple(options), scaling)
