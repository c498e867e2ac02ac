"""What would fit, if nothing does: the settings nearest to those that the user wrote.

Each remedy changes as little as possible, and is checked by choosing with it: what is named here does fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.config import AdapterConfig, Config, ConfigError, ConfigProblem
from rollgraph.run.memory_choice import CHOSEN, Choice, MemoryBudget, choose, value_of, with_values
from rollgraph.run.plan_lines import gib, peak, peak_phase
from rollgraph.run.run_shape import RunShape, shape_run

MOST = 3  # remedies that are named
OPEN: dict[str, Any] = {  # the values that leave a key to us
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
    text = f"this run needs at least {gib(needed_bytes(choice))} in {peak_phase(lines)}"
    if budget.device is not None and needed_bytes(choice) > budget.device:
        text += f", {gib(budget.reserve)} in reserve included, but the device has {gib(budget.device)}"
    elif budget.host is not None:
        text = f"this run needs at least {gib(peak(lines, 'host'))} of host memory, but {gib(budget.host)} are free"
    if not remedies:
        return f"{text}. No nearby setting fits: use a smaller model or a larger device"
    return f"{text}. What would fit: {', or '.join(map(str, remedies))}"


def needed_bytes(choice: Choice) -> int:
    """On the device, with the reserve."""
    return peak(choice.settings.lines) + choice.budget.reserve


def find_remedies(config: Config, shape: RunShape, budget: MemoryBudget) -> list[Remedy]:
    """The nearest settings that fit, the nearest one first."""
    found: list[Remedy] = []
    for setting, changed in _nearby(config, shape):
        new_shape = shape_run(changed, ranks=shape.ranks, device=shape.device)
        choice = choose(changed, new_shape, budget)
        if choice.fits:
            found.append(Remedy(setting, changed, needed_bytes(choice)))
        if len(found) == MOST:
            break
    return found


def _nearby(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """Changes, the least ones first: what does not change the results, then shorter ones, then what is trained."""
    opened = {key: OPEN[key] for key in CHOSEN if value_of(config, key) != OPEN[key]}
    for key, value in opened.items():
        yield f"{key}: {_written(value)}", with_values(config, {key: value})
    if len(opened) > 1:
        yield ", ".join(f"{key}: {_written(value)}" for key, value in opened.items()), with_values(config, opened)
    if config.train.token_buckets is not None:
        yield "train.token_buckets: null", with_values(config, {"train.token_buckets": None})
    config = with_values(config, opened)
    if shape.adapters is None and config.optimizer.state != "int8":
        yield "optimizer.state: int8", with_values(config, {"optimizer.state": "int8"})
    if config.rollout.rows > 16 and not shape.samples_nothing:
        yield "rollout.rows: 16", with_values(config, {"rollout.rows": 16})
    adapted = None
    if shape.adapters is None:
        adapted = replace(config, adapter=AdapterConfig(rank=32))
        yield "adapter: {rank: 32}", adapted
    yield from _shorter(config, shape, "")
    if adapted is not None:
        yield from _shorter(adapted, shape, "adapter: {rank: 32}, ")


def _shorter(config: Config, shape: RunShape, prefix: str) -> Iterator[tuple[str, Config]]:
    """Shorter sequences, half as long each time."""
    if shape.samples_nothing:
        key, now = "data.max_tokens", shape.limits(config).max_length
    elif config.data.max_prompt_tokens is None:
        key, now = "data.max_prompt_tokens", shape.limits(config).max_length - config.rollout.max_tokens
    else:
        key, now = "rollout.max_tokens", config.rollout.max_tokens
    while now >= 128:
        now //= 2
        yield f"{prefix}{key}: {now}", with_values(config, {key: now})


def _written(value: Any) -> str:
    return "null" if value is None else str(value)
