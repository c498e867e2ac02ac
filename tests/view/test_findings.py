"""Every finding of a diagnosis, with a run that has it and one that nearly has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgraph.view import answers
from rollgraph.view.findings import FINDERS, diagnose
from tests.view.synthetic_run import CONFIG, Curve, index_all, open_run, write_group, write_run


def diagnose_curves(folder: Path, config: str = CONFIG, **curves: Curve) -> dict[str, dict[str, Any]]:
    """Write a run with these curves, and return its findings by id."""
    run = open_run(write_run(folder, config=config, **curves))
    return {finding["id"]: finding for finding in diagnose(run)}


def late(value: float, before: float) -> Curve:
    """A curve that is `value` in the last 20 of 60 steps, and `before` in the others."""
    return lambda step: value if step >= 40 else before


# Id and severity of a finding, curves that have it, and curves that just do not.
CASES: list[tuple[str, str, dict[str, Curve], dict[str, Curve]]] = [
    (
        "equal-rewards",
        "problem",
        {"groups__frac_reward_zero_std": late(0.95, 0.3)},
        {"groups__frac_reward_zero_std": late(0.59, 0.95)},
    ),
    ("equal-rewards", "warning", {"groups__frac_reward_zero_std": late(0.7, 0.3)}, {}),
    (
        "truncated",
        "problem",
        {"length__truncated": late(1.0, 0.0)},
        {"length__truncated": late(0.29, 1.0)},
    ),
    ("truncated", "warning", {"length__truncated": late(0.4, 0.0)}, {}),
    (
        "entropy-collapse",
        "problem",
        {"policy__entropy": late(0.01, 0.5)},
        {"policy__entropy": late(0.03, 0.5)},
    ),
    (
        "entropy-collapse",
        "warning",
        {"policy__entropy": late(0.05, 2.0)},
        {"policy__entropy": late(0.2, 5.0)},
    ),
    (
        "length-race",
        "warning",
        {"length__mean": lambda step: 20.0 + step, "reward": lambda step: 0.3 + 0.1 * (step % 2)},
        {"length__mean": lambda step: 20.0 + step, "reward": lambda step: 0.01 * step},
    ),
    (
        "length-race",
        "warning",
        {"length__mean": lambda step: 32.0 + step, "reward": lambda step: 0.01 * step},  # approaches the limit of 100
        {"length__mean": lambda step: 20.0 + step / 6, "reward": lambda step: 0.3},
    ),
    (
        "failing-reward-timeout",
        "problem",
        {"failures__reward__timeout": lambda step: 32.0},  # of 8 x 4 rollouts
        {"failures__reward__timeout": lambda step: 1.0},
    ),
    ("failing-reward-raised", "warning", {"failures__reward__raised": lambda step: 4.0}, {}),
    (
        "always-clipped",
        "warning",
        {"optimizer__grad_norm": late(3.0, 0.5)},
        {"optimizer__grad_norm": lambda step: 0.5 if step == 50 or step == 45 else 3.0},
    ),
    ("kl-runaway", "problem", {"policy__kl": late(1.5, 0.9)}, {"policy__kl": late(0.9, 0.5)}),
    ("kl-runaway", "warning", {"policy__kl": late(0.4, 0.02)}, {"policy__kl": late(0.09, 0.001)}),
    (
        "loss-spikes",
        "warning",
        {"loss": lambda step: 3.0 if step == 33 else 0.01 * (step % 5)},
        {"loss": lambda step: 0.1 if step == 33 else 0.01 * (step % 5)},
    ),
    (
        "zero-learning-rate",
        "warning",
        {"optimizer__lr": late(0.0, 1e-6)},
        {"optimizer__lr": lambda s: 0.0 if s > 55 else 1},
    ),
    (
        "disagreement",
        "problem",
        {"policy__token_mult_prob_error": late(1.2, 1.0)},
        {"policy__token_mult_prob_error": late(1.005, 1.5)},
    ),
    ("disagreement", "warning", {"policy__token_mult_prob_error": late(1.05, 1.0)}, {}),
]


def not_good(findings: dict[str, dict[str, Any]]) -> list[str]:
    return [id for id, finding in findings.items() if finding["severity"] != "good"]


@pytest.mark.parametrize(("id", "severity", "shows", "nearly"), CASES)
def test_each_finding_is_found_and_nearly_found(
    tmp_path: Path, id: str, severity: str, shows: dict[str, Curve], nearly: dict[str, Curve]
) -> None:
    findings = diagnose_curves(tmp_path / "shows", **shows)
    assert findings[id]["severity"] == severity
    assert findings[id]["evidence"]
    assert findings[id]["advice"]
    assert not_good(findings) == [id]
    assert not_good(diagnose_curves(tmp_path / "nearly", **nearly)) == []


def test_all_findings_of_a_healthy_run_are_good(tmp_path: Path) -> None:
    findings = diagnose_curves(tmp_path)
    assert not_good(findings) == []
    assert len(findings) == len(FINDERS) == 10
    cases = {"failing-reward" if id.startswith("failing-reward") else id for id, *_ in CASES}
    assert cases == findings.keys()  # every finding has a case above


def test_a_learning_rate_of_zero_with_steps_left_is_a_problem(tmp_path: Path) -> None:
    config = CONFIG.replace("steps: 60", "steps: 100")
    findings = diagnose_curves(tmp_path, config=config, optimizer__lr=late(0.0, 1e-6))
    assert findings["zero-learning-rate"]["severity"] == "problem"
    assert "last 20 rows" in findings["zero-learning-rate"]["sentence"]


@pytest.mark.parametrize(
    ("config", "curves", "reason"),
    [
        (CONFIG.replace("top_p: 1.0", "top_p: 0.9"), {}, "rollout.top_p"),
        (CONFIG + "adapter: {rank: 8, dropout: 0.1}\n", {}, "adapter.dropout"),
        (CONFIG, {"groups__dropped": late(3.0, 0.0)}, "dynamic sampling"),
    ],
)
def test_settings_explain_a_disagreement(tmp_path: Path, config: str, curves: dict[str, Curve], reason: str) -> None:
    findings = diagnose_curves(tmp_path, config=config, policy__token_mult_prob_error=late(1.2, 1.2), **curves)
    assert findings["disagreement"]["severity"] == "note"
    assert reason in findings["disagreement"]["sentence"]


def test_the_worst_finding_comes_first_with_the_steps_of_its_evidence(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, length__truncated=late(1.0, 0.0), loss=lambda step: 3.0 if step == 33 else 0.01 * (step % 5)
    )
    findings = diagnose(open_run(folder))
    assert [finding["id"] for finding in findings][:2] == ["truncated", "loss-spikes"]
    assert {finding["severity"] for finding in findings[2:]} == {"good"}
    assert findings[0]["evidence"][0] == {
        "kind": "series",
        "names": ["length/truncated", "length/mean"],
        "from": 40,
        "to": 59,
    }
    assert len(findings[1]["evidence"]) == 1  # the run has no samples


def test_evidence_links_to_samples_that_exist(tmp_path: Path) -> None:
    """Most steps have no samples, so a link to the samples of the step itself could lead to an empty list."""
    jumps = {"loss": lambda step: 3.0 if step == 33 else 0.01 * (step % 5)}
    folder = write_run(tmp_path, **jumps, length__truncated=late(1.0, 0.0), failures__reward__raised=late(32.0, 32.0))
    for step in (20, 30, 40):
        write_group(folder, step, 0, finish_reason="length", failures={"exact": "raised ValueError"})
    run = open_run(folder)
    evidence = {finding["id"]: finding["evidence"][1] for finding in diagnose(run) if finding["severity"] != "good"}
    assert evidence["loss-spikes"] == {"kind": "samples", "step": 30, "label": "the nearest samples, of step 30"}
    for id in ("truncated", "failing-reward-raised", "loss-spikes"):
        parameters = {name: str(value) for name, value in evidence[id].items() if name in ("step", "finish")}
        assert answers.answer_samples(run, parameters)["total"] > 0, id
    write_group(folder, 33, 0)
    (loss_spike,) = [finding for finding in diagnose(index_all(run)) if finding["id"] == "loss-spikes"]
    assert loss_spike["evidence"][1] == {"kind": "samples", "step": 33, "label": "samples of step 33"}


def test_a_run_of_few_steps_has_no_findings(tmp_path: Path) -> None:
    assert diagnose(open_run(write_run(tmp_path, steps=4, length__truncated=lambda step: 1.0))) == []
