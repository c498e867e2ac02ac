"""Chooses the memory settings that the user left to us: the fastest that fit, by memory plan and estimated step time.

A pure function of the configuration, the shapes and the sizes of device and host memory, so all ranks choose alike.
Settings that the user wrote are kept. We try each microbatch size, whole or chunked logits, and optimizer state and
reference weights on device or host. For each combination we recompute as few layers and make the KV cache as large as
possible; the shortest estimated step wins. If nothing fits, the result has the settings that need the least memory.
`chosen_memory.py` applies a choice to a run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rollgraph.config import DEFAULT_MICROBATCH_TOKENS, Config
from rollgraph.inference.kv_cache import CachePlan, usable_blocks
from rollgraph.inference.sizes import BLOCK_SIZE, CPU_CACHE_BYTES
from rollgraph.plan.memory import GIB, PlanLine, cache_plan, format_bytes, full_cache_plan, peak_bytes, plan_lines
from rollgraph.plan.run_shape import RunShape
from rollgraph.plan.time import Speed, StepTime, estimate_step

MEMORY_KEYS = (  # in the order in which they are printed
    "train.microbatch_tokens",
    "memory.logits",
    "model.checkpointing",
    "optimizer.offload",
    "memory.reference",
    "memory.cache_gib",
)
_OFFLOAD_KEYS = ("optimizer.offload", "memory.reference")
_MIN_CACHE_FRACTION = 1 / 16  # of a full cache; with less, decoding so few rows at a time would take too long


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that may be used on the device and on the host. None: unknown, so not limited."""

    device: int | None = None
    host: int | None = None

    @property
    def reserve(self) -> int:
        """Bytes kept free on the device for what the plan does not cover, such as fragmentation."""
        return 0 if self.device is None else self.device // 32

    def fits(self, lines: Sequence[PlanLine]) -> bool:
        fits_device = self.device is None or peak_bytes(lines) + self.reserve <= self.device
        return fits_device and (self.host is None or peak_bytes(lines, "host") <= self.host)


@dataclass(frozen=True)
class MemorySettings:
    """A configuration with all memory settings decided, with its memory plan and its estimated time."""

    config: Config
    shape: RunShape
    speed: Speed

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        return plan_lines(self.config, self.shape)

    @cached_property
    def time(self) -> StepTime:
        return estimate_step(self.config, self.shape, self.speed)

    def with_values(self, values: dict[str, Any]) -> MemorySettings:
        """The same with other values, by key."""
        return MemorySettings(with_values(self.config, values), self.shape, self.speed)


@dataclass(frozen=True)
class Choice:
    """The chosen settings, and why each was chosen."""

    settings: MemorySettings
    budget: MemoryBudget
    fits: bool
    reasons: dict[str, str]  # by key; only keys that the user left to us

    @property
    def config(self) -> Config:
        return self.settings.config

    @property
    def values(self) -> dict[str, Any]:
        """The chosen values, by key."""
        return {key: value_of(self.config, key) for key in self.reasons}

    def describe(self) -> list[str]:
        """One line per key, for the terminal."""
        return [f"{key}: {_format_value(key, value)} ({self.reasons[key]})" for key, value in self.values.items()]

    def to_dict(self) -> dict[str, Any]:
        time = self.settings.time
        return {
            "chosen": self.values,
            "reasons": self.reasons,
            "reserve_bytes": self.budget.reserve,
            "estimated_seconds": {**time.floor, **time.added, "communication": time.exposed, "total": time.total},
        }


def choose_settings(config: Config, shape: RunShape, budget: MemoryBudget, speed: Speed | None = None) -> Choice:
    """The fastest settings that fit. If none do, those that need the least memory, with `fits` False.

    On a CPU we keep the defaults as long as they fit, because results depend on these settings in their last bits.
    """
    speed = speed or Speed()
    if not shape.cuda:
        defaults = MemorySettings(config, shape, speed)
        if budget.fits(defaults.lines):
            return Choice(defaults, budget, True, {})
    auto_keys = [key for key in MEMORY_KEYS if is_auto(config, shape, key)]
    candidates = list(_candidates(config, shape, speed))
    fitting = [fitted for base in candidates if (fitted := _fit(base, config, budget))]
    if fitting:
        best = min(fitting, key=_preference)
        return Choice(best, budget, True, {key: _reason(best, key, budget) for key in auto_keys})
    smallest = min(
        (_least_memory(base, config) for base in candidates), key=lambda settings: peak_bytes(settings.lines)
    )
    return Choice(smallest, budget, False, dict.fromkeys(auto_keys, "needs least"))


