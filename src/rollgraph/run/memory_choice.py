"""Chooses the settings of memory that the user left open: the fastest of those that fit, by plan and by estimate.

A pure function of the configuration, the shapes and the sizes of both memories, so all ranks choose alike. What the
user wrote is kept. For each microbatch, form of logits and place of optimizer state and reference weights, as few
layers as possible are recomputed and the cache is as large as possible; the least estimated time wins. If nothing fits,
the result says what would. `chosen_memory.py` applies a choice to a run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rollgraph.config import MICROBATCH_TOKENS, Config
from rollgraph.inference.defaults import BLOCK_SIZE, CPU_CACHE_BYTES
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.run.memory_plan import cache_plan, plan_lines, whole_cache
from rollgraph.run.plan_lines import GIB, PlanLine, gib, peak
from rollgraph.run.run_shape import RunShape
from rollgraph.run.step_floor import Speed
from rollgraph.run.step_time import StepTime, estimate_step

CHOSEN = (  # the keys, in the order in which they are told
    "train.microbatch_tokens",
    "memory.logits",
    "model.checkpointing",
    "optimizer.offload",
    "memory.reference",
    "memory.cache_gib",
)
_PLACES = ("optimizer.offload", "memory.reference")
_LEAST_CACHE = 1 / 16  # of what all rows can use; decoding fewer rows at a time would take too long


@dataclass(frozen=True)
class MemoryBudget:
    """What may be used. None: unknown, and no limit."""

    device: int | None = None
    host: int | None = None

    @property
    def reserve(self) -> int:
        """Kept free on the device for what no plan knows, such as memory in pieces that are too small."""
        return 0 if self.device is None else self.device // 32

    def holds(self, lines: Sequence[PlanLine]) -> bool:
        fits_device = self.device is None or peak(lines) + self.reserve <= self.device
        return fits_device and (self.host is None or peak(lines, "host") <= self.host)


@dataclass(frozen=True)
class MemorySettings:
    """One way to use memory: a configuration in which nothing is left open, with its plan and its estimate."""

    config: Config
    shape: RunShape
    speed: Speed

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        return plan_lines(self.config, self.shape)

    @cached_property
    def time(self) -> StepTime:
        return estimate_step(self.config, self.shape, self.speed)

    def changed(self, values: dict[str, Any]) -> MemorySettings:
        """With other values, by key."""
        return MemorySettings(with_values(self.config, values), self.shape, self.speed)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    settings: MemorySettings
    budget: MemoryBudget
    fits: bool
    reasons: dict[str, str]  # by key, of those that the user left open

    @property
    def config(self) -> Config:
        return self.settings.config

    @property
    def values(self) -> dict[str, Any]:
        """The values of the keys that the user left open."""
        return {key: value_of(self.config, key) for key in self.reasons}

    def describe(self) -> list[str]:
        """A few lines for people."""
        return [f"{key}: {_shown(key, value)} ({self.reasons[key]})" for key, value in self.values.items()]

    def to_dict(self) -> dict[str, Any]:
        time = self.settings.time
        return {
            "chosen": self.values,
            "reasons": self.reasons,
            "reserve_bytes": self.budget.reserve,
            "estimated_seconds": {**time.floor, **time.added, "communication": time.exposed, "total": time.total},
        }


def choose(config: Config, shape: RunShape, budget: MemoryBudget, speed: Speed | None = None) -> Choice:
    """The fastest settings that fit. If none do, those that need least, with `fits` False.

    On a CPU nothing is chosen as long as the defaults fit: results depend on these settings in their last bits.
    """
    speed = speed or Speed()
    if not shape.cuda:
        defaults = MemorySettings(config, shape, speed)
        if budget.holds(defaults.lines):
            return Choice(defaults, budget, True, {})
    open_keys = [key for key in CHOSEN if is_open(config, shape, key)]
    candidates = list(_combinations(config, shape, speed))
    found = [fitted for base in candidates if (fitted := _fit(base, config, budget))]
    if found:
        best = min(found, key=_rank)
        return Choice(best, budget, True, {key: _reason(best, key, budget) for key in open_keys})
    least = min((_smallest(base, config) for base in candidates), key=lambda settings: peak(settings.lines))
    return Choice(least, budget, False, dict.fromkeys(open_keys, "needs least"))


def _rank(settings: MemorySettings) -> tuple[float, int]:
    return settings.time.total, -settings.shape.limits(settings.config).token_buckets[-1]


# -- what there is to choose from -------------------------------------------------------------------


def is_open(config: Config, shape: RunShape, key: str) -> bool:
    """Whether the user left a key to us, and it matters for this run."""
    if key == "memory.reference" and not shape.keeps_reference:
        return False
    if key == "memory.cache_gib" and shape.samples_nothing:
        return False
    if key == "model.checkpointing" and config.adapter is not None and config.adapter.dropout:
        return False  # activations that are computed again would leave out other inputs
    if key in _PLACES and not shape.cuda:
        return False  # the host is the device
    return is_unset(config, key)


def is_unset(config: Config, key: str) -> bool:
    """Whether the user left a key to us."""
    if key == "train.microbatch_tokens" and config.train.token_buckets is not None:
        return False
    return value_of(config, key) in (None, "auto")


def _combinations(config: Config, shape: RunShape, speed: Speed) -> Iterator[MemorySettings]:
    """Every microbatch, form of logits and place of what may be on the host; no recomputation, and the whole cache."""

    def options(key: str, *values: Any) -> Sequence[Any]:
        return values if is_open(config, shape, key) else (value_of(config, key),)

    for tokens in _microbatches(config, shape):
        for logits in options("memory.logits", "whole", "chunks"):
            for offload in options("optimizer.offload", "none", "host"):
                for reference in options("memory.reference", "device", "host"):
                    values = {
                        "train.microbatch_tokens": tokens,
                        "memory.logits": logits,
                        "optimizer.offload": offload,
                        "memory.reference": reference,
                    }
                    if is_open(config, shape, "model.checkpointing"):
                        values["model.checkpointing"] = 0
                    yield MemorySettings(with_values(config, values), shape, speed)


def _microbatches(config: Config, shape: RunShape) -> list[int | None]:
    """From the default down to what the longest sequence needs; those that make the same buckets count once."""
    if not is_open(config, shape, "train.microbatch_tokens"):
        return [config.train.microbatch_tokens]
    largest = with_values(config, {"train.microbatch_tokens": MICROBATCH_TOKENS})
    longest = shape.limits(largest).max_length
    sizes = sorted({max(longest, MICROBATCH_TOKENS * part // 4 >> half) for half in range(14) for part in (3, 4)})
    found: dict[tuple[int, ...], int] = {}
    for size in reversed(sizes):
        buckets = shape.limits(with_values(config, {"train.microbatch_tokens": size})).token_buckets
        found.setdefault(buckets, size)
    return list(found.values())


def _fit(base: MemorySettings, config: Config, budget: MemoryBudget) -> MemorySettings | None:
    """The settings with the fewest recomputed layers and the largest cache that fit; None if none do."""
    sized = _fit_cache(base, config, budget)
    if not is_open(config, base.shape, "model.checkpointing"):
        return sized if budget.holds(sized.lines) else None
    low, high = 0, _most_recomputed(base.shape)
    if not budget.holds(sized.changed({"model.checkpointing": high}).lines):
        return None
    while low < high:
        middle = (low + high) // 2
        if budget.holds(sized.changed({"model.checkpointing": middle}).lines):
            high = middle
        else:
            low = middle + 1
    return sized.changed({"model.checkpointing": low})


def _fit_cache(base: MemorySettings, config: Config, budget: MemoryBudget) -> MemorySettings:
    """With the largest cache that fits, or the least one.

    Generation and training share memory, so the cache takes nothing from activations that would be recomputed for it.
    """
    if not is_open(config, base.shape, "memory.cache_gib"):
        return base
    whole = whole_cache(base.shape, base.shape.limits(base.config))
    if not base.shape.cuda:
        within = CachePlan.within(whole.architecture, whole.dtype, BLOCK_SIZE, CPU_CACHE_BYTES)
        whole = min(whole, within, key=lambda plan: plan.blocks)
    training = base
    if is_open(config, base.shape, "model.checkpointing"):
        training = base.changed({"model.checkpointing": _most_recomputed(base.shape)})

    def fits(blocks: int) -> bool:
        nbytes = replace(whole, blocks=blocks).nbytes
        return budget.holds(training.changed({"memory.cache_gib": nbytes / GIB}).lines)

    blocks = _least_blocks(base, whole)
    if fits(whole.blocks):
        blocks = whole.blocks
    elif fits(blocks):
        blocks = bisect_left(range(blocks, whole.blocks), True, key=lambda more: not fits(more)) + blocks - 1
    return base.changed({"memory.cache_gib": replace(whole, blocks=blocks).nbytes / GIB})


def _most_recomputed(shape: RunShape) -> int:
    """All layers but the last: its backward is the first, so it would be recomputed beside everything else."""
    return shape.architecture.layers - 1


def _least_blocks(base: MemorySettings, whole: CachePlan) -> int:
    """What a few rows need, and at least one."""
    limits = base.shape.limits(base.config)
    rows = max(1, int(limits.rows * _LEAST_CACHE))
    return min(whole.blocks, rows * -(-limits.max_length // BLOCK_SIZE) + 1)


def _smallest(base: MemorySettings, config: Config) -> MemorySettings:
    """The settings that need least."""
    values: dict[str, Any] = {}
    if is_open(config, base.shape, "model.checkpointing"):
        values["model.checkpointing"] = _most_recomputed(base.shape)
    if is_open(config, base.shape, "memory.cache_gib"):
        whole = whole_cache(base.shape, base.shape.limits(base.config))
        values["memory.cache_gib"] = replace(whole, blocks=_least_blocks(base, whole)).nbytes / GIB
    return base.changed(values)


# -- why --------------------------------------------------------------------------------------------


def _reason(chosen: MemorySettings, key: str, budget: MemoryBudget) -> str:
    """Why a value was chosen: the best one, or what the next better one would need."""
    better = _better(chosen, key)
    if better is None:
        return _GOOD[key]
    value = _shown(key, value_of(better.config, key))
    on_device = peak(better.lines) + budget.reserve
    if budget.device is not None and on_device > budget.device:
        return f"{value} would need {gib(on_device)} on the device, with {gib(budget.reserve)} in reserve"
    on_host = peak(better.lines, "host")
    if budget.host is not None and on_host > budget.host:
        return f"{value} would need {gib(on_host)} on the host"
    saved = better.time.total - chosen.time.total
    return f"about {saved:.2g} s a step faster than {value}"


_GOOD = {
    "train.microbatch_tokens": "the largest that a minibatch can fill",
    "memory.logits": "nothing is computed twice",
    "model.checkpointing": "all activations fit",
    "optimizer.offload": "the state fits on the device",
    "memory.reference": "the weights fit on the device",
    "memory.cache_gib": "as much as all rows can use",
}


def _better(chosen: MemorySettings, key: str) -> MemorySettings | None:
    """The same settings with the next better value of a key; None if there is none."""
    config, shape = chosen.config, chosen.shape
    if key == "train.microbatch_tokens":
        sizes = [size for size in _microbatches(with_values(config, {key: None}), shape) if size is not None]
        larger = [size for size in sizes if size > (config.train.microbatch_tokens or 0)]
        return chosen.changed({"train.microbatch_tokens": min(larger)}) if larger else None
    if key == "model.checkpointing":
        layers = shape.recomputed(config)
        return chosen.changed({"model.checkpointing": layers - 1}) if layers else None
    if key == "memory.cache_gib":
        whole = whole_cache(shape, shape.limits(config))
        if cache_plan(config, shape).blocks == whole.blocks:
            return None
        return chosen.changed({"memory.cache_gib": whole.nbytes / GIB})
    best = {"memory.logits": "whole", "optimizer.offload": "none", "memory.reference": "device"}[key]
    if value_of(config, key) == best:
        return None
    return chosen.changed({key: best})


def _shown(key: str, value: Any) -> str:
    if key == "memory.cache_gib":
        return gib(value * GIB)
    if key == "model.checkpointing":
        return f"{value} layer{'' if value == 1 else 's'}"
    return str(value)


# -- values of a configuration ----------------------------------------------------------------------


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with other values, by key."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config
