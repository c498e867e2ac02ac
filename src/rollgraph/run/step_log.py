"""The log of a run: progress, metrics, memory and sample completions, step by step.

Owns the progress display, the metric sinks, and the metrics and times of the step in progress. Only rank 0 writes.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollgraph.config import Config, to_dict
from rollgraph.log import ProgressDisplay, SampleWriter, close_sinks, make_sinks
from rollgraph.log.metrics import Metrics, Sink
from rollgraph.log.samples import SampleDetails, TokenTexts, first_of_each_group, format_one_line
from rollgraph.parallel.ranks.world import World
from rollgraph.types import Batch, Rollout

# -- memory by phase -------------------------------------------------------------------------------


class MemoryMeter:
    """Memory by phase: peak allocated bytes on a GPU; on a CPU, resident bytes at the end of the phase, if known.

    A graph allocates when it is captured and replays in that memory. So the peak during captures counts for the phase
    that the graph belongs to.
    """

    def __init__(self, device: str) -> None:
        self.by_phase: dict[str, int] = {}  # bytes, in the step in progress
        self._on_gpu = device.startswith("cuda")
        self._peak = 0  # bytes, before the phase in progress
        self._captured: dict[str, int] = {}  # peak bytes during captures, by phase
        self._capturing: str | None = None

    @property
    def peak(self) -> int:
        """Peak bytes of this process, on its GPU or, without one, on the host."""
        if self._on_gpu:
            return max(self._peak, torch.cuda.max_memory_allocated())
        return peak_resident_bytes()

    def start_phase(self) -> None:
        if self._on_gpu:
            self._peak = self.peak
            torch.cuda.reset_peak_memory_stats()

    def end_phase(self, phase: str) -> None:
        used = torch.cuda.max_memory_allocated() if self._on_gpu else resident_bytes()
        if used is not None:
            self.by_phase[phase] = max(used, self.by_phase.get(phase, 0), self._captured.get(phase, 0))

    def start_capture(self, phase: str) -> None:
        """Call this before a graph of this phase is captured."""
        if self._on_gpu and phase != self._capturing:
            self.end_captures()
            self._capturing = phase
            self.start_phase()

    def end_captures(self) -> None:
        if self._capturing is not None:
            self._captured[self._capturing] = torch.cuda.max_memory_allocated()
            self._capturing = None


def peak_resident_bytes() -> int:
    """The most resident bytes that this process has had.

    Linux counts `ru_maxrss` from before exec on, where a new process still has its parent's memory: started from a
    large notebook, a small run would report the notebook's peak. So we read the peak of this program's own memory.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """The resident bytes of this process; None on systems that report only the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- the log ---------------------------------------------------------------------------------------

OnStep = Callable[[int, dict[str, float]], None]  # (step, metrics)
BASELINE = -1  # the step of the validation before the first one
OnProgress = Callable[[int, int], None]  # (done, total)


class StepLog:
    """Collects the metrics of a step, then logs and shows it. `on_step` is called on rank 0."""

    def __init__(
        self, config: Config, world: World, view: ProgressDisplay | None = None, on_step: OnStep | None = None
    ) -> None:
        self.display = view or ProgressDisplay()
        self.reward_weights: Mapping[str, float] = {}  # by the label of the function
        self.token_texts: TokenTexts | None = None  # None: the logged tokens were not sampled by a policy
        self.validation_rollouts: Sequence[Rollout] = ()  # by the last validation
        self.dropped_rollouts: Sequence[Rollout] = ()  # sampled in the step in progress but not trained on
        self.baseline: dict[str, float] = {}  # metrics of the validation before the first step, if there was one
        self.step_metrics: dict[str, float] = {}  # metrics of the step in progress
        self.last_samples: Sequence[Mapping[str, Any]] = ()  # rows of samples.jsonl, one per prompt, shown last
        self.seconds: dict[str, float] = defaultdict(float)  # of the step in progress, by phase
        self.memory = MemoryMeter(world.device)
        self._on_step = on_step
        self.config = config  # replaced by `make_run` once all automatic values are chosen
        self._world = world
        self._sinks: list[Sink] = []
        self._metrics = Metrics(self._sinks)
        self._samples: SampleWriter | None = None
        self._started = 0.0
        self._shown_conditions: set[str] = set()  # of `note_once_while`

    @contextmanager
    def writing(self, first_step: int) -> Iterator[None]:
        """Open the metric sinks and samples.jsonl. Rows of `first_step` and later steps are truncated."""
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
                reward_weights=self.reward_weights,
                texts=self.token_texts,
                token_value_limit=log.token_values,
                resume_at=resume_at,
            )
            if self.baseline:
                self._metrics.log(BASELINE, self.baseline)
                self._show_samples(self._samples.write_validation(BASELINE, self.validation_rollouts))
        self.seconds.clear()  # excludes a warm start and the validation before the first step
        self.memory.by_phase.clear()
        self._started = time.perf_counter()
        try:
            yield
        finally:
            close_sinks(self._sinks)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.memory.start_phase()
        try:
            with self._world.in_phase(phase):
                yield
        finally:
            if self._world.device.startswith("cuda"):
                torch.cuda.synchronize()
            self.seconds[phase] += time.perf_counter() - start
            self.memory.end_phase(phase)

    @contextmanager
    def phase(self, name: str, *, in_bytes: bool = False) -> Iterator[OnProgress]:
        """Show a phase outside of steps. Yields a function to call with (done, total)."""
        self.display.phase(name, 0, 0)
        with self._world.in_phase(name):
            yield partial(self.display.phase, name, in_bytes=in_bytes)
        self.display.end_phase()

    def note(self, text: str) -> None:
        """Show one line that stays. Messages of rewards and tools may hold characters that cannot be printed."""
        self.display.note(_printable(text))

    def note_if_verbose(self, text: str) -> None:
        """Show one line if `log.verbose` is set."""
        if self.config.log.verbose:
            self.note(text)

    def show_last_lines(self, lines: Sequence[str]) -> None:
        """Show the last lines of the run below everything else."""
        self.display.show_last_lines([_printable(line) for line in lines])

    def note_once_while(self, is_true: bool, condition: str, text: str) -> None:
        """Show a line when a condition becomes true, and not again until it has been false."""
        if is_true and condition not in self._shown_conditions:
            self.note(text)
            self._shown_conditions.add(condition)
        elif not is_true:
            self._shown_conditions.discard(condition)

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        batch: Batch,
        values: Mapping[str, float],
        details: Mapping[int, SampleDetails] | None = None,
    ) -> None:
        """Log a finished step and start timing the next one. `details` describe the samples that are written."""
        now = time.perf_counter()
        values = {**self.step_metrics, **batch.metrics, **values}
        values |= self._speed(rollouts, values, now - self._started)
        validated = any(name.startswith("validation/") for name in values)
        if validated or step % self.config.log.every == 0 or step == self.config.steps - 1:
            self._metrics.log(step, values)
        self.display.step(step, values, self.seconds)
        if self._samples is not None:
            rows = self._samples.write(step, rollouts, advantages_of(rollouts, batch), self.dropped_rollouts, details)
            if validated:
                self._show_samples(self._samples.write_validation(step, self.validation_rollouts))
            elif self.config.data.validation is None:
                self._show_samples(rows)
        self.step_metrics.clear()
        self.seconds.clear()
        self.memory.by_phase.clear()
        self._started = now
        if self._on_step is not None and self._world.rank == 0:
            self._on_step(step, dict(values))

    def _show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show one of the written samples of each prompt, on one line each."""
        if rows:
            self.last_samples = first_of_each_group(rows)
            self.display.samples([_printable(format_one_line(row)) for row in self.last_samples])

    def _speed(self, rollouts: Sequence[Rollout], values: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Times and memory of this rank. Token rates count the tokens of all ranks."""
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        metrics = {"speed/seconds": seconds, "speed/tokens_per_second": tokens / seconds}
        for phase, phase_seconds in self.seconds.items():
            metrics[f"speed/seconds/{phase}"] = phase_seconds
            if f"tokens/{phase}" in values:
                metrics[f"speed/tokens_per_second/{phase}"] = values[f"tokens/{phase}"] / phase_seconds
        metrics["speed/memory_gib"] = self.memory.peak / 2**30
        for phase, nbytes in self.memory.by_phase.items():
            metrics[f"speed/memory_gib/{phase}"] = nbytes / 2**30
        return metrics


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def advantages_of(rollouts: Sequence[Rollout], batch: Batch) -> list[float]:
    """The advantage of each rollout, in the order of the rollouts; minibatches are shuffled."""
    advantages = [0.0] * len(rollouts)
    for sample in batch.samples:
        if sample.rollout is not None:
            advantages[sample.rollout] = max(sample.advantages, key=abs, default=0.0)
    return advantages
