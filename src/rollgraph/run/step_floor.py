"""The least time that a step can take on a given device, if every prompt and completion is as long as allowed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config
from rollgraph.model import Decoder
from rollgraph.policy import Limits
from rollgraph.rl.algorithms import Algorithm
from rollgraph.rl.demonstrations import COLUMNS
from rollgraph.run.inputs import scores_old

TFLOPS = 785.0  # of a bf16 matrix product, measured on one H200
TB_PER_SECOND = 4.28  # of a copy on the device, measured on one H200


@dataclass(frozen=True)
class Floor:
    """The least seconds of each part of a step."""

    repeated: dict[str, float]  # each sample has its own copy of the prompt
    shared: dict[str, float]  # the prompt of a group is computed once
    tflops: float
    tb_per_second: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "floor_seconds": {
                "repeated": {**self.repeated, "total": sum(self.repeated.values())},
                "shared": {**self.shared, "total": sum(self.shared.values())},
            },
            "tflops": self.tflops,
            "tb_per_second": self.tb_per_second,
        }


def sum_up_to(first: int, last: int, most: int) -> int:
    """The sum of min(number, most) over all whole numbers from first to last.

    >>> sum_up_to(2, 5, 3)
    11
    """
    rising = max(min(last, most), first - 1)  # the last number that counts as itself
    return (rising * (rising + 1) - first * (first - 1)) // 2 + most * (last - rising)


def step_floor(
    config: Config,
    model: Decoder,
    algorithm: Algorithm,
    limits: Limits,
    ranks: int,
    tflops: float,
    tb_per_second: float,
) -> Floor:
    """The matrix products and memory traffic that no implementation can avoid, at the speed of the device.

    A token costs 2 FLOPs per weight in the forward pass and 6 with the backward; attention itself is not counted. A
    decode step reads all weights and the keys and values of its rows; it takes as long as its FLOPs or its bytes,
    whichever is longer.
    """
    a = model.architecture
    weights = _multiplied_weights(model)
    prompts = -(-config.data.prompts_per_step // ranks)
    samples = prompts * config.rollout.samples_per_prompt
    new = min(config.rollout.max_tokens, limits.max_length - 1)
    prompt = limits.max_length - new
    flops = tflops * 1e12
    bandwidth = tb_per_second * 1e12
    itemsize = model.embed.weight.dtype.itemsize
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
        forward = 2 * weights * tokens / flops
        found = {"decode": decoded, "prefill": 2 * weights * prompts_computed * prompt / flops}
        if algorithm.needs_reference:
            found["reference"] = forward
        if scores_old(config, algorithm, exact=config.graph.exact != "off"):
            found["old log-probabilities"] = forward
        return found | {"train": _training_passes(config, model) * forward}

    full, rest = divmod(samples, rows)
    decoded = full * decode(rows) + (decode(rest) if rest else 0.0)
    return Floor(parts(samples), parts(prompts), tflops, tb_per_second)


def written_floor(
    config: Config,
    model: Decoder,
    algorithm: Algorithm,
    limits: Limits,
    ranks: int,
    tflops: float,
    tb_per_second: float,
) -> Floor:
    """The same for an algorithm that samples nothing, if all of its sequences are as long as allowed."""
    samples = -(-config.data.prompts_per_step // ranks) * len(COLUMNS[algorithm.source])
    forward = 2 * _multiplied_weights(model) * samples * limits.max_length / (tflops * 1e12)
    parts = {}
    if algorithm.source == "pairs":
        parts["policy"] = forward
    if algorithm.needs_reference:
        parts["reference"] = forward
    parts["train"] = _training_passes(config, model) * forward
    return Floor(parts, parts, tflops, tb_per_second)


def _training_passes(config: Config, model: Decoder) -> float:
    """Training in forward passes: backward is two of them, and a layer that is recomputed runs forward once more."""
    return (3 + model.checkpointing / model.architecture.layers) * config.algorithm.epochs


def _multiplied_weights(model: Decoder) -> int:
    """All but the embedding, which is a look-up, unless its weights also make the logits."""
    a = model.architecture
    table = 0 if a.tied else a.vocabulary * a.hidden
    return sum(p.numel() for p in model.parameters()) - table
