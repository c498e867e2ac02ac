"""The parts that `generate.py --vllm` times in the same way for each system: decode steps and whole rollouts.

A system is anything with `generate`; it returns when all tokens are on the host. `python benchmarks/rollouts.py SYSTEM
GROUP` measures one group with one system in this process, and reports to the process that started it. Every run has new
prompts, so that no run finds those of another in a prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from apart import report, seconds_of_process
from common import BYTES_PER_SECOND, FLOPS_PER_SECOND, QWEN_1_5B, QWEN_7B, random_decoder, synchronize

from rollgraph.inference import Engine, SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.model.meta import shapes_only

SHORT, LONG = 64, 256  # new tokens of the two runs whose difference is the time of decode steps
CACHE_BYTES = 32 << 30  # no shape needs more


@dataclass(frozen=True)
class Shape:
    """`prompts` prompts of `prompt` tokens, with `samples` completions of `new` tokens each."""

    architecture: Architecture
    prompts: int
    samples: int
    prompt: int
    new: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @cached_property
    def weights(self) -> int:
        """The number of parameters that multiply each token. An embedding that is not the head is only looked up."""
        a = self.architecture
        with shapes_only():
            parameters = sum(p.numel() for p in Decoder(a).parameters())
        return parameters if a.tied else parameters - a.vocabulary * a.hidden

    def __str__(self) -> str:
        return f"{self.prompts} x {self.samples}, {self.prompt} + {self.new:,}"


DECODE = {batch: Shape(QWEN_1_5B, batch, 1, 128, LONG) for batch in (1, 64, 512)}
ROLLOUTS = {
    "rollout": Shape(QWEN_1_5B, 32, 16, 128, 384),
    "long": Shape(QWEN_1_5B, 8, 8, 512, 4096),
    "longest": Shape(QWEN_1_5B, 4, 8, 1024, 15_360),
    "7b": Shape(QWEN_7B, 32, 16, 128, 384),
}
PARTS = ("decode", *ROLLOUTS)
# The parts of a group share a process and a set-up, sized for the group.
GROUPS = {"short": ("decode", "rollout"), "long": ("long",), "longest": ("longest",), "7b": ("7b",)}


class System(Protocol):
    kinds: tuple[str, ...]  # "plain", and "logprobs": with the log-probability of each sampled token
    settings: str

    def generate(self, prompts: list[list[int]], samples: int, new: int, kind: str) -> int:
        """Sample at temperature 1 and return the number of new tokens."""


class Rollgraph:
    kinds = ("logprobs",)  # every token has one
    settings = "bf16, graphs, exact GEMMs"

    def __init__(self, architecture: Architecture, rows: int, length: int) -> None:
        model = random_decoder(architecture)
        self.engine = Engine(model, rows=rows, max_length=length, cache_bytes=CACHE_BYTES, filters=False)

    def generate(self, prompts: list[list[int]], samples: int, new: int, kind: str) -> int:
        outputs = self.engine.generate(prompts, SamplingParams(n=samples, max_tokens=new))
        return sum(len(completion.tokens) for output in outputs for completion in output.completions)


def make_system(name: str, architecture: Architecture, rows: int, length: int) -> System:
    if name == "rollgraph":
        return Rollgraph(architecture, rows, length)
    from vllm_peer import Vllm

    return Vllm(architecture, rows, length)


class Stopwatch:
    """Times runs of a system, each with new prompts."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.seeds = itertools.count()

    def seconds(self, shape: Shape, kind: str, new: int) -> float:
        generator = torch.Generator().manual_seed(next(self.seeds))
        size = (shape.prompts, shape.prompt)
        prompts = torch.randint(0, shape.architecture.vocabulary, size, generator=generator).tolist()
        synchronize()
        start = time.perf_counter()
        tokens = self.system.generate(prompts, shape.samples, new, kind)
        seconds = time.perf_counter() - start
        assert tokens == shape.rows * new, f"{tokens} new tokens instead of {shape.rows * new}"
        return seconds

    def fastest(self, shape: Shape, kind: str, new: int, repeats: int) -> float:
        return min(self.seconds(shape, kind, new) for _ in range(repeats))

    def decode(self, repeats: int) -> dict[str, dict[str, float]]:
        """Return the milliseconds of a decode step and of the whole shorter run, for each batch."""
        kind = self.system.kinds[0]
        found = {}
        for batch, shape in DECODE.items():
            self.seconds(shape, kind, SHORT)
            short = self.fastest(shape, kind, SHORT, repeats)
            long = self.fastest(shape, kind, LONG, repeats)
            found[str(batch)] = {"step": 1e3 * (long - short) / (LONG - SHORT), "whole": 1e3 * short}
        return found

    def rollout(self, shape: Shape, repeats: int) -> dict[str, float]:
        """Return the seconds of the whole rollout, for each kind."""
        found = {}
        for kind in self.system.kinds:
            self.seconds(shape, kind, SHORT)
            found[kind] = self.fastest(shape, kind, shape.new, repeats)
        return found


def floor_of_step(shape: Shape, done: float) -> float:
    """Return the seconds of a decode step after `done` new tokens of each row.

    The larger of two times: to read the weights, and the keys and values of each prompt and each row, once; or to
    compute 2 FLOPs per weight and row.
    """
    a = shape.architecture
    places = shape.prompts * shape.prompt + shape.rows * done
    moved = 2 * shape.weights + places * a.layers * 2 * a.kv_heads * a.head_dim * 2
    computed = 2 * shape.weights * shape.rows
    return max(moved / BYTES_PER_SECOND, computed / FLOPS_PER_SECOND)


def floor_of_rollout(shape: Shape) -> float:
    """Return the seconds of all steps, with a prefill that computes each prompt once for all its samples."""
    prefill = 2 * shape.weights * shape.prompts * shape.prompt / FLOPS_PER_SECOND
    return prefill + sum(floor_of_step(shape, done) for done in range(shape.new))


def measure(name: str, group: str, parts: list[str], repeats: int) -> None:
    """Report the set-up, the first run, and each part as soon as it is done."""
    shapes = [*DECODE.values()] if "decode" in parts else []
    shapes += [ROLLOUTS[part] for part in parts if part in ROLLOUTS]
    rows = max(shape.rows for shape in shapes)
    length = max(shape.prompt + shape.new for shape in shapes)
    system = make_system(name, shapes[0].architecture, rows, length)
    synchronize()
    ready = seconds_of_process()
    stopwatch = Stopwatch(system)
    stopwatch.seconds(shapes[0], system.kinds[0], SHORT)
    start = {"ready": ready, "first": seconds_of_process(), "run": f"{shapes[0].rows} rows, {SHORT} new tokens"}
    report({"start": {group: start}, "settings": system.settings})
    if "decode" in parts:
        report({"decode": stopwatch.decode(repeats)})
    for part in parts:
        if part in ROLLOUTS:
            report({part: stopwatch.rollout(ROLLOUTS[part], repeats)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=("rollgraph", "vllm"))
    parser.add_argument("group", choices=list(GROUPS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    parts = [part for part in GROUPS[options.group] if part in options.only]
    if parts:
        measure(options.system, options.group, parts, options.repeats)


if __name__ == "__main__":
    main()
