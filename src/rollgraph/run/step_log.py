"""What people see of a run, step by step: the terminal, metrics, samples, and what went wrong without ending it."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rollgraph.config import to_dict
from rollgraph.rl.algorithms.batches import describe
from rollgraph.run.setup import Run
from rollgraph.telemetry import SampleWriter, View, close_sinks, make_sinks
from rollgraph.telemetry.metrics import Metrics
from rollgraph.types import Batch, Rollout

REWARD_FAILURES = "reward_failures/"  # metrics: counts of a step, by kind
ENVIRONMENT_FAILURES = "environment_failures/"
UNREWARDED = "unrewarded"  # the share of rollouts that no function had a reward for


class Logbook:
    """What people see of each step: the terminal, metrics and samples, on rank 0."""

    def __init__(self, run: Run, view: View, first_step: int) -> None:
        self._run, self._view, self._log = run, view, run.config.log
        folder, first = Path(run.config.output), run.world.rank == 0
        self._sinks = (
            make_sinks(self._log, folder, resume_at=first_step, run_config=to_dict(run.config)) if first else []
        )
        self._samples = SampleWriter(folder, self._log.samples_every, resume_at=first_step) if first else None
        self._metrics = Metrics(self._sinks)
        self._started = time.perf_counter()
        run.seconds.clear()  # a warm start, and what was held out before the first step, are no part of it

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, *error: object) -> None:
        close_sinks(self._sinks)

    def write(self, step: int, rollouts: Sequence[Rollout], batch: Batch, values: dict[str, float]) -> None:
        """Everything about a step that has been taken; the next one's time begins here."""
        run, now = self._run, time.perf_counter()
        values = {**run.pending, **batch.metrics, **values}
        values |= {"dropped_prompts": float(run.data.dropped)} if run.data.dropped else {}
        values |= speed(run, rollouts, values, now - self._started)
        due = step % self._log.every == 0 or step == run.config.steps - 1
        if due or any(name.startswith("validation/") for name in values):
            self._metrics.log(step, values)
        self._view.step(step, values, run.seconds)
        if self._samples is not None:
            self._samples.write(step, rollouts, advantages_of(rollouts, batch))
        run.pending.clear()
        run.seconds.clear()
        self._started = now


def advantages_of(rollouts: Sequence[Rollout], batch: Batch) -> list[float]:
    """In the order of the rollouts; minibatches have another one."""
    found = [0.0] * len(rollouts)
    for sample in batch.samples:
        if sample.rollout is not None:
            found[sample.rollout] = max(sample.advantages, key=abs, default=0.0)
    return found


def tell_failures(run: Run, view: View) -> None:
    """What rewards raised, as soon as it is known; of a run, the first few that differ."""
    for message in run.rewards.unread():
        view.note(f"a reward failed and counts as {run.config.reward.on_failure:g}: {message}")


def count_failures(run: Run) -> str:
    """At the end, in one line; empty where nothing failed."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in run.rewards.failures.items())
    return f"rewards failed for {run.rewards.failures.total()} rollouts: {kinds}" if kinds else ""


def troubles(run: Run) -> Counter[str]:
    """What went wrong without ending the run, by the name of its metric, counted since this process began."""
    found = Counter({REWARD_FAILURES + kind: count for kind, count in run.rewards.failures.items()})
    failures = getattr(run.environment, "failures", {})
    found.update({ENVIRONMENT_FAILURES + kind: count for kind, count in failures.items()})
    found[UNREWARDED] = run.rewards.unrewarded
    return found


def share_troubles(run: Run, before: Counter[str], sampled: int) -> dict[str, float]:
    """As metrics, those since `before` of all ranks together, which have sampled so many rollouts; each rank hears
    which rewards of the others failed."""
    mine, found = troubles(run) - before, Counter[str]()
    for rank, said in enumerate(
        run.policy.sharded.collectives.all_gather_text(json.dumps([mine, run.rewards.messages]))
    ):
        counts, messages = json.loads(said)
        found.update(counts)
        if rank != run.world.rank:
            kinds = {name: count for name, count in counts.items() if name.startswith(REWARD_FAILURES)}
            run.rewards.hear({name.removeprefix(REWARD_FAILURES): kinds[name] for name in kinds}, messages)
    return {**found, UNREWARDED: found[UNREWARDED] / max(1, sampled)}


def describe_sampling(run: Run, sampled: Sequence[Rollout], rounds: int, dropped: int) -> dict[str, float]:
    """Of all that was sampled in a step, by all ranks, whether it is trained on in this step or not."""
    found = {"rounds": float(rounds), "groups_dropped": float(dropped)}
    found["generate_tokens"] = float(sum(sum(rollout.sampled) for rollout in sampled))
    if run.algorithm.needs_reference:
        found["score_tokens"] = float(sum(len(rollout.prompt.tokens) + len(rollout.tokens) for rollout in sampled))
    return found | ({"sampled_reward": describe(sampled)["reward"]} if sampled else {})


def speed(run: Run, rollouts: Sequence[Rollout], values: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Times and memory of this rank; tokens are those of all ranks, of a phase as far as it has counted them."""
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    found = {"seconds": seconds, "tokens/s": tokens / seconds}
    for phase, taken in run.seconds.items():
        found[f"seconds/{phase}"] = taken
        if f"{phase}_tokens" in values:
            found[f"tokens/s/{phase}"] = values[f"{phase}_tokens"] / taken
    return {**found, "memory_gib": peak_memory(run.world.device) / 2**30}


def peak_memory(device: str) -> int:
    """Bytes that this process had at most: of a GPU, or of the machine."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