def _preference(settings: MemorySettings) -> tuple[float, int]:
    return settings.time.total, -settings.shape.limits(settings.config).token_buckets[-1]


# -- candidates ------------------------------------------------------------------------------------


def is_auto(config: Config, shape: RunShape, key: str) -> bool:
    """Whether we choose the value of a key: the user left it to us, and it matters for this run."""
    if key == "memory.reference" and not shape.stores_reference:
        return False
    if key == "memory.cache_gib" and shape.trains_offline:
        return False
    if key == "model.checkpointing" and config.adapter is not None and config.adapter.dropout:
        return False  # recomputed activations would drop other inputs
    if key in _OFFLOAD_KEYS and not shape.cuda:
        return False  # there is only host memory
    return is_unset(config, key)


def is_unset(config: Config, key: str) -> bool:
    """Whether the user left a key unset or `auto`."""
    if key == "train.microbatch_tokens" and config.train.token_buckets is not None:
        return False
    return value_of(config, key) in (None, "auto")


def _candidates(config: Config, shape: RunShape, speed: Speed) -> Iterator[MemorySettings]:
    """Every combination of microbatch size, logits, and state on device or host; without recomputation yet."""

    def options(key: str, *values: Any) -> Sequence[Any]:
        return values if is_auto(config, shape, key) else (value_of(config, key),)

    for tokens in _microbatch_sizes(config, shape):
        for logits in options("memory.logits", "whole", "chunks"):
            for offload in options("optimizer.offload", "none", "host"):
                for reference in options("memory.reference", "device", "host"):
                    values = {
                        "train.microbatch_tokens": tokens,
                        "memory.logits": logits,
                        "optimizer.offload": offload,
                        "memory.reference": reference,
                    }
                    if is_auto(config, shape, "model.checkpointing"):
                        values["model.checkpointing"] = 0
                    yield MemorySettings(with_values(config, values), shape, speed)


