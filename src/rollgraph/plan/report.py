"""The plan of a run: memory by phase, the chosen settings and why, the time of a step, and better layouts.

`rollgraph plan` shows it, and a run is checked with it before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config, ConfigError, ConfigProblem
from rollgraph.inputs.shapes import PromptLengths
from rollgraph.plan.choose import Choice, MemoryBudget, choose_settings
from rollgraph.plan.layout import Layout, Network, has_enough_prompts
from rollgraph.plan.memory import PHASES, Location, Phase, PlanLine, peak_phase, phase_bytes
from rollgraph.plan.run_shape import Device, make_run_shape
from rollgraph.plan.suggest import (
    LayoutOption,
    ScaledWork,
    Scaling,
    Suggestion,
    compare_layouts,
    describe_misfit,
    describe_proposal,
    scale_run,
    suggest_settings,
)
from rollgraph.plan.time import Floor, Speed, offline_step_floor, step_floor


@dataclass(frozen=True)
class Plan:
    """The memory of one rank, and a lower bound on the time of its step."""

    choice: Choice
    floor: Floor | None  # None: the speed of the device is unknown
    notes: tuple[str, ...] = ()  # assumptions
    device: Device = "cuda"
    suggestions: tuple[Suggestion, ...] = ()  # settings that would fit, if the run does not
    layouts: tuple[LayoutOption, ...] = ()  # if requested, or if the run does not fit
    scaling: Scaling | None = None  # if requested

    @property
    def layout(self) -> Layout:
        return self.choice.settings.shape.layout

    @property
    def proposal(self) -> str:
        """A better layout, in one sentence; empty if there is none."""
        return describe_proposal(self.choice, self.layouts)

    @property
    def lines(self) -> tuple[PlanLine, ...]:
        return self.choice.settings.lines

    @property
    def device_bytes(self) -> int | None:
        """The memory of the device; None if unknown."""
        return self.choice.budget.device if self.device == "cuda" else None

    def total(self, phase: Phase, where: Location = "device") -> int:
        return phase_bytes(self.lines, phase, where)

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
        """Why the run does not fit, and which settings would; empty if it fits."""
        return "" if self.choice.fits else describe_misfit(self.choice, list(self.suggestions))

    def to_dict(self) -> dict[str, Any]:
        time = self.choice.settings.time
        return {
            **self.choice.to_dict(),
            "layout": {
                "ranks": self.layout.ranks,
                "nodes": self.layout.nodes,
                "shard": self.layout.shard,
                "tensor_parallel": self.layout.tensor_parallel,
            },
            "phase_seconds": {phase: time.of_phase(phase) for phase in PHASES},
            "communication": [kind.to_dict() for kind in time.communication],
            "layouts": [option.to_dict() for option in self.layouts],
            "proposal": self.proposal,
            "lines": [line.to_dict() for line in self.lines],
            "phases": {phase: self.total(phase) for phase in PHASES},
            "host": max(self.total(phase, "host") for phase in PHASES),
            "peak": {"phase": self.peak_phase, "bytes": self.peak},
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "remedies": [
                {"setting": suggestion.setting, "bytes": suggestion.required_bytes} for suggestion in self.suggestions
            ],
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
    scale: ScaledWork | None = None,
    prompt_lengths: PromptLengths | None = None,
) -> Plan:
    """Plan one rank out of `ranks`. Reads config.json at most: no weights, and nothing on a device.

    Without a `speed`, we assume an H200 for `cuda`, and compute no floor for `cpu`. With `layouts`, other layouts are
    compared even if the run fits. `scale` plans the same layout with other numbers of GPUs, too. `prompt_lengths` are
    those of the data, for a configuration that does not limit them.
    """
    shape = make_run_shape(
        config, ranks=ranks, nodes=nodes, network=network, device=device, prompt_lengths=prompt_lengths
    )
    if device == "cuda":
        speed = speed or Speed()
    if not has_enough_prompts(config, shape.layout):
        problem = (
            f"{config.data.prompts_per_step}, "
            f"but each of {shape.layout.data_parallel} ranks needs at least one per step"
        )
        raise ConfigError([ConfigProblem(problem, "data.prompts_per_step")])
    budget = MemoryBudget(device_bytes, host_bytes)
    choice = choose_settings(config, shape, budget, speed)
    options: list[LayoutOption] = []
    if layouts or not choice.fits:
        options = compare_layouts(config, shape, budget, speed)
    suggestions = [] if choice.fits else suggest_settings(config, shape, budget, options)
    floor = None
    if speed is not None:
        lower_bound = offline_step_floor if shape.trains_offline else step_floor
        floor = lower_bound(choice.config, shape, shape.limits(choice.config), speed)
    scaling = None if scale is None else scale_run(config, shape, budget, speed or Speed(), scale)
    return Plan(choice, floor, shape.notes, device, tuple(suggestions), tuple(options), scaling)
