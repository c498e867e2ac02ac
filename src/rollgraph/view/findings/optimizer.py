"""Updates that are always cut short, that jump, or that are none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollgraph.view.findings.finding import FEWEST, RECENT, Curve, History, RunFinding

ALWAYS = 0.95  # share of recent steps whose gradient is clipped
SPIKE = 12.0  # times the usual deviation from the median
LEAST_SPIKE = 0.01  # a deviation below this is none, however calm the rest is
SHOWN = 5  # spikes that are named


def find_clipping(history: History) -> Iterator[RunFinding]:
    curve = history.curve("optimizer/grad_norm")
    limit = history.number("optimizer.clip_norm")
    if curve is None or limit is None:
        return
    share = float(np.mean(curve.recent > limit))
    if share < ALWAYS:
        yield RunFinding("always-clipped", "good", f"The gradient is clipped in {share:.0%} of the last steps.")
        return
    yield RunFinding(
        "always-clipped",
        "warning",
        f"The gradient is clipped in {share:.0%} of the last steps: its norm is about {curve.now:.3g}, and "
        f"optimizer.clip_norm is {limit:g}.",
        "Then the learning rate does not say how large updates are. Raise clip_norm above the usual norm.",
        [curve.evidence()],
    )


def find_loss_spikes(history: History) -> Iterator[RunFinding]:
    """Single rows far from all others; the median and the deviation from it do not follow them."""
    curve = history.curve("loss")
    if curve is None or len(curve) < RECENT:
        return
    steps = spike_steps(curve)
    if not len(steps):
        yield RunFinding("loss-spikes", "good", "The loss does not jump.")
        return
    named = ", ".join(str(int(step)) for step in steps[-SHOWN:])
    last = int(steps[-1])
    yield RunFinding(
        "loss-spikes",
        "warning",
        f"The loss jumps at {len(steps)} step{'s' if len(steps) > 1 else ''}: {named}"
        + (" are the last." if len(steps) > SHOWN else "."),
        "Look at the samples of such a step. A lower optimizer.lr or clip_norm makes jumps smaller.",
        [
            {**curve.evidence("optimizer/grad_norm"), "from": last - RECENT, "to": last + RECENT},
            *history.samples_near(last),
        ],
    )


def spike_steps(curve: Curve) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    deviation = np.abs(curve.values - np.median(curve.values))
    usual = float(np.median(deviation)) * 1.4826  # the standard deviation, if values were normal
    return curve.steps[(deviation > SPIKE * usual) & (deviation > LEAST_SPIKE)]


def find_zero_rate(history: History) -> Iterator[RunFinding]:
    curve = history.curve("optimizer/lr")
    if curve is None:
        return
    if np.any(curve.values[-FEWEST:] != 0):
        yield RunFinding("zero-learning-rate", "good", f"The learning rate is {curve.values[-1]:.3g}.")
        return
    steps = history.number("steps")
    goes_on = steps is None or history.last_step + 1 < steps
    yield RunFinding(
        "zero-learning-rate",
        "problem" if goes_on else "warning",
        f"The learning rate has been 0 for the last {_zeros(curve)} rows: nothing is learned from these steps.",
        "See optimizer.lr, optimizer.schedule and optimizer.warmup_steps; a resumed run with more `steps` has a "
        "schedule of its own.",
        [curve.evidence()],
    )


def _zeros(curve: Curve) -> int:
    other = np.flatnonzero(curve.values)
    return len(curve) - (int(other[-1]) + 1 if len(other) else 0)
