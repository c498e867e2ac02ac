"""What would fit, if nothing does: another layout of the same ranks, or the settings nearest to those of the user.

Each remedy changes as little as possible, and is checked by choosing with it: what is named here does fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.config import AdapterConfig, Config, ConfigError, ConfigProblem
from rollgraph.run.layout_choice import LayoutOption, compare_layouts, propose
from rollgraph.run.memory_choice import Choice, MemoryBudget, choose, value_of, with_values
from rollgraph.run.plan_lines import gib, peak, peak_phase
from rollgraph.run.run_shape import RunShape, shape_run

FEW_ROWS = 16  # sequences at a time that are suggested
SHORTEST = 128  # tokens
OPEN: dict[str, Any] = {  # the values that leave a key to us
    "train.token_buckets": None,
    "train.microbatch_tokens": None,
    "memory.logits": "auto",
    "model.checkpointing": "auto",
    "optimizer.offload": "auto",
    "memory.reference": "auto",
    "memory.cache_gib": None,
}


@dataclass(frozen=True)
class Remedy:
    """Settings with which the run would fit, e.g. Remedy("optimizer.state: int8", 97 << 30)."""

    setting: str  # as it is written in a configuration
    config: Config
    needed: int  # bytes on the device, with the reserve

    def __str__(self) -> str:
        return f"{self.setting} (needs {gib(self.needed)})"


class DoesNotFit(ConfigError):
    """A run that needs more memory than there is, whatever is chosen."""

    def __init__(self, choice: Choice, remedies: list[Remedy]) -> None:
        self.choice = choice
        self.remedies = remedies
        super().__init__([ConfigProblem(describe_misfit(choice, remedies), "memory", rule="memory_fits")])


def describe_misfit(choice: Choice, remedies: list[Remedy]) -> str:
    """What is missing, and what to change."""
    lines, budget = choice.settings.lines, choice.budget
    assert budget.device is not None or budget.host is not None, "only what is known can be too small"
    layout = choice.settings.shape.layout
    ranks = "" if layout.ranks == 1 else f" on each of {layout.ranks} ranks with {layout.describe()}"
    text = f"this run needs at least {gib(needed_bytes(choice))} in {peak_phase(lines)}{ranks}"
    if budget.device is not None and needed_bytes(choice) > budget.device:
        text += f", {gib(budget.reserve)} in reserve included, but the device has {gib(budget.device)}"
    elif budget.host is not None:
        needed = f"{gib(peak(lines, 'host'))} of host memory{ranks}"
        text = f"this run needs at least {needed}, but {gib(budget.host)} are free"
    if not remedies:
        return f"{text}. No nearby setting fits: use a smaller model or a larger device"
    return f"{text}. What would fit: {', or '.join(map(str, remedies))}"


def needed_bytes(choice: Choice) -> int:
    """On the device, with the reserve."""
    return peak(choice.settings.lines) + choice.budget.reserve


def find_remedies(
    config: Config, shape: RunShape, budget: MemoryBudget, layouts: Sequence[LayoutOption] | None = None
) -> list[Remedy]:
    """The fastest layout that fits, and then the nearest settings, the nearest one first.

    `layouts` are those of `compare_layouts`, if somebody has compared them already.
    """
    if layouts is None:
        layouts = compare_layouts(config, shape, budget)
    found: list[Remedy] = []
    best = propose(layouts)
    if best is not None:
        found.append(Remedy(best.changes(config), best.config, best.needed))
    for alternatives in (_reopened(config), _cheaper(config, shape), _adapted(config, shape), _shorter(config, shape)):
        remedies = (_try(setting, changed, shape, budget) for setting, changed in alternatives)
        found += filter(None, [next(filter(None, remedies), None)])
    if not found and shape.adapters is None:
        for adapted in _adapted(config, shape):
            both = ((f"{adapted[0]}, {setting}", changed) for setting, changed in _shorter(adapted[1], shape))
            remedies = (_try(setting, changed, shape, budget) for setting, changed in both)
            found += filter(None, [next(filter(None, remedies), None)])
    return found


def _try(setting: str, config: Config, shape: RunShape, budget: MemoryBudget) -> Remedy | None:
    now = shape.layout
    changed = shape_run(config, ranks=now.ranks, nodes=now.nodes, network=now.network, device=shape.device)
    choice = choose(config, changed, budget)
    return Remedy(setting, config, needed_bytes(choice)) if choice.fits else None


def _reopened(config: Config) -> Iterator[tuple[str, Config]]:
    """Leave to us what the user wrote: one key, or all of them."""
    written = {key: OPEN[key] for key in OPEN if value_of(config, key) != OPEN[key]}
    for key, value in written.items():
        yield f"{key}: {_written(value)}", with_values(config, {key: value})
    if len(written) > 1:
        setting = ", ".join(f"{key}: {_written(value)}" for key, value in written.items())
        yield setting, with_values(config, written)


def _cheaper(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """The same training with less state, or fewer sequences at a time."""
    if shape.adapters is None and config.optimizer.state != "int8":
        yield "optimizer.state: int8", with_values(config, {"optimizer.state": "int8"})
    if config.rollout.rows > FEW_ROWS and not shape.samples_nothing:
        yield f"rollout.rows: {FEW_ROWS}", with_values(config, {"rollout.rows": FEW_ROWS})


def _adapted(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """Train adapters instead of all weights."""
    if shape.adapters is None:
        yield "adapter: {rank: 32}", replace(config, adapter=AdapterConfig(rank=32))


def _shorter(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """Shorter sequences, half as long each time."""
    longest = shape.limits(config).max_length
    key, now = "rollout.max_tokens", config.rollout.max_tokens
    if shape.samples_nothing:
        key, now = "data.max_tokens", longest
    elif config.data.max_prompt_tokens is None:
        key, now = "data.max_prompt_tokens", longest - config.rollout.max_tokens
    while now >= SHORTEST:
        now //= 2
        yield f"{key}: {now}", with_values(config, {key: now})


def _written(value: Any) -> str:
    return "null" if value is None else str(value)