def _microbatch_sizes(config: Config, shape: RunShape) -> list[int | None]:
    """Microbatch sizes from the default down to the longest sequence, one for each distinct set of token buckets."""
    if not is_auto(config, shape, "train.microbatch_tokens"):
        return [config.train.microbatch_tokens]
    largest = with_values(config, {"train.microbatch_tokens": DEFAULT_MICROBATCH_TOKENS})
    longest = shape.limits(largest).max_length
    sizes = sorted(
        {max(longest, DEFAULT_MICROBATCH_TOKENS * part // 4 >> half) for half in range(14) for part in (3, 4)}
    )
    size_by_buckets: dict[tuple[int, ...], int] = {}
    for size in reversed(sizes):
        buckets = shape.limits(with_values(config, {"train.microbatch_tokens": size})).token_buckets
        size_by_buckets.setdefault(buckets, size)
    return list(size_by_buckets.values())


def _fit(base: MemorySettings, config: Config, budget: MemoryBudget) -> MemorySettings | None:
    """The settings with the fewest recomputed layers and the largest cache that fit; None if none do."""
    sized = _fit_cache(base, config, budget)
    if not is_auto(config, base.shape, "model.checkpointing"):
        return sized if budget.fits(sized.lines) else None
    low, high = 0, _max_recomputed(base.shape)
    if not budget.fits(sized.with_values({"model.checkpointing": high}).lines):
        return None
    while low < high:
        middle = (low + high) // 2
        if budget.fits(sized.with_values({"model.checkpointing": middle}).lines):
            high = middle
        else:
            low = middle + 1
    return sized.with_values({"model.checkpointing": low})


def _fit_cache(base: MemorySettings, config: Config, budget: MemoryBudget) -> MemorySettings:
    """The settings with the largest cache that fits, or the smallest one.

    Generation and training share memory, so a larger cache does not force layers to be recomputed.
    """
    if not is_auto(config, base.shape, "memory.cache_gib"):
        return base
    full = full_cache_plan(base.shape, base.shape.limits(base.config))
    if not base.shape.cuda:
        cpu_limit = CachePlan.within(full.architecture, full.dtype, BLOCK_SIZE, CPU_CACHE_BYTES)
        full = min(full, cpu_limit, key=lambda plan: plan.blocks)
    training = base
    if is_auto(config, base.shape, "model.checkpointing"):
        training = base.with_values({"model.checkpointing": _max_recomputed(base.shape)})

    def fits(blocks: int) -> bool:
        nbytes = replace(full, blocks=blocks).nbytes
        return budget.fits(training.with_values({"memory.cache_gib": nbytes / GIB}).lines)

    blocks = _min_blocks(base, full)
    if fits(full.blocks):
        blocks = full.blocks
    elif fits(blocks):
        blocks = bisect_left(range(blocks, full.blocks), True, key=lambda more: not fits(more)) + blocks - 1
    return base.with_values({"memory.cache_gib": replace(full, blocks=blocks).nbytes / GIB})


def _max_recomputed(shape: RunShape) -> int:
    """All layers but the last. Its backward runs first, while all other activations are still alive."""
    return shape.architecture.layers - 1


def _min_blocks(base: MemorySettings, full: CachePlan) -> int:
    """The blocks that `_MIN_CACHE_FRACTION` of the rows need, and at least one row."""
    limits = base.shape.limits(base.config)
    rows = max(1, int(limits.rows * _MIN_CACHE_FRACTION))
    return min(full.blocks, usable_blocks(rows, limits.max_length, BLOCK_SIZE, limits.longest_generated))


def _least_memory(base: MemorySettings, config: Config) -> MemorySettings:
    """The settings that need the least memory."""
    values: dict[str, Any] = {}
    if is_auto(config, base.shape, "model.checkpointing"):
        values["model.checkpointing"] = _max_recomputed(base.shape)
    if is_auto(config, base.shape, "memory.cache_gib"):
        full = full_cache_plan(base.shape, base.shape.limits(base.config))
        values["memory.cache_gib"] = replace(full, blocks=_min_blocks(base, full)).nbytes / GIB
    return base.with_values(values)


# -- reasons ---------------------------------------------------------------------------------------


def _reason(chosen: MemorySettings, key: str, budget: MemoryBudget) -> str:
    """Why a value was chosen: it is the best one, or what the next better one would need."""
    better = _next_better(chosen, key)
    if better is None:
        return _BEST_REASONS[key]
    value = _format_value(key, value_of(better.config, key))
    needed = peak_bytes(better.lines) + budget.reserve
    if budget.device is not None and needed > budget.device:
        return (
            f"{value} would need {format_bytes(needed)} on the device, with {format_bytes(budget.reserve)} in reserve"
        )
    on_host = peak_bytes(better.lines, "host")
    if budget.host is not None and on_host > budget.host:
        return f"{value} would need {format_bytes(on_host)} on the host"
    saved = better.time.total - chosen.time.total
    return f"about {saved:.2g} s a step faster than {value}"


_BEST_REASONS = {
    "train.microbatch_tokens": "the largest that a minibatch can fill",
    "memory.logits": "nothing is computed twice",
    "model.checkpointing": "all activations fit",
    "optimizer.offload": "the state fits on the device",
    "memory.reference": "the weights fit on the device",
    "memory.cache_gib": "as much as all rows can use",
}


def _next_better(chosen: MemorySettings, key: str) -> MemorySettings | None:
    """The same settings with the next better value of a key; None if the value is the best."""
    config, shape = chosen.config, chosen.shape
    if key == "train.microbatch_tokens":
        sizes = [size for size in _microbatch_sizes(with_values(config, {key: None}), shape) if size is not None]
        larger = [size for size in sizes if size > (config.train.microbatch_tokens or 0)]
        return chosen.with_values({"train.microbatch_tokens": min(larger)}) if larger else None
    if key == "model.checkpointing":
        layers = shape.recomputed_layers(config)
        return chosen.with_values({"model.checkpointing": layers - 1}) if layers else None
    if key == "memory.cache_gib":
        full = full_cache_plan(shape, shape.limits(config))
        if cache_plan(config, shape).blocks == full.blocks:
            return None
        return chosen.with_values({"memory.cache_gib": full.nbytes / GIB})
    best = {"memory.logits": "whole", "optimizer.offload": "none", "memory.reference": "device"}[key]
    if value_of(config, key) == best:
        return None
    return chosen.with_values({key: best})


def _format_value(key: str, value: Any) -> str:
    if key == "memory.cache_gib":
        return format_bytes(value * GIB)
    if key == "model.checkpointing":
        return f"{value} layer{'' if value == 1 else 's'}"
    return str(value)


# -- values of a configuration ---------------------------------------------------------------------


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with other values, by key."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config
