"""Completions that never end, or that grow without earning more."""

from __future__ import annotations

from collections.abc import Iterator

from rollgraph.view.findings.finding import RECENT, History, RunFinding, samples

TRUNCATED = (0.9, 0.3)  # share of rollouts that were cut off: a problem, a warning
LONGER = 1.5  # times the length at first, for a race
NO_GAIN = 0.1  # of the range of the rewards: less than this is no better
NEAR_LIMIT = 0.8  # of rollout.max_tokens


def find_truncation(history: History) -> Iterator[RunFinding]:
    curve = history.curve("length/truncated")
    if curve is None:
        return
    if curve.now < TRUNCATED[1]:
        yield RunFinding("truncated", "good", f"{curve.now:.0%} of the completions are cut off.")
        return
    nearly_all = curve.now >= TRUNCATED[0]
    yield RunFinding(
        "truncated",
        "problem" if nearly_all else "warning",
        f"{'Nearly every completion is' if nearly_all else f'{curve.now:.0%} of the completions are'} cut off at the "
        "limit of tokens.",
        "Raise rollout.max_tokens, or set mask_truncated. If the model does not know how to stop, set rollout.stop or "
        "use data.chat.",
        [curve.evidence("length/mean", recent=True), samples("what was cut off", finish="length")],
    )


def find_length_race(history: History) -> Iterator[RunFinding]:
    """Completions grow, and either the reward does not grow with them or they run into the limit."""
    lengths = history.curve("length/mean")
    if lengths is None or len(lengths) < 2 * RECENT:
        return
    if lengths.now < LONGER * lengths.at_first:
        yield RunFinding("length-race", "good", f"Completions do not race: they have {lengths.now:.0f} tokens.")
        return
    limit = history.number("rollout.max_tokens")
    near = limit is not None and lengths.now >= NEAR_LIMIT * limit
    reward = history.curve("reward")
    earns_more = False
    if reward is not None:
        spread = float(reward.values.max() - reward.values.min())
        earns_more = reward.now - reward.at_first > NO_GAIN * spread > 0
    if earns_more and not near:
        yield RunFinding(
            "length-race", "good", f"Completions grew to {lengths.now:.0f} tokens, and the reward with them."
        )
        return
    sentence = f"Completions grew from {lengths.at_first:.0f} to {lengths.now:.0f} tokens"
    sentence += ", and the reward did not grow with them." if not earns_more else f", and the limit is {limit:.0f}."
    yield RunFinding(
        "length-race",
        "warning",
        sentence,
        "If the reward pays for length, add the reward `length`, or use dr_grpo or dapo.",
        [lengths.evidence("reward")],
    )
