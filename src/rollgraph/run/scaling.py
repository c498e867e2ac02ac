"""How the time of a step falls, or the work of a step grows, with the number of GPUs, as far as the models know.

Every row is planned like a run of its own, with the memory settings that suit it. The estimates are those that rank
settings (`step_time.py`), with the model of communication (`communication.py`); neither is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollgraph.config import Config
from rollgraph.run.layout import NODE, Layout, has_prompts
from rollgraph.run.memory_choice import Choice, MemoryBudget, choose
from rollgraph.run.run_shape import RunShape
from rollgraph.run.step_floor import Speed

MOST = 1024  # GPUs
Work = Literal["fixed", "grown"]


@dataclass(frozen=True)
class ScalePoint:
    """A run with some number of GPUs."""

    choice: Choice
    prompts: int  # of a step, on all ranks

    @property
    def layout(self) -> Layout:
        return self.choice.settings.shape.layout

    @property
    def seconds(self) -> float:
        return self.choice.settings.time.total

    @property
    def speed(self) -> float:
        """Prompts per second and GPU."""
        return self.prompts / self.seconds / self.layout.ranks

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.layout.ranks,
            "nodes": self.layout.nodes,
            "prompts_per_step": self.prompts,
            "fits": self.choice.fits,
            **self.choice.settings.time.to_dict(),
        }


@dataclass(frozen=True)
class Scaling:
    """The same layout from few GPUs to many."""

    work: Work
    points: tuple[ScalePoint, ...]

    def efficiency(self, point: ScalePoint) -> float | None:
        """The speed of a GPU, compared with the smallest run that fits; None if the run itself does not fit."""
        if not point.choice.fits:
            return None
        smallest = next(other for other in self.points if other.choice.fits)
        return point.speed / smallest.speed

    def to_dict(self) -> dict[str, Any]:
        points = [{**point.to_dict(), "efficiency": self.efficiency(point)} for point in self.points]
        return {"work": self.work, "points": points}


def scale_run(config: Config, shape: RunShape, budget: MemoryBudget, speed: Speed, work: Work) -> Scaling:
    """From one tensor group to 1,024 GPUs. A step has the configured prompts, or as many more as there are GPUs.

    With the configured prompts, there are no more GPUs than can get one.
    """
    points = []
    for ranks, nodes in _sizes(shape.layout):
        prompts = config.data.prompts_per_step
        if work == "grown":
            prompts = max(1, prompts * ranks // shape.layout.ranks)
        changed = replace(config, data=replace(config.data, prompts_per_step=prompts))
        there = shape.under(changed, ranks=ranks, nodes=nodes)
        if not has_prompts(changed, there.layout):
            break
        points.append(ScalePoint(choose(changed, there, budget, speed), prompts))
    return Scaling(work, tuple(points))


def _sizes(layout: Layout) -> Iterator[tuple[int, int]]:
    """Ranks and nodes: doubled until a node is full, then nodes of that size."""
    node = layout.per_node if layout.nodes > 1 else max(NODE, layout.per_node)
    ranks = layout.tensor
    while ranks < node:
        yield ranks, 1
        ranks *= 2
    nodes = 1
    while nodes * node <= MOST:
        yield nodes * node, nodes
        nodes *= 2
