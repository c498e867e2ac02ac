"""The tables of `rollgraph plan` about many ranks: time by phase, layouts beside each other, and numbers of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollgraph.run.memory_choice import Choice
    from rollgraph.run.plan import Plan
    from rollgraph.run.scaling import Scaling

_LEFT = ("where", "device", "host")  # cells that are aligned like the first column


def describe_phases(plan: Plan) -> list[str]:
    """The estimated step of several ranks, with what they send each other."""
    from rollgraph.run.plan_lines import PHASES

    time = plan.choice.settings.time
    shown: dict[str, dict[str, str]] = {}  # by name and phase
    for exchange in time.exchanges:
        text = f"{seconds(exchange.exposed)} of {seconds(exchange.seconds)}"
        shown.setdefault(exchange.name, {})[exchange.phase] = text
    rows = [("estimated time of a step, s", *PHASES)]
    for name, cells in shown.items():
        rows.append((name, *(cells.get(phase, "") for phase in PHASES)))
    rows.append(("sum", *(seconds(time.of_phase(phase)) for phase in PHASES)))
    network = plan.layout.network
    inside, between = (
        f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us" for link in (network.inside, network.between)
    )
    note = f"communication: what computing does not hide, of all; {inside} inside a node"
    if plan.layout.nodes > 1:
        note += f", {between} between nodes"
    return [*table(rows), note]


def describe_layouts(plan: Plan) -> list[str]:
    """Every layout of the same ranks."""
    from rollgraph.run.plan_lines import PHASES, gib

    known = plan.device_bytes is not None
    rows = [("layout", "needs", "fits", "step, s", *PHASES, "exposed")]
    for option in plan.layouts:
        needs = (option.layout.describe(), gib(option.needed))
        if not option.choice.fits:
            rows.append((*needs, "no", *[""] * (len(PHASES) + 2)))
            continue
        rows.append((*needs, "yes" if known else "", *_times(option.choice)))
    return table(rows)


def describe_scaling(scaling: Scaling) -> list[str]:
    """The same layout with other numbers of GPUs."""
    from rollgraph.run.plan_lines import PHASES
    from rollgraph.run.scaling import MOST

    rows = [("GPUs", "nodes", "prompts", "step, s", *PHASES, "exposed", "efficiency")]
    for point in scaling.points:
        counts = (f"{point.layout.ranks:,}", str(point.layout.nodes), f"{point.prompts:,}")
        efficiency = scaling.efficiency(point)
        if efficiency is None:
            rows.append((*counts, "does not fit", *[""] * (len(PHASES) + 2)))
            continue
        rows.append((*counts, *_times(point.choice), f"{efficiency:.0%}"))
    last = scaling.points[-1].layout.ranks
    text = (
        "exposed: communication that computing does not hide; efficiency: of a GPU, beside the smallest run that fits"
    )
    more = [] if last >= MOST else [f"more than {last:,} GPUs need more prompts in a step: see --scale grown"]
    return [*table(rows), text, *more]


def _times(choice: Choice) -> tuple[str, ...]:
    """The estimated step, its phases, and communication that nothing hides."""
    from rollgraph.run.plan_lines import PHASES

    time = choice.settings.time
    return seconds(time.total), *(seconds(time.of_phase(phase)) for phase in PHASES), seconds(time.exposed)


def seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns that are as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 or cell in _LEFT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
