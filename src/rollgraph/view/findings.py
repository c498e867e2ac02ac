"""The diagnosis of a run: what an experienced engineer would notice, as sentences with evidence and advice.

One part per subject. Each part begins with its thresholds; docs/diagnosis.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollgraph.view.index import Floats, MetricsIndex, finite_or_nan
from rollgraph.view.runs import RunData

# -- findings, and the history that they are based on ----------------------------------------------

Severity = Literal["problem", "warning", "note", "good"]
RECENT_ROWS = 20  # the last rows, whose mean is the current value
Steps = NDArray[np.int64]
MIN_ROWS = 5  # with fewer rows of a metric, no finding is based on it


@dataclass(frozen=True)
class RunFinding:
    """One sentence about a run, what to do about it, and where to see it. The page reads these fields as JSON.

    For example `RunFinding("truncated", "warning", "35% of the completions are cut off ...", "Raise ...", [...])`.
    """

    id: str
    severity: Severity
    sentence: str
    advice: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Curve:
    """The finite values of one metric, with their steps."""

    name: str
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    @property
    def recent(self) -> Floats:
        return self.values[-RECENT_ROWS:]

    @property
    def recent_mean(self) -> float:
        return float(np.mean(self.recent))

    @property
    def initial_mean(self) -> float:
        return float(np.mean(self.values[:RECENT_ROWS]))

    def evidence(self, *other_metrics: str, recent: bool = False) -> dict[str, Any]:
        """A chart of this metric and others as evidence, over all rows or only the recent ones."""
        chart: dict[str, Any] = {"kind": "series", "names": [self.name, *other_metrics]}
        if recent and len(self) > RECENT_ROWS:
            chart |= {"from": int(self.steps[-RECENT_ROWS]), "to": int(self.steps[-1])}
        return chart


class History:
    """A run's metrics, its configuration, and the steps whose samples it wrote."""

    def __init__(self, metrics: MetricsIndex, config: Mapping[str, Any], sample_steps: Steps) -> None:
        self._metrics = metrics
        self._config = config
        self._sample_steps = sample_steps

    @property
    def names(self) -> list[str]:
        return self._metrics.names

    @property
    def last_step(self) -> int:
        steps = self._metrics.steps()
        return int(steps[-1]) if len(steps) else -1

    def curve(self, name: str) -> Curve | None:
        """The finite values of a metric; None if there are fewer than MIN_ROWS."""
        values = self._metrics.column(name)
        known = np.isfinite(values)
        if np.count_nonzero(known) < MIN_ROWS:
            return None
        return Curve(name, self._metrics.steps()[known], values[known])

    def recent_counts(self, name: str) -> Floats:
        """The recent rows of a count. Rows without it count as 0, because a run only writes it where it is not 0."""
        return np.nan_to_num(self._metrics.column(name)[-RECENT_ROWS:])

    def setting(self, key: str) -> Any:
        """The value of a dotted key in the configuration; None if it is not known."""
        value: Any = self._config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str) -> float | None:
        number = finite_or_nan(self.setting(key))
        return None if math.isnan(number) else number

    def samples_near(self, step: int) -> list[dict[str, Any]]:
        """Samples of this step or, if it has none, of the nearest step that has; empty if the run wrote no samples."""
        if not len(self._sample_steps):
            return []
        nearest = int(self._sample_steps[np.argmin(np.abs(self._sample_steps - step))])
        label = f"samples of step {nearest}" if nearest == step else f"the nearest samples, of step {nearest}"
        return [sample_evidence(label, step=nearest)]


def sample_evidence(label: str, **filters: Any) -> dict[str, Any]:
    """A link to samples as evidence; filters are `step`, `split`, `finish`, `reward_min`, `reward_max` and `group`."""
    return {"kind": "samples", "label": label, **filters}


# -- lengths ---------------------------------------------------------------------------------------
# Completions that never end, or that grow while the reward does not.

