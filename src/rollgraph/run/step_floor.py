"""The least time that a step can take on a given device, if every prompt and completion is as long as allowed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config
from rollgraph.policy import Limits
from rollgraph.run.inputs import scores_old
from rollgraph.run.run_shape import RunShape

TFLOPS = 785.0  # of a bf16 matrix product, measured on one H200
TB_PER_SECOND = 4.28  # of a copy on the device, measured on one H200


@dataclass(frozen=True)
class Speed:
    """How fast a device computes and copies."""

    tflops: float = TFLOPS
    tb_per_second: float = TB_PER_SECOND

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    @property
    def bandwidth(self) -> float:
        return self.tb_per_second * 1e12


@dataclass(frozen=True)
class Floor:
    """The least seconds of each part of a step."""

    repeated: dict[str, float]  # each sample has its own copy of the prompt
    shared: dict[str, float]  # the prompt of a group is computed once
    speed: Speed

    def to_dict(self) -> dict[str, Any]:
        return {
            "floor_seconds": {
                "repeated": {**self.repeated, "total": sum(self.repeated.values())},
                "shared": {**self.shared, "total": sum(self.shared.values())},
            },
            "tflops": self.speed.tflops,
            "tb_per_second": self.speed.tb_per_second,
        }


def sum_up_to(first: int, last: int, most: int) -> int:
    """The sum of min(number, most) over all whole numbers from first to last.

    >>> sum_up_to(2, 5, 3)
    11
    """
    rising = max(min(last, most), first - 1)  # the last number that counts as itself
    return (rising * (rising + 1) - first * (first - 1)) // 2 + most * (last - rising)


def step_floor(config: Config, shape: RunShape, limits: Limits, speed: Speed) -> Floor:
    """The matrix products and memory traffic that no implementation can avoid, at the speed of the device.

    A token costs 2 FLOPs per weight in the forward pass and 6 with the backward; attention itself is not counted. With
    long prompts, only the tokens of completions are multiplied with the head. A decode step reads all weights and the
    keys and values of its rows; it takes as long as its FLOPs or its bytes, whichever is longer.
    """
    a = shape.architecture
    algorithm = shape.algorithm
    weights = shape.multiplied
    prompts = shape.prompts(config)
    samples = shape.samples(config)
    new = min(config.rollout.max_tokens, limits.max_length - 1)
    prompt = limits.max_length - new
    flops = speed.flops
    bandwidth = speed.bandwidth
    itemsize = shape.itemsize
    rows = limits.rows

    def decode(running: int) -> float:
        computed = 2 * weights * running / flops
        own = 2 * a.kv_heads * a.head_dim * itemsize * running  # bytes of one token in one layer, for all rows
        windows = [a.window(layer) or limits.max_length for layer in range(a.layers)]

        def read(step: int) -> float:
            seen = sum(min(prompt + step, window) for window in windows)
            return (weights * itemsize + own * seen) / bandwidth

        # Reading takes longer with each step, until it takes longer than computing. There is no loop over the steps,
        # because a configuration may ask for billions.
        first = bisect_left(range(1, new + 1), computed, key=read)
        seen = sum(sum_up_to(prompt + first + 1, prompt + new, window) for window in windows)
        return first * computed + ((new - first) * weights * itemsize + own * seen) / bandwidth

    def parts(prompts_computed: int) -> dict[str, float]:
        tokens = prompts_computed * prompt + samples * new
        without_logits = tokens - samples * new if limits.long_prompts else 0
        forward = 2 * (weights * tokens - a.vocabulary * a.hidden * without_logits) / flops
        found = {"decode": decoded, "prefill": 2 * weights * prompts_computed * prompt / flops}
        if algorithm.needs_reference:
            found["reference"] = forward
        if scores_old(config, algorithm, exact=config.graph.exact != "off"):
            found["old log-probabilities"] = forward
        return found | {"train": _training_passes(config, shape) * forward}

    full, rest = divmod(samples, rows)
    decoded = full * decode(rows) + (decode(rest) if rest else 0.0)
    return Floor(parts(samples), parts(prompts), speed)


def written_floor(config: Config, shape: RunShape, limits: Limits, speed: Speed) -> Floor:
    """The same for an algorithm that samples nothing, if all of its sequences are as long as allowed."""
    forward = 2 * shape.multiplied * shape.samples(config) * limits.max_length / speed.flops
    parts = {}
    if shape.algorithm.source == "pairs":
        parts["policy"] = forward
    if shape.algorithm.needs_reference:
        parts["reference"] = forward
    parts["train"] = _training_passes(config, shape) * forward
    return Floor(parts, parts, speed)


def _training_passes(config: Config, shape: RunShape) -> int:
    """Training in forward passes: the backward is two of them, or one if the weights themselves get no gradients."""
    return (3 if shape.adapters is None else 2) * config.algorithm.epochs
