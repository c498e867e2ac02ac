"""Chart data: metrics over steps or time, downsampled, and a sentence that describes each metric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollgraph.view.index import Floats, MetricsIndex

# -- sentences about metrics -----------------------------------------------------------------------

PLACEHOLDER = re.compile(r"<\w+>")  # matches any text without a slash

DESCRIPTIONS = {
    "reward": "Mean reward of the rollouts trained on: the weighted sum of all reward functions.",
    "reward/std": "Standard deviation of the rewards, over all groups.",
    "reward/shaped": "Mean reward after KL and length penalties; advantages are computed from it.",
    "reward/sampled": "Mean reward of all sampled rollouts, whether trained on or not.",
    "rewards/<label>": "Mean of one reward function before its weight.",
    "logged/<name>": "Mean of the values that reward functions logged under this name.",
    "validation/logged/<name>": "Mean of the values that reward functions logged under this name in validation.",
    "groups/frac_reward_zero_std": "Share of groups whose rewards are all equal: they teach nothing.",
    "groups/rounds": "Rounds of sampling in this step.",
    "groups/dropped": "Sampled groups that the algorithm dropped.",
    "advantage/abs_mean": "Mean of the absolute advantages.",
    "advantage/abs_max": "The largest absolute advantage.",
    "length/mean": "Mean length of the completions, in tokens.",
    "length/min": "Length of the shortest completion, in tokens.",
    "length/max": "Length of the longest completion, in tokens.",
    "length/truncated": "Share of rollouts that were cut off at a limit.",
    "loss": "The loss of a minibatch, averaged over the updates of the step.",
    "loss/weight": "Sum of the token weights of a minibatch.",
    "policy/entropy": "Entropy of the policy at each token, in nats.",
    "policy/kl": "KL divergence from the reference policy.",
    "policy/ratio": "Probability ratio of the policy to the policy before this step.",
    "policy/clipped_low": "Share of tokens whose ratio was clipped from below.",
    "policy/clipped_high": "Share of tokens whose ratio was clipped from above.",
    "policy/clipped_dual": "Share of tokens that dual_clip bounded.",
    "policy/importance": "Importance weight that corrects for generation's distribution: min(old / rollout, cap).",
    "policy/rollout_kl": "KL divergence between generation's distribution and the policy being trained.",
    "policy/token_mult_prob_error": "Mean factor between probabilities of generation and training; 1 if they agree.",
    "policy/token_mult_prob_error_max": "Largest factor between the probabilities of generation and training.",
    "policy/<name>": "Reported by the loss of the algorithm.",
    "data/epoch": "Passes over the training rows.",
    "data/dropped_prompts": "Training prompts left out because they are too long.",
    "tokens/trained": "Assistant tokens of the step.",
    "rewards/chosen": "Mean of β × log(policy / reference) of the preferred completions.",
    "rewards/rejected": "Mean of β × log(policy / reference) of the other completions.",
    "rewards/margins": "Mean difference between the two completions of a pair.",
    "rewards/accuracies": "Share of pairs in which the preferred completion is ahead.",
    "teacher/kl": "Mean of log(policy / teacher) over sampled tokens.",
    "optimizer/lr": "Learning rate of the last update.",
    "optimizer/grad_norm": "Norm of the gradient before clipping, averaged over the updates of the step.",
    "optimizer/skipped_steps": "Updates skipped so far because a gradient was not finite.",
    "validation/reward": "Mean reward of the held-out prompts.",
    "validation/rewards/<label>": "Mean of one reward function on the held-out prompts.",
    "validation/accuracy": "Share of held-out samples that are right.",
    "validation/pass@<k>": "Share of held-out prompts with at least one right sample out of k.",
    "validation/loss": "The loss of held-out rows.",
    "validation/perplexity": "The exponential of the loss of held-out rows.",
    "validation/rewards/chosen": "Mean of β × log(policy / reference) of the preferred held-out completions.",
    "validation/rewards/rejected": "Mean of β × log(policy / reference) of the other held-out completions.",
    "validation/rewards/margins": "Mean difference between the two completions of a held-out pair.",
    "validation/rewards/accuracies": "Share of held-out pairs in which the preferred completion is ahead.",
    "validation/teacher/kl": "Mean of log(policy / teacher) over samples of held-out prompts.",
    "validation/dropped_prompts": "Held-out prompts left out because they are too long.",
    "failures/rollouts": "Share of the rollouts that ended with an error.",
    "failures/unrewarded": "Share of the sampled rollouts without a valid reward.",
    "failures/reward/<kind>": "Rollouts for which a reward function failed in this way.",
    "failures/environment/<exception>": "Replies of the environment that failed in this way.",
    "failures/environment/<tool>/<exception>": "Calls of this tool that failed in this way.",
    "tokens/generate": "Sampled tokens.",
    "tokens/score": "Prompt and completion tokens scored with the reference policy.",
    "tokens/train": "Tokens in the microbatches of all epochs.",
    "tokens/padding": "Share of padding in microbatches.",
    "speed/seconds": "Duration of the step.",
    "speed/seconds/<phase>": "Duration of this phase of the step.",
    "speed/tokens_per_second": "Tokens of the trained completions, with tool replies, per second of the step.",
    "speed/tokens_per_second/<phase>": "Tokens of this phase, per second of it.",
    "speed/memory_gib": "Peak memory in GiB: GPU memory or, without a GPU, the memory of the process.",
    "speed/memory_gib/<phase>": "Memory of this phase in GiB: its peak on the GPU or, without a GPU, its final value.",
    "speed/ranks/<rank>/seconds/<phase>": "Duration of this phase on one rank, without waiting for the others.",
    "speed/ranks/<rank>/memory_gib": "Peak memory of one rank, in GiB.",
}


def describe_metrics(names: Iterable[str]) -> list[dict[str, str]]:
    """Name, topic (the part before the first slash) and description of each metric."""
    metrics = []
    for name in names:
        metrics.append({"name": name, "topic": name.partition("/")[0], "description": describe_metric(name)})
    return metrics


def describe_metric(name: str) -> str:
    """The description of a metric; empty for metrics that rollgraph does not write itself."""
    if name in DESCRIPTIONS:
        return DESCRIPTIONS[name]
    for template, description in DESCRIPTIONS.items():
        if "<" in template and matches_template(name, template):
            return description
    return ""


def matches_template(name: str, template: str) -> bool:
    pattern = "[^/]+".join(re.escape(part) for part in PLACEHOLDER.split(template))
    return re.fullmatch(pattern, name) is not None


# -- series ----------------------------------------------------------------------------------------

DEFAULT_POINTS = 800
MAX_POINTS = 5000
STEP_SECONDS = "speed/seconds"
PHASE_PREFIX = "speed/seconds/"  # and the name of a phase


@dataclass(frozen=True)
class AxisRange:
    """The visible part of the horizontal axis, and the most points to return."""

    axis: str = "step"  # or "time": cumulative seconds of the steps
    start: float = -math.inf
    end: float = math.inf
    points: int = DEFAULT_POINTS


def find_series(metrics: MetricsIndex, names: list[str], axis_range: AxisRange) -> dict[str, Any]:
    x = axis_values(metrics, axis_range.axis)
    in_range = (x >= axis_range.start) & (x <= axis_range.end)
    series = {}
    for name in names:
        y = metrics.column(name)
        mask = in_range & np.isfinite(y)
        series[name] = downsample(x[mask], y[mask], axis_range.points)
    return series


def axis_values(metrics: MetricsIndex, axis: str) -> Floats:
    """The step of each row, or its cumulative seconds. Steps without a row count as long as the next row's step."""
    steps = metrics.steps()
    if axis != "time":
        return steps
    seconds = np.nan_to_num(metrics.column(STEP_SECONDS))
    steps_per_row = np.diff(steps, prepend=steps[:1] - 1 if len(steps) else 0.0)
    return np.cumsum(seconds * np.maximum(1.0, steps_per_row))