TRUNCATION_LIMITS = (0.9, 0.3)  # share of truncated rollouts: a problem, a warning
LENGTH_GROWTH = 1.5  # times the initial length; below this, lengths are fine
MIN_REWARD_GAIN = 0.1  # of the range of the rewards; a smaller gain does not count
NEAR_LIMIT = 0.8  # of rollout.max_tokens


def find_truncation(history: History) -> Iterator[RunFinding]:
    curve = history.curve("length/truncated")
    if curve is None:
        return
    if curve.recent_mean < TRUNCATION_LIMITS[1]:
        yield RunFinding("truncated", "good", f"{curve.recent_mean:.0%} of the completions are cut off.")
        return
    nearly_all = curve.recent_mean >= TRUNCATION_LIMITS[0]
    yield RunFinding(
        "truncated",
        "problem" if nearly_all else "warning",
        f"{'Nearly every completion is' if nearly_all else f'{curve.recent_mean:.0%} of the completions are'} cut off "
        "at the limit of tokens.",
        "Raise rollout.max_tokens, or set mask_truncated. If the model does not know how to stop, set rollout.stop or "
        "use data.chat.",
        [curve.evidence("length/mean", recent=True), sample_evidence("samples that were cut off", finish="length")],
    )


def find_length_race(history: History) -> Iterator[RunFinding]:
    """Completions grow, and either the reward does not grow with them or they approach the limit."""
    lengths = history.curve("length/mean")
    if lengths is None or len(lengths) < 2 * RECENT_ROWS:
        return
    if lengths.recent_mean < LENGTH_GROWTH * lengths.initial_mean:
        yield RunFinding(
            "length-race", "good", f"Completions do not keep growing: they have {lengths.recent_mean:.0f} tokens."
        )
        return
    limit = history.number("rollout.max_tokens")
    near_limit = limit is not None and lengths.recent_mean >= NEAR_LIMIT * limit
    reward = history.curve("reward")
    earns_more = False
    if reward is not None:
        spread = float(reward.values.max() - reward.values.min())
        earns_more = reward.recent_mean - reward.initial_mean > MIN_REWARD_GAIN * spread > 0
    if earns_more and not near_limit:
        yield RunFinding(
            "length-race", "good", f"Completions grew to {lengths.recent_mean:.0f} tokens, and the reward grew too."
        )
        return
    sentence = f"Completions grew from {lengths.initial_mean:.0f} to {lengths.recent_mean:.0f} tokens"
    sentence += ", and the reward did not grow with them." if not earns_more else f", and the limit is {limit:.0f}."
    yield RunFinding(
        "length-race",
        "warning",
        sentence,
        "If the reward pays for length, add the reward `length`, or use dr_grpo or dapo.",
        [lengths.evidence("reward")],
    )


# -- the optimizer ---------------------------------------------------------------------------------
# Gradients that are always clipped, losses that jump, and a learning rate of 0.

ALWAYS_CLIPPED = 0.95  # share of recent steps whose gradient is clipped
SPIKE_DEVIATIONS = 12.0  # standard deviations from the median
MIN_SPIKE = 0.01  # a smaller deviation is no spike, however smooth the curve is
MAX_NAMED_SPIKES = 5  # steps that the sentence lists


def find_clipping(history: History) -> Iterator[RunFinding]:
    curve = history.curve("optimizer/grad_norm")
    limit = history.number("optimizer.clip_norm")
    if curve is None or limit is None:
        return
    share = float(np.mean(curve.recent > limit))
    if share < ALWAYS_CLIPPED:
        yield RunFinding("always-clipped", "good", f"The gradient is clipped in {share:.0%} of the last steps.")
        return
    yield RunFinding(
        "always-clipped",
        "warning",
        f"The gradient is clipped in {share:.0%} of the last steps: its norm is about {curve.recent_mean:.3g}, and "
        f"optimizer.clip_norm is {limit:g}.",
        "Then the learning rate does not say how large updates are. Raise clip_norm above the usual norm.",
        [curve.evidence()],
    )


