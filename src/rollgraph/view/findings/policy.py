"""A policy that always says the same, that leaves its reference, or that is not the one that was sampled from."""

from __future__ import annotations

from collections.abc import Iterator

from rollgraph.view.findings.finding import RECENT, History, RunFinding

COLLAPSED = 0.02  # nats: the policy has practically one continuation
FALLEN = 0.05  # of the entropy at first
LOW = 0.1  # nats: a fall to less than this is a warning
FAR = (1.0, 0.1)  # nats from the reference: a problem; with a fast rise, a warning
RISE = 5.0  # times the rows before
APART = (1.1, 1.01)  # mean factor between probabilities of generation and training: a problem, a warning
FILTERS = {"rollout.top_k": 0.0, "rollout.top_p": 1.0, "rollout.min_p": 0.0}  # with the values that filter nothing


def find_entropy_collapse(history: History) -> Iterator[RunFinding]:
    curve = history.curve("policy/entropy")
    if curve is None:
        return
    collapsed = curve.now < COLLAPSED
    fell = curve.now < FALLEN * curve.at_first and curve.now < LOW
    if not collapsed and not fell:
        yield RunFinding("entropy-collapse", "good", f"The entropy is {curve.now:.2g} nats.")
        return
    yield RunFinding(
        "entropy-collapse",
        "problem" if collapsed else "warning",
        f"The entropy fell from {curve.at_first:.3g} to {curve.now:.2g} nats: the policy says nearly always the same.",
        "Lower optimizer.lr, raise clip_high or rollout.temperature, or add entropy_coef.",
        [curve.evidence("groups/frac_reward_zero_std")],
    )


def find_kl_runaway(history: History) -> Iterator[RunFinding]:
    curve = history.curve("policy/kl")
    if curve is None:
        return
    before = curve.values[-2 * RECENT : -RECENT]
    rises = len(before) == RECENT and curve.now > RISE * max(float(before.mean()), 1e-9)
    if curve.now <= FAR[0] and not (rises and curve.now > FAR[1]):
        yield RunFinding("kl-runaway", "good", f"The policy stays near its reference: the KL is {curve.now:.2g} nats.")
        return
    yield RunFinding(
        "kl-runaway",
        "problem" if curve.now > FAR[0] else "warning",
        f"The policy is {curve.now:.2g} nats from its reference"
        + (f", {RISE:g} times as far as {RECENT} rows before." if rises else "."),
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
    if curve.now < APART[1]:
        yield RunFinding("disagreement", "good", f"Generation and training agree up to a factor of {curve.now:.6g}.")
        return
    reasons = _reasons_to_differ(history)
    if reasons:
        yield RunFinding(
            "disagreement",
            "note",
            f"Generation and training differ by a factor of {curve.now:.3g}. This may be the reason: "
            f"{'; '.join(reasons)}.",
            evidence=[curve.evidence(recent=True)],
        )
        return
    yield RunFinding(
        "disagreement",
        "problem" if curve.now >= APART[0] else "warning",
        f"Generation and training disagree: the probabilities of a token differ by a factor of {curve.now:.3g}.",
        "`rollgraph check --exact MODEL` names the first operation that differs.",
        [curve.evidence("policy/token_mult_prob_error_max", recent=True)],
    )


def _reasons_to_differ(history: History) -> list[str]:
    """Why generation and training may differ although nothing is wrong."""
    found = []
    filters = [key for key, none in FILTERS.items() if history.number(key) not in (None, none)]
    if filters:
        found.append(f"with {', '.join(filters)}, generation samples from some of the tokens only")
    if history.number("adapter.dropout"):
        found.append("with adapter.dropout, training leaves out inputs that generation has")
    if history.recent_counts("groups/dropped").any():
        found.append("with dynamic sampling, groups left over from the step before are of an older policy")
    return found