def downsample(x: Floats, y: Floats, points: int) -> dict[str, list[float]]:
    """At most `points` points: the mean, minimum and maximum of each bucket of the axis."""
    if len(x) <= points:
        values = _rounded(y)
        return {"x": _rounded(x), "y": values, "low": values, "high": values}
    width = (x[-1] - x[0]) / points or 1.0
    bucket = np.minimum((x - x[0]) // width, points - 1)
    first = np.flatnonzero(np.diff(bucket, prepend=-1.0))
    counts = np.diff(np.append(first, len(x)))
    return {
        "x": _rounded(x[first]),
        "y": _rounded(np.add.reduceat(y, first) / counts),
        "low": _rounded(np.minimum.reduceat(y, first)),
        "high": _rounded(np.maximum.reduceat(y, first)),
    }


def find_phases(metrics: MetricsIndex, axis_range: AxisRange) -> dict[str, Any]:
    """The seconds of each phase on one axis. The remainder of the step is the time spent switching between phases."""
    x = axis_values(metrics, axis_range.axis)
    step_seconds = metrics.column(STEP_SECONDS)
    mask = (x >= axis_range.start) & (x <= axis_range.end) & np.isfinite(step_seconds)
    phases = [name for name in metrics.names if name.startswith(PHASE_PREFIX)]
    parts = {name.removeprefix(PHASE_PREFIX): np.nan_to_num(metrics.column(name)[mask]) for name in phases}
    switching = step_seconds[mask] - sum(parts.values(), np.zeros(np.count_nonzero(mask)))
    parts["switching"] = np.maximum(0.0, switching)
    curves = {name: downsample(x[mask], seconds, axis_range.points) for name, seconds in parts.items()}
    axis = next(iter(curves.values()))["x"]
    return {"x": axis, "phases": {name: values["y"] for name, values in curves.items()}}


def _rounded(values: Floats) -> list[float]:
    """Seven significant digits: more would not be visible, only larger to send."""
    return [float(f"{value:.7g}") for value in values.tolist()]
