"""The log of a run: the terminal, metrics and sample completions, step by step.

Owns the view, the sinks, and the metrics and times of the step in progress. Only rank 0 writes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from rollgraph.config import Config, to_dict
from rollgraph.distributed.world import World
from rollgraph.run.memory_meter import MemoryMeter
from rollgraph.telemetry import SampleWriter, View, close_sinks, make_sinks
from rollgraph.telemetry.metrics import Metrics, Sink
from rollgraph.telemetry.token_values import SampleDetails, TokenTexts
from rollgraph.types import Batch, Rollout

OnStep = Callable[[int, dict[str, float]], None]  # is given the number of a step and its metrics
BASELINE = -1  # the step of the validation before the first one
OnProgress = Callable[[int, int], None]  # how much is done, and of how much


class StepLog:
    """What people see of each step. `on_step` is called on rank 0."""

    def __init__(self, config: Config, world: World, view: View | None = None, on_step: OnStep | None = None) -> None:
        self.view = view or View()
        self.reward_weights: Mapping[str, float] = {}  # by the label of the function
        self.token_texts: TokenTexts | None = None  # None: no policy sampled the tokens that are logged
        self.examined: Sequence[Rollout] = ()  # by the last validation
        self.dropped: Sequence[Rollout] = ()  # sampled in the step in progress, and not trained on
        self.baseline: dict[str, float] = {}  # the validation before the first step, where there was one
        self.pending: dict[str, float] = {}  # metrics of the step in progress
        self.seconds: dict[str, float] = defaultdict(float)  # of the step in progress, by phase
        self.memory = MemoryMeter(world.device)
        self._on_step = on_step
        self.config = config  # of the run; replaced once everything in it is chosen
        self._world = world
        self._sinks: list[Sink] = []
        self._metrics = Metrics(self._sinks)
        self._samples: SampleWriter | None = None
        self._started = 0.0
        self._noted: set[str] = set()  # conditions that hold and have been told

    @contextmanager
    def writing(self, first_step: int) -> Iterator[None]:
        """Open the files of the run; what they hold of `first_step` and later is cut off."""
        if self._world.rank == 0:
            folder = Path(self.config.output)
            log = self.config.log
            resume_at = first_step or BASELINE
            self._sinks += make_sinks(log, folder, resume_at=resume_at, run_config=to_dict(self.config))
            self._samples = SampleWriter(
                folder,
                every=log.samples_every,
                groups=log.sample_groups,
                seed=self.config.seed,
                weights=self.reward_weights,
                texts=self.token_texts,
                longest=log.token_values,
                resume_at=resume_at,
            )
            if self.baseline:
                self._metrics.log(BASELINE, self.baseline)
                self._samples.write_validation(BASELINE, self.examined)
        self.seconds.clear()  # a warm start and the validation before the first step are not part of it
        self.memory.by_phase.clear()
        self._started = time.perf_counter()
        try:
            yield
        finally:
            close_sinks(self._sinks)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.memory.begin()
        try:
            with self._world.in_phase(phase):
                yield
        finally:
            if self._world.device.startswith("cuda"):
                torch.cuda.synchronize()
            self.seconds[phase] += time.perf_counter() - start
            self.memory.end(phase)

    @contextmanager
    def phase(self, name: str, *, in_bytes: bool = False) -> Iterator[OnProgress]:
        """Show a phase outside of steps. It is given a function to call with how much is done, and of how much."""
        self.view.phase(name, 0, 0)
        with self._world.in_phase(name):
            yield partial(self.view.phase, name, in_bytes=in_bytes)
        self.view.end_phase()

    def note(self, text: str) -> None:
        """Show one line that stays. What rewards and tools say of a failure need not be text that can be printed."""
        self.view.note(text.encode("utf-8", "replace").decode())

    def note_while(self, holds: bool, condition: str, text: str) -> None:
        """Show a line when a condition begins to hold, and not again until it has ended."""
        if holds and condition not in self._noted:
            self.note(text)
            self._noted.add(condition)
        elif not holds:
            self._noted.discard(condition)

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        batch: Batch,
        values: Mapping[str, float],
        details: Mapping[int, SampleDetails] | None = None,
    ) -> None:
        """Log a finished step. The time of the next one begins here. `details` are of samples that are written."""
        now = time.perf_counter()
        values = {**self.pending, **batch.metrics, **values}
        values |= self._speed(rollouts, values, now - self._started)
        validated = any(name.startswith("validation/") for name in values)
        if validated or step % self.config.log.every == 0 or step == self.config.steps - 1:
            self._metrics.log(step, values)
        self.view.step(step, values, self.seconds)
        if self._samples is not None:
            self._samples.write(step, rollouts, advantages_of(rollouts, batch), self.dropped, details)
            if validated:
                self._samples.write_validation(step, self.examined)
        self.pending.clear()
        self.seconds.clear()
        self.memory.by_phase.clear()
        self._started = now
        if self._on_step is not None and self._world.rank == 0:
            self._on_step(step, dict(values))

    def _speed(self, rollouts: Sequence[Rollout], values: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Times and memory of this rank. Tokens are those of all ranks, for each phase that counts its own."""
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        found = {"speed/seconds": seconds, "speed/tokens_per_second": tokens / seconds}
        for phase, taken in self.seconds.items():
            found[f"speed/seconds/{phase}"] = taken
            if f"tokens/{phase}" in values:
                found[f"speed/tokens_per_second/{phase}"] = values[f"tokens/{phase}"] / taken
        found["speed/memory_gib"] = self.memory.peak / 2**30
        for phase, taken in self.memory.by_phase.items():
            found[f"speed/memory_gib/{phase}"] = taken / 2**30
        return found


def advantages_of(rollouts: Sequence[Rollout], batch: Batch) -> list[float]:
    """The advantage of each rollout, in their order; minibatches have another order."""
    found = [0.0] * len(rollouts)
    for sample in batch.samples:
        if sample.rollout is not None:
            found[sample.rollout] = max(sample.advantages, key=abs, default=0.0)
    return found