def find_loss_spikes(history: History) -> Iterator[RunFinding]:
    """Single rows far from all others. Median and median deviation are robust: the spikes hardly move them."""
    curve = history.curve("loss")
    if curve is None or len(curve) < RECENT_ROWS:
        return
    steps = spike_steps(curve)
    if not len(steps):
        yield RunFinding("loss-spikes", "good", "The loss does not jump.")
        return
    named = ", ".join(str(int(step)) for step in steps[-MAX_NAMED_SPIKES:])
    last = int(steps[-1])
    yield RunFinding(
        "loss-spikes",
        "warning",
        f"The loss jumps at {len(steps)} step{'s' if len(steps) > 1 else ''}: {named}"
        + (" are the last." if len(steps) > MAX_NAMED_SPIKES else "."),
        "Look at the samples of such a step. A lower optimizer.lr or clip_norm makes jumps smaller.",
        [
            {**curve.evidence("optimizer/grad_norm"), "from": last - RECENT_ROWS, "to": last + RECENT_ROWS},
            *history.samples_near(last),
        ],
    )


def spike_steps(curve: Curve) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    deviation = np.abs(curve.values - np.median(curve.values))
    std = float(np.median(deviation)) * 1.4826  # the standard deviation of normally distributed values
    return curve.steps[(deviation > SPIKE_DEVIATIONS * std) & (deviation > MIN_SPIKE)]


def find_zero_learning_rate(history: History) -> Iterator[RunFinding]:
    """A rate of 0 in the last MIN_ROWS rows: a problem while steps remain, and a warning after the last step.

    It is only a warning then, because a schedule may end at 0.
    """
    curve = history.curve("optimizer/lr")
    if curve is None:
        return
    if np.any(curve.values[-MIN_ROWS:] != 0):
        yield RunFinding("zero-learning-rate", "good", f"The learning rate is {curve.values[-1]:.3g}.")
        return
    configured_steps = history.number("steps")
    is_unfinished = configured_steps is None or history.last_step + 1 < configured_steps
    yield RunFinding(
        "zero-learning-rate",
        "problem" if is_unfinished else "warning",
        f"The learning rate has been 0 for the last {_trailing_zeros(curve)} rows: "
        "nothing is learned from these steps.",
        "See optimizer.lr, optimizer.schedule and optimizer.warmup_steps. If you resume the run with more `steps`, "
        "the schedule extends to the new last step.",
        [curve.evidence()],
    )


def _trailing_zeros(curve: Curve) -> int:
    nonzero = np.flatnonzero(curve.values)
    return len(curve) - (int(nonzero[-1]) + 1 if len(nonzero) else 0)


# -- the policy ------------------------------------------------------------------------------------
# Entropy collapse, drift from the reference, and disagreement between generation and training.

COLLAPSED_ENTROPY = 0.02  # nats: the policy has practically one continuation
ENTROPY_DROP = 0.05  # of the initial entropy
LOW_ENTROPY = 0.1  # nats: a fall below this is a warning
KL_LIMITS = (1.0, 0.1)  # nats from the reference: a problem; with a fast rise, a warning
KL_RISE = 5.0  # times the mean of the RECENT_ROWS rows before
PROB_ERROR_LIMITS = (1.1, 1.01)  # mean factor between probabilities of generation and training: a problem, a warning
SAMPLING_FILTERS = {"rollout.top_k": 0.0, "rollout.top_p": 1.0, "rollout.min_p": 0.0}  # key -> value that is off


def find_entropy_collapse(history: History) -> Iterator[RunFinding]:
    curve = history.curve("policy/entropy")
    if curve is None:
        return
    collapsed = curve.recent_mean < COLLAPSED_ENTROPY
    fell = curve.recent_mean < ENTROPY_DROP * curve.initial_mean and curve.recent_mean < LOW_ENTROPY
    if not collapsed and not fell:
        yield RunFinding("entropy-collapse", "good", f"The entropy is {curve.recent_mean:.2g} nats.")
        return
    yield RunFinding(
        "entropy-collapse",
        "problem" if collapsed else "warning",
        f"The entropy fell from {curve.initial_mean:.3g} to {curve.recent_mean:.2g} nats: "
        "the policy nearly always says the same.",
        "Lower optimizer.lr, raise clip_high or rollout.temperature, or add entropy_coef.",
        [curve.evidence("groups/frac_reward_zero_std")],
    )


