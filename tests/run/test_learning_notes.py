"""A run that learns nothing says so and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollgraph.log import ProgressDisplay
from rollgraph.run.rollouts import ALL_MASKED, EQUAL_REWARDS, FAILED_REWARDS
from rollgraph.run.step_log import StepLog
from rollgraph.train import train
from tests.test_train import ONE, eager_config, folder, metrics_of

__all__ = ["folder"]

# Rewards of a call, for sixteen completions: four for each of four prompts.
REWARDS = """
calls = []
def by_step(completions, **columns):
    calls.append(1)
    pattern = PLAN[len(calls) - 1]
    return [float(pattern[i // 4] == "d" and i % 2) for i in range(len(completions))]
"""


def train_with(folder: Path, plan: list[str], *overrides: str) -> None:
    """Take a step for each entry of the plan, which says of each of four groups whether its rewards differ (d)."""
    (folder / "by_step.py").write_text(f"PLAN = {plan}\n{REWARDS}")
    options = [f"reward.functions=[{{name: '{folder / 'by_step.py'}:by_step'}}]", f"steps={len(plan)}"]
    options += ["data.validation=null", "log.progress=plain", "algorithm.options={}", *overrides]
    train(eager_config(folder, *options), ONE)


def test_metrics_have_the_fraction_of_groups_with_equal_rewards(folder: Path) -> None:
    train_with(folder, ["dddd", "d==d", "===="])
    assert [values["groups/frac_reward_zero_std"] for values in metrics_of(folder / "run")] == [0.0, 0.5, 1.0]


def test_dropped_groups_count_towards_that_fraction(folder: Path) -> None:
    train_with(folder, ["d==d", "dd=="], "steps=1", "algorithm.options={dynamic_sampling: true}")
    (values,) = metrics_of(folder / "run")
    assert (values["groups/rounds"], values["groups/frac_reward_zero_std"]) == (2, 0.5)


def test_metrics_have_the_lengths_of_completions(folder: Path) -> None:
    train_with(folder, ["dddd", "dddd"])
    for values in metrics_of(folder / "run"):
        assert 1 <= values["length/min"] <= values["length/mean"] <= values["length/max"] <= 4
        assert 0 <= values["length/truncated"] <= 1


def test_a_run_says_once_that_it_learns_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_with(folder, ["====", "====", "d===", "====", "===="])
    lines = [line for line in capsys.readouterr().out.splitlines() if EQUAL_REWARDS in line]
    assert [line[: line.index(":")] for line in lines] == ["step 0, mean reward 0", "step 3, mean reward 0"]


def test_a_run_says_that_all_its_samples_are_masked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = ("algorithm.options={mask_truncated: true}", "rollout.max_tokens=1")
    train_with(folder, ["dddd"], *masked)
    output = capsys.readouterr().out
    assert metrics_of(folder / "run")[0]["length/truncated"] == 1.0
    assert ALL_MASKED in output
    assert EQUAL_REWARDS not in output


def test_failed_rewards_are_not_reported_as_equal_rewards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_with(folder, ["dddd"], "steps=2", "reward.on_failure=0.25")  # the plan has no second step: IndexError
    output = capsys.readouterr().out
    assert f"step 1, mean reward 0.25: nothing can be learned from the rewards, because {FAILED_REWARDS}" in output
    assert EQUAL_REWARDS not in output


def test_a_condition_is_reported_again_after_it_ended(folder: Path) -> None:
    notes: list[str] = []

    class Listening(ProgressDisplay):
        def note(self, text: str) -> None:
            notes.append(text)

    log = StepLog(eager_config(folder), ONE, Listening())
    for number, holds in enumerate([True, True, False, True]):
        log.note_once_while(holds, "one", f"one {number}")
        log.note_once_while(number == 1, "other", f"other {number}")
    assert notes == ["one 0", "other 1", "one 3"]
    log.note("a reward failed: \ud800")  # the message of an exception may have half of a surrogate pair
    assert notes[-1] == "a reward failed: ?"
