"""Which layout suits a run: every one that the model allows, planned and timed, and the fastest that fits.

Nothing is chosen for the user: `shard` and `tensor_parallel` change what a run computes in its last bits, and how its
checkpoints are divided. A layout is proposed where the configured one does not fit, and on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.config import Config, broken_rules
from rollgraph.run.layer_checks import find_problem, stages_exchanges
from rollgraph.run.layout import Layout, has_prompts, possible_layouts
from rollgraph.run.memory_choice import Choice, MemoryBudget, choose
from rollgraph.run.plan_lines import gib, peak, peak_phase
from rollgraph.run.run_shape import RunShape
from rollgraph.run.step_floor import Speed


@dataclass(frozen=True)
class LayoutOption:
    """A layout with the settings of memory that are best under it."""

    config: Config  # as the user would write it
    choice: Choice

    @property
    def layout(self) -> Layout:
        return self.choice.settings.shape.layout

    @property
    def seconds(self) -> float:
        """The estimated time of a step."""
        return self.choice.settings.time.total

    @property
    def needed(self) -> int:
        """Bytes on the device, with the reserve."""
        return peak(self.choice.settings.lines) + self.choice.budget.reserve

    def changes(self, config: Config) -> str:
        """What to write in place of what a configuration says, e.g. "tensor_parallel: 8"."""
        keys = ("shard", "tensor_parallel")
        values = {key: getattr(self.config, key) for key in keys if getattr(self.config, key) != getattr(config, key)}
        return ", ".join(f"{key}: {value}" for key, value in values.items())

    def describe_need(self) -> str:
        """E.g. "needs 98.32 GiB to generate"."""
        return f"needs {gib(self.needed)} to {peak_phase(self.choice.settings.lines)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "shard": self.layout.shard,
            "tensor_parallel": self.layout.tensor,
            "fits": self.choice.fits,
            "needed_bytes": self.needed,
            "peak_phase": peak_phase(self.choice.settings.lines),
            **self.choice.settings.time.to_dict(),
        }


def compare_layouts(
    config: Config, shape: RunShape, budget: MemoryBudget, speed: Speed | None = None
) -> list[LayoutOption]:
    """Each layout of the same ranks that the model and the rules of a configuration allow. One rank has none."""
    found: list[LayoutOption] = []
    if shape.layout.ranks == 1:
        return found
    staged = stages_exchanges(config, shape.layout.ranks, shape.device)
    for layout in possible_layouts(shape.layout):
        changed = replace(config, shard=layout.shard, tensor_parallel=layout.tensor)
        if broken_rules(changed) or find_problem(changed, shape.whole, staged) or not has_prompts(changed, layout):
            continue
        found.append(LayoutOption(changed, choose(changed, shape.under(changed), budget, speed)))
    return found


def propose(options: Sequence[LayoutOption]) -> LayoutOption | None:
    """The fastest layout that fits, and of equally fast ones the simplest; None if none fits."""
    fitting = [option for option in options if option.choice.fits]
    return min(fitting, key=lambda option: option.seconds, default=None)


def describe_proposal(choice: Choice, options: Sequence[LayoutOption]) -> str:
    """One sentence: what the configured layout, which was chosen for, needs, and what to use. Empty: nothing better."""
    best = propose(options)
    now = LayoutOption(choice.config, choice)
    if best is None or best.layout == now.layout:
        return ""
    named = f"{now.layout.describe()} {now.describe_need()} on each of {now.layout.ranks} ranks"
    there = f"{best.changes(choice.config)} ({best.describe_need()}, about {best.seconds:.3g} s a step)"
    if not choice.fits:
        has = "" if choice.budget.device is None else f", which have {gib(choice.budget.device)}"
        return f"{named}{has}: use {there}"
    return f"{named} and about {now.seconds:.3g} s a step: {there} is faster"
