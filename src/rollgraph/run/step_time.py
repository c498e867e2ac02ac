"""The estimated time of a step under some settings of memory: the floor, and what the settings add to it.

It ranks settings; it does not predict a clock. Everything runs at the speeds of the floor, which are those of large
matrix products and copies, and the settings cost what they compute or move in addition:

- each microbatch costs as much as some more tokens, for small matrix products are slow, and moves all gradients;
- a recomputed layer costs its forward a second time, and logits in chunks cost the head's product a second time;
- optimizer state on the host crosses the bus twice, in both directions at once; on the device, it is read and written;
- reference weights are exchanged with those of the policy and back, over the bus or on the device;
- a cache that cannot hold all rows decodes as many rows at a time as it can hold;
- several ranks communicate, and what computing does not hide is added (`step_communication.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollgraph.config import Config
from rollgraph.model.logprobs import chunk_rows
from rollgraph.run.memory_plan import cache_plan, planned_weights
from rollgraph.run.plan_lines import PHASES, Phase
from rollgraph.run.run_shape import RunShape
from rollgraph.run.step_communication import Exchange, step_exchanges
from rollgraph.run.step_floor import Speed, step_floor, written_floor

TOKENS_OF_MICROBATCH = 900  # that each microbatch costs in addition, measured on an H200 with 4,096 to 16,384 tokens
HOST_BYTES_PER_SECOND = 50e9  # between pinned memory and the device, in each direction; PCIe 5.0


_GENERATED = ("decode", "prefill")
_PHASES: dict[str, Phase] = {  # everything else is training; what microbatches add counts there, too
    **dict.fromkeys(_GENERATED, "generate"),
    **dict.fromkeys(("reference", "old log-probabilities", "policy", "exchange of weights"), "score"),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds by what they are for."""

    floor: dict[str, float]
    added: dict[str, float]
    exchanges: tuple[Exchange, ...] = ()

    @property
    def exposed(self) -> float:
        """The seconds of communication in which nothing is computed."""
        return sum(exchange.exposed for exchange in self.exchanges)

    @property
    def total(self) -> float:
        return sum(self.floor.values()) + sum(self.added.values()) + self.exposed

    def of_phase(self, phase: Phase) -> float:
        computed = {**self.floor, **self.added}
        seconds = sum(value for name, value in computed.items() if _PHASES.get(name, "train") == phase)
        return seconds + sum(exchange.exposed for exchange in self.exchanges if exchange.phase == phase)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": {**{phase: self.of_phase(phase) for phase in PHASES}, "total": self.total},
            "exposed_seconds": self.exposed,
        }


def estimate_step(config: Config, shape: RunShape, speed: Speed) -> StepTime:
    limits = shape.limits(config)
    held = limits.rows
    if shape.samples_nothing:
        floor = written_floor(config, shape, limits, speed).shared
    else:
        held = max(1, min(limits.rows, cache_plan(config, shape).tokens // limits.max_length))
        floor = step_floor(config, shape, replace(limits, rows=held), speed).shared
    epochs = config.algorithm.epochs
    bucket = limits.token_buckets[-1]
    tokens = shape.tokens(config)
    a = shape.architecture
    head = a.vocabulary * a.hidden
    added = {"recomputed layers": (shape.multiplied - head) * shape.recomputed(config) / a.layers}
    if config.memory.logits == "chunks" and chunk_rows(bucket, a.vocabulary) < bucket:
        added["logits, computed twice"] = head * (shape.asked(config) / tokens if limits.long_prompts else 1.0)
    added = {name: epochs * 2 * weights * tokens / speed.flops for name, weights in added.items()}
    passes = sum(seconds for name, seconds in floor.items() if name not in _GENERATED)
    added["microbatches"] = (passes + sum(added.values())) * TOKENS_OF_MICROBATCH / bucket
    added["gradients"] = epochs * tokens / bucket * _moved_by_microbatch(shape) / speed.bandwidth
    state = planned_weights(config, shape).optimizer
    updates = epochs * config.algorithm.minibatches
    added["optimizer"] = updates * (state.host / HOST_BYTES_PER_SECOND + 2 * state.device / speed.bandwidth)
    if shape.keeps_reference:
        weights = 2 * shape.trained * shape.itemsize  # there and back
        over_bus = config.memory.reference == "host"
        added["exchange of weights"] = weights / HOST_BYTES_PER_SECOND if over_bus else 4 * weights / speed.bandwidth
    scored = [name for name in floor if _PHASES.get(name) == "score"]
    exchanges = step_exchanges(config, shape, speed, rows=held, score_passes=len(scored))
    return StepTime(floor, added, exchanges)


def _moved_by_microbatch(shape: RunShape) -> int:
    """Gradients are written and read, and those in fp32 are read and written."""
    return shape.trained * (2 * shape.itemsize + 2 * 4)
