"""Suggests changes to a run: a better layout, settings that fit if the run does not, and other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollgraph.config import AdapterConfig, Config, ConfigError, ConfigProblem, broken_rules
from rollgraph.inputs.shapes import find_tensor_parallel_problem, stages_through_host
from rollgraph.plan.choose import Choice, MemoryBudget, choose_settings, value_of, with_values
from rollgraph.plan.layout import GPUS_PER_NODE, Layout, candidate_layouts, has_enough_prompts
from rollgraph.plan.memory import format_bytes, peak_bytes, peak_phase
from rollgraph.plan.run_shape import RunShape, make_run_shape
from rollgraph.plan.time import Speed

# -- layouts ---------------------------------------------------------------------------------------
# We never choose the layout for the user: `shard` and `tensor_parallel` change results in their last bits, and how
# checkpoints are sharded. We propose one if the configured layout does not fit, or on request.


@dataclass(frozen=True)
class LayoutOption:
    """A layout, with its best memory settings."""

    config: Config  # with the layout, as the user would write it
    choice: Choice

    @property
    def layout(self) -> Layout:
        return self.choice.settings.shape.layout

    @property
    def seconds(self) -> float:
        """The estimated time of a step."""
        return self.choice.settings.time.total

    @property
    def required_bytes(self) -> int:
        """Bytes on the device, including the reserve."""
        return peak_bytes(self.choice.settings.lines) + self.choice.budget.reserve

    def changes(self, config: Config) -> str:
        """The settings to change in a configuration, e.g. "tensor_parallel: 8"."""
        keys = ("shard", "tensor_parallel")
        values = {key: getattr(self.config, key) for key in keys if getattr(self.config, key) != getattr(config, key)}
        return ", ".join(f"{key}: {value}" for key, value in values.items())

    def describe_need(self) -> str:
        """E.g. "needs 98.32 GiB to generate"."""
        return f"needs {format_bytes(self.required_bytes)} to {peak_phase(self.choice.settings.lines)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "shard": self.layout.shard,
            "tensor_parallel": self.layout.tensor_parallel,
            "fits": self.choice.fits,
            "needed_bytes": self.required_bytes,
            "peak_phase": peak_phase(self.choice.settings.lines),
            **self.choice.settings.time.to_dict(),
        }


def compare_layouts(
    config: Config, shape: RunShape, budget: MemoryBudget, speed: Speed | None = None
) -> list[LayoutOption]:
    """All layouts of the same ranks that the model and the rules of a configuration allow. Empty for one rank."""
    options: list[LayoutOption] = []
    if shape.layout.ranks == 1:
        return options
    staged = stages_through_host(config, shape.layout.ranks, shape.device)
    for layout in candidate_layouts(shape.layout):
        changed = replace(config, shard=layout.shard, tensor_parallel=layout.tensor_parallel)
        if (
            broken_rules(changed)
            or find_tensor_parallel_problem(changed, shape.full_architecture, staged)
            or not has_enough_prompts(changed, layout)
        ):
            continue
        options.append(LayoutOption(changed, choose_settings(changed, shape.with_config(changed), budget, speed)))
    return options


def fastest_layout(options: Sequence[LayoutOption]) -> LayoutOption | None:
    """The fastest layout that fits, the simplest among equally fast ones; None if none fits."""
    fitting = [option for option in options if option.choice.fits]
    return min(fitting, key=lambda option: option.seconds, default=None)


def describe_proposal(choice: Choice, options: Sequence[LayoutOption]) -> str:
    """One sentence: what the configured layout needs, and which one to use instead. Empty if none is better."""
    best = fastest_layout(options)
    current = LayoutOption(choice.config, choice)
    if best is None or best.layout == current.layout:
        return ""
    current_text = f"{current.layout.describe()} {current.describe_need()} on each of {current.layout.ranks} ranks"
    best_text = f"{best.changes(choice.config)} ({best.describe_need()}, about {best.seconds:.3g} s a step)"
    if not choice.fits:
        has = "" if choice.budget.device is None else f", which have {format_bytes(choice.budget.device)}"
        return f"{current_text}{has}: use {best_text}"
    return f"{current_text} and about {current.seconds:.3g} s a step: {best_text} is faster"


# -- settings that fit -----------------------------------------------------------------------------
# Each suggestion changes as little as possible, and is checked by planning with it: every suggestion does fit.

SUGGESTED_ROWS = 16  # suggested `rollout.rows`
MIN_SUGGESTED_TOKENS = 128  # we suggest no limit much shorter than this
AUTO_VALUES: dict[str, Any] = {  # with this value, we choose the setting
    "train.token_buckets": None,
    "train.microbatch_tokens": None,
    "memory.logits": "auto",
    "model.checkpointing": "auto",
    "optimizer.offload": "auto",
    "memory.reference": "auto",
    "memory.cache_gib": None,
}


@dataclass(frozen=True)
class Suggestion:
    """Settings with which the run would fit, e.g. Suggestion("optimizer.state: int8", 97 << 30)."""

    setting: str  # as written in a configuration
    config: Config
    required_bytes: int  # bytes on the device, including the reserve

    def __str__(self) -> str:
        return f"{self.setting} (needs {format_bytes(self.required_bytes)})"


class DoesNotFit(ConfigError):
    """A run that does not fit into memory with any memory settings."""

    def __init__(self, choice: Choice, suggestions: list[Suggestion]) -> None:
        self.choice = choice
        self.suggestions = suggestions
        super().__init__([ConfigProblem(describe_misfit(choice, suggestions), "memory", rule="memory_fits")])


def describe_misfit(choice: Choice, suggestions: list[Suggestion]) -> str:
    """How much memory a run needs and has, and which settings would fit."""
    lines, budget = choice.settings.lines, choice.budget
    assert budget.device is not None or budget.host is not None, "a run does not fit only into a known amount of memory"
    layout = choice.settings.shape.layout
    ranks = "" if layout.ranks == 1 else f" on each of {layout.ranks} ranks with {layout.describe()}"
    text = f"this run needs at least {format_bytes(required_bytes(choice))} in {peak_phase(lines)}{ranks}"
    if budget.device is not None and required_bytes(choice) > budget.device:
        text += (
            f", {format_bytes(budget.reserve)} in reserve included, but the device has {format_bytes(budget.device)}"
        )
    elif budget.host is not None:
        needed = f"{format_bytes(peak_bytes(lines, 'host'))} of host memory{ranks}"
        text = f"this run needs at least {needed}, but {format_bytes(budget.host)} are free"
    if not suggestions:
        return f"{text}. No nearby setting fits: use a smaller model or a larger device"
    return f"{text}. What would fit: {', or '.join(map(str, suggestions))}"


def required_bytes(choice: Choice) -> int:
    """Bytes on the device, including the reserve."""
    return peak_bytes(choice.settings.lines) + choice.budget.reserve


def suggest_settings(
    config: Config, shape: RunShape, budget: MemoryBudget, layouts: Sequence[LayoutOption] | None = None
) -> list[Suggestion]:
    """Settings that fit: the fastest layout, then other settings, the smallest change first.

    `layouts` is the result of `compare_layouts`, if it was called already.
    """
    if layouts is None:
        layouts = compare_layouts(config, shape, budget)
    fitting: list[Suggestion] = []
    best = fastest_layout(layouts)
    if best is not None:
        fitting.append(Suggestion(best.changes(config), best.config, best.required_bytes))
    for alternatives in (
        _with_auto_keys(config),
        _with_less_state(config, shape),
        _with_adapters(config, shape),
        _with_shorter_sequences(config, shape),
    ):
        suggestions = (_suggest_if_it_fits(setting, changed, shape, budget) for setting, changed in alternatives)
        fitting += filter(None, [next(filter(None, suggestions), None)])
    if not fitting and shape.lora_columns is None:
        for adapted in _with_adapters(config, shape):
            both = (
                (f"{adapted[0]}, {setting}", changed) for setting, changed in _with_shorter_sequences(adapted[1], shape)
            )
            suggestions = (_suggest_if_it_fits(setting, changed, shape, budget) for setting, changed in both)
            fitting += filter(None, [next(filter(None, suggestions), None)])
    return fitting


def _suggest_if_it_fits(setting: str, config: Config, shape: RunShape, budget: MemoryBudget) -> Suggestion | None:
    layout = shape.layout
    changed = make_run_shape(
        config,
        ranks=layout.ranks,
        nodes=layout.nodes,
        network=layout.network,
        device=shape.device,
        prompt_lengths=shape.prompt_lengths,
    )
    choice = choose_settings(config, changed, budget)
    return Suggestion(setting, config, required_bytes(choice)) if choice.fits else None


def _with_auto_keys(config: Config) -> Iterator[tuple[str, Config]]:
    """Let us choose a setting that the user wrote: one key, or all of them."""
    explicit = {key: AUTO_VALUES[key] for key in AUTO_VALUES if value_of(config, key) != AUTO_VALUES[key]}
    for key, value in explicit.items():
        yield f"{key}: {_yaml_value(value)}", with_values(config, {key: value})
    if len(explicit) > 1:
        setting = ", ".join(f"{key}: {_yaml_value(value)}" for key, value in explicit.items())
        yield setting, with_values(config, explicit)


def _with_less_state(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """The same training with less state, or fewer sequences at a time."""
    if shape.lora_columns is None and config.optimizer.state != "int8":
        yield "optimizer.state: int8", with_values(config, {"optimizer.state": "int8"})
    if config.rollout.rows > SUGGESTED_ROWS and not shape.trains_offline:
        yield f"rollout.rows: {SUGGESTED_ROWS}", with_values(config, {"rollout.rows": SUGGESTED_ROWS})


def _with_adapters(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """Train adapters instead of all weights."""
    if shape.lora_columns is None:
        yield "adapter: {rank: 32}", replace(config, adapter=AdapterConfig(rank=32))


def _with_shorter_sequences(config: Config, shape: RunShape) -> Iterator[tuple[str, Config]]:
    """Shorter sequences: half as long, a quarter, and so on."""
    longest = shape.limits(config).max_length
    key, limit = "rollout.max_tokens", config.rollout.max_tokens
    if shape.trains_offline:
        key, limit = "data.max_tokens", longest
    elif config.data.max_prompt_tokens is None and shape.prompt_lengths is None:
        key, limit = "data.max_prompt_tokens", longest - config.rollout.max_tokens
    while limit >= MIN_SUGGESTED_TOKENS:
        limit //= 2
        yield f"{key}: {limit}", with_values(config, {key: limit})


def _yaml_value(value: Any) -> str:
    return "null" if value is None else str(value)


# -- scaling ---------------------------------------------------------------------------------------
# Every number of GPUs is planned as a separate run, with its best memory settings. Times are the estimates that also
# rank settings (`time.py`, with the model of communication in `layout.py`); they are not measurements.

MAX_GPUS = 1024
ScaledWork = Literal["fixed", "grown"]


@dataclass(frozen=True)
class ScalePoint:
    """The planned run on some number of GPUs."""

    choice: Choice
    prompts: int  # per step, on all ranks

    @property
    def layout(self) -> Layout:
        return self.choice.settings.shape.layout

    @property
    def seconds(self) -> float:
        return self.choice.settings.time.total

    @property
    def prompts_per_gpu_second(self) -> float:
        """Throughput per GPU."""
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
    """The same layout, planned from few GPUs to many."""

    work: ScaledWork
    points: tuple[ScalePoint, ...]

    def efficiency(self, point: ScalePoint) -> float | None:
        """The speed per GPU relative to the smallest run that fits; None if this one does not fit."""
        if not point.choice.fits:
            return None
        smallest = next(candidate for candidate in self.points if candidate.choice.fits)
        return point.prompts_per_gpu_second / smallest.prompts_per_gpu_second

    def to_dict(self) -> dict[str, Any]:
        points = [{**point.to_dict(), "efficiency": self.efficiency(point)} for point in self.points]
        return {"work": self.work, "points": points}


def scale_run(config: Config, shape: RunShape, budget: MemoryBudget, speed: Speed, work: ScaledWork) -> Scaling:
    """Plan the run from one tensor parallel group up to 1,024 GPUs.

    With "fixed" work (strong scaling), a step has the configured prompts, and we stop when there are too few prompts
    for all ranks. With "grown" work (weak scaling), prompts grow in proportion to the GPUs.
    """
    points = []
    for ranks, nodes in _sizes(shape.layout):
        prompts = config.data.prompts_per_step
        if work == "grown":
            prompts = max(1, prompts * ranks // shape.layout.ranks)
        changed = replace(config, data=replace(config.data, prompts_per_step=prompts))
        scaled = shape.with_config(changed, ranks=ranks, nodes=nodes)
        if not has_enough_prompts(changed, scaled.layout):
            break
        points.append(ScalePoint(choose_settings(changed, scaled, budget, speed), prompts))
    return Scaling(work, tuple(points))


def _sizes(layout: Layout) -> Iterator[tuple[int, int]]:
    """(ranks, nodes): ranks double until a node is full, then the number of nodes doubles."""
    node = layout.per_node if layout.nodes > 1 else max(GPUS_PER_NODE, layout.per_node)
    ranks = layout.tensor_parallel
    while ranks < node:
        yield ranks, 1
        ranks *= 2
    nodes = 1
    while nodes * node <= MAX_GPUS:
        yield nodes * node, nodes
        nodes *= 2
