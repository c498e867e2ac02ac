"""Each thing that a good engineer would notice: a run that has it, and one that nearly has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgraph.view import answers
from rollgraph.view.findings import FINDERS, diagnose
from tests.view.synthetic_run import CONFIG, Curve, index_all, open_run, write_group, write_run


def find(folder: Path, config: str = CONFIG, **curves: Curve) -> dict[str, dict[str, Any]]:
    """Findings by id."""
    run = open_run(write_run(folder, config=config, **curves))
    return {finding["id"]: finding for finding in diagnose(run)}


def late(value: float, otherwise: float) -> Curve:
    """A curve that is `value` in the last 20 of 60 steps."""
    return lambda step: value if step >= 40 else otherwise


# What is found, how serious it is, curves that show it, and curves that are just not enough.
CASES: list[tuple[str, str, dict[str, Curve], dict[str, Curve]]] = [
    (
        "equal-rewards",
        "problem",
        {"groups__frac_reward_zero_std": late(0.95, 0.3)},
        {"groups__frac_reward_zero_std": late(0.59, 0.95)},
    ),
    ("equal-rewards", "warning", {"groups__frac_reward_zero_std": late(0.7, 0.3)}, {}),
    ("truncated", "problem", {"length__truncated": late(1.0, 0.0)}, {"length__truncated": late(0.29, 1.0)}),
    ("truncated", "warning", {"length__truncated": late(0.4, 0.0)}, {}),
    ("entropy-collapse", "problem", {"policy__entropy": late(0.01, 0.5)}, {"policy__entropy": late(0.03, 0.5)}),
    ("entropy-collapse", "warning", {"policy__entropy": late(0.05, 2.0)}, {"policy__entropy": late(0.2, 5.0)}),
    (
        "length-race",
        "warning",
        {"length__mean": lambda step: 20.0 + step, "reward": lambda step: 0.3 + 0.1 * (step % 2)},
        {"length__mean": lambda step: 20.0 + step, "reward": lambda step: 0.01 * step},
    ),
    (
        "length-race",
        "warning",
        {"length__mean": lambda step: 32.0 + step, "reward": lambda step: 0.01 * step},  # towards 100, the limit
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


def bad(found: dict[str, dict[str, Any]]) -> list[str]:
    return [id for id, finding in found.items() if finding["severity"] != "good"]


@pytest.mark.parametrize(("id", "severity", "shows", "nearly"), CASES)
def test_what_is_found(
    tmp_path: Path, id: str, severity: str, shows: dict[str, Curve], nearly: dict[str, Curve]
) -> None:
    found = find(tmp_path / "shows", **shows)
    assert found[id]["severity"] == severity
    assert found[id]["evidence"]
    assert found[id]["advice"]
    assert bad(found) == [id]
    assert bad(find(tmp_path / "nearly", **nearly)) == []


def test_every_check_of_a_healthy_run_finds_it_good(tmp_path: Path) -> None:
    found = find(tmp_path)
    assert bad(found) == []
    assert len(found) == len(FINDERS) == 10
    cases = {"failing-reward" if id.startswith("failing-reward") else id for id, *_ in CASES}
    assert cases == found.keys()  # each has a case above


def test_a_learning_rate_of_zero_is_a_problem_while_steps_are_left(tmp_path: Path) -> None:
    config = CONFIG.replace("steps: 60", "steps: 100")
    found = find(tmp_path, config=config, optimizer__lr=late(0.0, 1e-6))
    assert found["zero-learning-rate"]["severity"] == "problem"
    assert "last 20 rows" in found["zero-learning-rate"]["sentence"]


@pytest.mark.parametrize(
    ("config", "curves", "reason"),
    [
        (CONFIG.replace("top_p: 1.0", "top_p: 0.9"), {}, "rollout.top_p"),
        (CONFIG + "adapter: {rank: 8, dropout: 0.1}\n", {}, "adapter.dropout"),
        (CONFIG, {"groups__dropped": late(3.0, 0.0)}, "dynamic sampling"),
    ],
)
def test_what_explains_a_disagreement(tmp_path: Path, config: str, curves: dict[str, Curve], reason: str) -> None:
    found = find(tmp_path, config=config, policy__token_mult_prob_error=late(1.2, 1.2), **curves)
    assert found["disagreement"]["severity"] == "note"
    assert reason in found["disagreement"]["sentence"]


def test_what_is_worst_comes_first_and_evidence_names_its_steps(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, length__truncated=late(1.0, 0.0), loss=lambda step: 3.0 if step == 33 else 0.01 * (step % 5)
    )
    found = diagnose(open_run(folder))
    assert [finding["id"] for finding in found][:2] == ["truncated", "loss-spikes"]
    assert {finding["severity"] for finding in found[2:]} == {"good"}
    assert found[0]["evidence"][0] == {
        "kind": "series",
        "names": ["length/truncated", "length/mean"],
        "from": 40,
        "to": 59,
    }
    assert len(found[1]["evidence"]) == 1  # no samples were written


def test_samples_as_evidence_are_ones_that_were_written(tmp_path: Path) -> None:
    """Most steps write none: a link to the samples of such a step would lead to an empty list."""
    jumps = {"loss": lambda step: 3.0 if step == 33 else 0.01 * (step % 5)}
    folder = write_run(tmp_path, **jumps, length__truncated=late(1.0, 0.0), failures__reward__raised=late(32.0, 32.0))
    for step in (20, 30, 40):
        write_group(folder, step, 0, finish_reason="length", failures={"exact": "raised ValueError"})
    run = open_run(folder)
    found = {finding["id"]: finding["evidence"][1] for finding in diagnose(run) if finding["severity"] != "good"}
    assert found["loss-spikes"] == {"kind": "samples", "step": 30, "label": "the nearest samples, of step 30"}
    for id in ("truncated", "failing-reward-raised", "loss-spikes"):
        given = {name: str(value) for name, value in found[id].items() if name in ("step", "finish")}
        assert answers.answer_samples(run, given)["total"] > 0, id
    write_group(folder, 33, 0)
    (jump,) = [finding for finding in diagnose(index_all(run)) if finding["id"] == "loss-spikes"]
    assert jump["evidence"][1] == {"kind": "samples", "step": 33, "label": "samples of step 33"}


def test_a_run_that_has_just_begun_is_not_judged(tmp_path: Path) -> None:
    assert diagnose(open_run(write_run(tmp_path, steps=4, length__truncated=lambda step: 1.0))) == []
