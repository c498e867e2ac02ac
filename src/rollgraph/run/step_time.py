"""The estimated time of a step under some settings of memory: the floor, and what the settings add to it.

It ranks settings; it does not predict a clock. Everything runs at the speeds of the floor, which are those of large
matrix products and copies, and the settings cost what they compute or move in addition:

- a microbatch reads the weights once for each pass over them, reads and writes the gradients, and launches kernels;
- a recomputed layer costs its forward a second time, and logits in chunks cost the head's product a second time;
- optimizer state on the host crosses the bus twice, in both directions at once; on the device, it is read and written;
- reference weights are exchanged with those of the policy and back, over the bus or on the device;
- a cache that cannot hold all rows decodes as many rows at a time as it can hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollgraph.config import Config
from rollgraph.model.logprobs import chunk_rows
from rollgraph.run.memory_plan import cache_plan, planned_weights
from rollgraph.run.run_shape import RunShape
from rollgraph.run.step_floor import Speed, step_floor, written_floor

SECONDS_OF_LAUNCHES = 2e-4  # of the kernels of one layer, forward and backward
HOST_BYTES_PER_SECOND = 50e9  # between pinned memory and the device, in each direction; PCIe 5.0


@dataclass(frozen=True)
class StepTime:
    """Seconds by what they are for."""

    floor: dict[str, float]
    added: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.floor.values()) + sum(self.added.values())


def estimate_step(config: Config, shape: RunShape, speed: Speed) -> StepTime:
    limits = shape.limits(config)
    if shape.samples_nothing:
        floor = written_floor(config, shape, limits, speed)
    else:
        held = max(1, min(limits.rows, cache_plan(config, shape).tokens // limits.max_length))
        floor = step_floor(config, shape, replace(limits, rows=held), speed)
    tokens = limits.max_length * shape.samples(config)
    passes = config.algorithm.epochs
    updates = passes * config.algorithm.minibatches
    added = _microbatches(config, shape, speed, tokens)
    a = shape.architecture
    in_layers = shape.multiplied - a.vocabulary * a.hidden
    again = 2 * in_layers * shape.recomputed(config) / a.layers
    added["recomputed layers"] = passes * again * tokens / speed.flops
    bucket = limits.token_buckets[-1]
    if config.memory.logits == "chunks" and chunk_rows(bucket, a.vocabulary) < bucket:
        added["logits, computed twice"] = passes * 2 * a.vocabulary * a.hidden * tokens / speed.flops
    state = planned_weights(config, shape).optimizer
    moving = state.host / HOST_BYTES_PER_SECOND + 2 * state.device / speed.bandwidth
    added["optimizer"] = updates * moving
    if shape.keeps_reference:
        weights = 2 * shape.trained * shape.itemsize  # there and back
        over_bus = config.memory.reference == "host"
        added["exchange of weights"] = weights / HOST_BYTES_PER_SECOND if over_bus else 4 * weights / speed.bandwidth
    return StepTime(floor.shared, added)


def _microbatches(config: Config, shape: RunShape, speed: Speed, tokens: int) -> dict[str, float]:
    """What each microbatch moves, however small it is."""
    count = -(-tokens // shape.limits(config).token_buckets[-1])
    gradients = shape.trained * (2 * shape.itemsize + 2 * 4)  # written and read; those in fp32 are read and written
    weights = 3 * shape.multiplied * shape.itemsize
    moving = (gradients + weights) / speed.bandwidth
    launching = shape.architecture.layers * SECONDS_OF_LAUNCHES
    return {"microbatches": config.algorithm.epochs * count * (moving + launching)}