def find_kl_runaway(history: History) -> Iterator[RunFinding]:
    curve = history.curve("policy/kl")
    if curve is None:
        return
    before = curve.values[-2 * RECENT_ROWS : -RECENT_ROWS]
    rises = len(before) == RECENT_ROWS and curve.recent_mean > KL_RISE * max(float(before.mean()), 1e-9)
    if curve.recent_mean <= KL_LIMITS[0] and not (rises and curve.recent_mean > KL_LIMITS[1]):
        yield RunFinding(
            "kl-runaway", "good", f"The policy stays near its reference: the KL is {curve.recent_mean:.2g} nats."
        )
        return
    yield RunFinding(
        "kl-runaway",
        "problem" if curve.recent_mean > KL_LIMITS[0] else "warning",
        f"The policy is {curve.recent_mean:.2g} nats from its reference"
        + (f", {KL_RISE:g} times as far as {RECENT_ROWS} rows before." if rises else "."),
        "Raise algorithm.kl_coef, or lower optimizer.lr.",
        [curve.evidence("reward")],
    )


def find_disagreement(history: History) -> Iterator[RunFinding]:
    curve = history.curve("policy/token_mult_prob_error")
    if curve is None:
        return
    if float(curve.recent.max()) == 1.0:
        yield RunFinding("disagreement", "good", "Generation and training agree bit for bit.")
        return
    if curve.recent_mean < PROB_ERROR_LIMITS[1]:
        yield RunFinding(
            "disagreement", "good", f"Generation and training agree up to a factor of {curve.recent_mean:.6g}."
        )
        return
    reasons = _reasons_to_differ(history)
    if reasons:
        yield RunFinding(
            "disagreement",
            "note",
            f"Generation and training differ by a factor of {curve.recent_mean:.3g}. This may be the reason: "
            f"{'; '.join(reasons)}.",
            evidence=[curve.evidence(recent=True)],
        )
        return
    yield RunFinding(
        "disagreement",
        "problem" if curve.recent_mean >= PROB_ERROR_LIMITS[0] else "warning",
        f"Generation and training disagree: the probabilities of a token differ by a factor of "
        f"{curve.recent_mean:.3g}.",
        "`rollgraph check --exact MODEL` names the first operation that differs.",
        [curve.evidence("policy/token_mult_prob_error_max", recent=True)],
    )


def _reasons_to_differ(history: History) -> list[str]:
    """Settings with which generation and training rightly differ."""
    reasons = []
    filters = [key for key, neutral in SAMPLING_FILTERS.items() if history.number(key) not in (None, neutral)]
    if filters:
        reasons.append(f"with {', '.join(filters)}, generation samples from some of the tokens only")
    if history.number("adapter.dropout"):
        reasons.append("with adapter.dropout, training leaves out inputs that generation has")
    if history.recent_counts("groups/dropped").any():
        reasons.append("with dynamic sampling, groups left over from the previous step are from an older policy")
    return reasons


# -- rewards ---------------------------------------------------------------------------------------
# Groups without a learning signal, and reward functions that fail.

EQUAL_REWARDS_LIMITS = (0.9, 0.6)  # share of groups with equal rewards: a problem, a warning
FAILURE_LIMITS = (0.9, 0.05)  # share of the sampled rollouts whose reward failed: a problem, a warning
FAILURE_PREFIX = "failures/reward/"
FAILURE_KINDS = {
    "raised": "raised an exception",
    "timeout": "timed out",
    "died": "crashed its process",
    "not_finite": "returned a number that is not finite",
    "too_large": "returned a number that is too large",
    "wrong_type": "returned something other than a number",
    "wrong_length": "returned the wrong number of rewards",
    "unscored": "had no reward",
}
OTHER_PROMPTS = (
    "If no answer is right, use easier prompts, a warm start, or a reward with partial credit; if all are right, "
    "use harder prompts. More rollout.samples_per_prompt or a higher rollout.temperature make groups differ."
)
REPAIR_FIRST = "Reward functions fail, and every failed rollout gets the same reward: repair them first."


def find_equal_rewards(history: History) -> Iterator[RunFinding]:
    curve = history.curve("groups/frac_reward_zero_std")
    if curve is None:
        return
    if curve.recent_mean < EQUAL_REWARDS_LIMITS[1]:
        yield RunFinding("equal-rewards", "good", f"In {1 - curve.recent_mean:.0%} of the groups rewards differ.")
        return
    yield RunFinding(
        "equal-rewards",
        "problem" if curve.recent_mean >= EQUAL_REWARDS_LIMITS[0] else "warning",
        f"In {curve.recent_mean:.0%} of the groups all rewards are equal, and such groups teach nothing.",
        REPAIR_FIRST if _failing_rewards(history) else OTHER_PROMPTS,
        [curve.evidence("reward", recent=True)],
    )


def find_failing_rewards(history: History) -> Iterator[RunFinding]:
    failing = _failing_rewards(history)
    for name, share in failing.items():
        yield describe_reward_failure(name, share)
    if not failing and history.curve("failures/unrewarded") is not None:
        yield RunFinding("failing-reward", "good", "Reward functions do not fail.")


def _failing_rewards(history: History) -> dict[str, float]:
    """The share of recent rollouts with each kind of failure, if it exceeds the lower of FAILURE_LIMITS.

    The metrics count rollouts, so we divide by the number of sampled rollouts.
    """
    sampled = _sampled_rollouts(history)
    failing = {}
    for name in history.names:
        if not name.startswith(FAILURE_PREFIX):
            continue
        counts = history.recent_counts(name)
        share = float(np.mean(counts > 0)) if sampled is None else min(1.0, float(np.mean(counts / sampled)))
        if share >= FAILURE_LIMITS[1]:
            failing[name] = share
    return failing


def describe_reward_failure(name: str, share: float) -> RunFinding:
    kind = name.removeprefix(FAILURE_PREFIX)
    always = share >= FAILURE_LIMITS[0]
    what = FAILURE_KINDS.get(kind, f"failed ({kind})")
    how_often = "nearly all" if always else f"{share:.0%} of the"
    return RunFinding(
        f"failing-reward-{kind}",
        "problem" if always else "warning",
        f"A reward function {what} for {how_often} rollouts of the last steps.",
        "The error messages are shown with the samples. Until it is repaired, reward.on_failure counts in its place.",
        [{"kind": "series", "names": [name]}, sample_evidence("samples that failed", finish="error")],
    )


def _sampled_rollouts(history: History) -> float | None:
    prompts = history.number("data.prompts_per_step")
    samples_per_prompt = history.number("rollout.samples_per_prompt")
    if not prompts or not samples_per_prompt:
        return None
    rounds = history.curve("groups/rounds")
    return prompts * samples_per_prompt * (max(1.0, rounds.recent_mean) if rounds is not None else 1.0)


# -- all findings ----------------------------------------------------------------------------------

FINDERS: tuple[Callable[[History], Iterator[RunFinding]], ...] = (
    find_equal_rewards,
    find_failing_rewards,
    find_truncation,
    find_length_race,
    find_entropy_collapse,
    find_kl_runaway,
    find_disagreement,
    find_clipping,
    find_loss_spikes,
    find_zero_learning_rate,
)
SEVERITY_ORDER = ("problem", "warning", "note", "good")


def diagnose(run: RunData) -> list[dict[str, Any]]:
    """The findings of all checks, most severe first; empty while the run has fewer than MIN_ROWS rows."""
    if len(run.metrics.steps()) < MIN_ROWS:
        return []
    history = History(run.metrics, run.files.config.value, np.array(run.samples.steps(), np.int64))
    findings = [finding for finder in FINDERS for finding in finder(history)]
    findings.sort(key=lambda finding: SEVERITY_ORDER.index(finding.severity))
    return [asdict(finding) for finding in findings]
