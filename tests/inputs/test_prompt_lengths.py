"""By default, the longest training prompt sets the shapes of a run, from its first start on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgraph import Trainer
from rollgraph.cli import main
from rollgraph.config import Config, to_yaml
from rollgraph.inputs import sampled_data
from rollgraph.inputs.inputs import Inputs, check_inputs
from rollgraph.inputs.shapes import PromptLengths
from rollgraph.plan.choose import MemoryBudget, choose_settings
from rollgraph.plan.memory import cache_plan
from rollgraph.plan.run_shape import make_run_shape
from rollgraph.plan.suggest import required_bytes, suggest_settings
from rollgraph.rl.data.rows import DataError
from rollgraph.train import train
from tests.run.test_distillation import make_model
from tests.run.test_supervised import write_rows
from tests.test_train import ONE, assert_same_weights, config_of, folder, metrics_of
from tests.test_trainer import letters

__all__ = ["folder"]

MODEL_LENGTH = 128  # positions
FROM_DATA = (f"model.tiny.max_length={MODEL_LENGTH}", "data.max_prompt_tokens=null", "train.token_buckets=null")
EAGER = (*FROM_DATA, "graph.impl=none", "optimizer.schedule=constant")
TURNS = "rollout.environment={name: 'rollgraph.rl.calculator:calculator', options: {max_tokens: 40}}"
NO_BUDGET = """
from rollgraph.rl.environment import SingleTurn

def several_turns(samples_per_prompt):
    return SingleTurn(samples_per_prompt)
"""


def write_prompts(file: Path, *lengths: int) -> None:
    write_rows(file, [{"prompt": f"{index % 10}" * length, "answer": "4"} for index, length in enumerate(lengths)])


def read(config: Config) -> Inputs:
    inputs = check_inputs(config, ONE)
    inputs.rewards.close()
    return inputs


@pytest.mark.parametrize(("longest", "limit"), [(3, 16), (16, 16), (17, 32)])
def test_the_prompt_limit_is_the_longest_prompt_rounded_up(folder: Path, longest: int, limit: int) -> None:
    write_prompts(folder / "train.jsonl", 2, longest, 1, 2)
    limits = read(config_of(folder, *FROM_DATA)).limits
    assert (limits.max_length, limits.longest_generated) == (limit + 4, limit + 4)
    assert limits == read(config_of(folder, *FROM_DATA, f"data.max_prompt_tokens={limit}")).limits


def test_the_prompt_limit_leaves_the_model_room_for_one_token(folder: Path) -> None:
    write_prompts(folder / "train.jsonl", 5, MODEL_LENGTH - 1)
    inputs = read(config_of(folder, *FROM_DATA))
    assert (inputs.max_prompt_tokens, inputs.limits.max_length) == (MODEL_LENGTH - 1, MODEL_LENGTH)
    write_prompts(folder / "train.jsonl", 5, MODEL_LENGTH)
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens: .*jsonl:2: the prompt has 128 .*the limit is 127"):
        read(config_of(folder, *FROM_DATA))


def test_an_environment_gets_the_tokens_that_it_declares(folder: Path) -> None:
    inputs = read(config_of(folder, *FROM_DATA, TURNS))
    assert inputs.max_prompt_tokens is not None
    assert inputs.limits.max_length == inputs.max_prompt_tokens + 40


def test_an_environment_without_a_budget_gets_the_model_length(folder: Path) -> None:
    (folder / "turns.py").write_text(NO_BUDGET)
    inputs = read(config_of(folder, *FROM_DATA, f"rollout.environment={{name: '{folder / 'turns.py'}:several_turns'}}"))
    assert (inputs.prompt_lengths, inputs.limits.max_length) == (None, MODEL_LENGTH)


def test_max_length_fits_the_demonstrations_of_the_warm_start(folder: Path) -> None:
    write_rows(folder / "shown.jsonl", [{"prompt": "1", "completion": "2" * length} for length in (3, 60)])
    inputs = read(config_of(folder, *FROM_DATA, f"warm_start.data={folder / 'shown.jsonl'}"))
    assert inputs.warm_start is not None
    longest = inputs.warm_start.completions.longest_sequence
    assert longest > 60
    assert longest <= inputs.limits.max_length < longest + 16


def test_a_run_reports_its_prompt_limit_and_keeps_it_on_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_of(folder, *EAGER, "log.progress=plain"), ONE)
    line = "data.max_prompt_tokens: 16 (the longest of 30 prompts has 3)"
    assert line in capsys.readouterr().out.splitlines()
    twice = [*EAGER, f"output={folder / 'twice'}"]
    train(config_of(folder, *twice, "steps=2"), ONE)
    resumed = train(config_of(folder, *twice, "log.progress=plain"), ONE)
    assert resumed is not None
    assert resumed.inputs.max_prompt_tokens == 16
    assert line in capsys.readouterr().out.splitlines()
    assert_same_weights(folder / "run", folder / "twice", 3)


def test_a_longer_prompt_in_later_data_is_refused(folder: Path) -> None:
    """The limit stays, so that graphs before and after a restart have the same shapes."""
    train(config_of(folder, *EAGER, "steps=2"), ONE)
    write_prompts(folder / "more.jsonl", 2, 3, 40, 2, 1)
    more = [*EAGER, "steps=3", f"data.train={folder / 'more.jsonl'}", "allow_changes=[data.train]"]
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens: .*jsonl:3: the prompt has 40 .*the limit is 16"):
        train(config_of(folder, *more), ONE)
    run = train(config_of(folder, *more, "data.too_long=drop"), ONE)
    assert run is not None
    assert (run.inputs.data.dropped, run.inputs.limits.max_length) == (1, 20)
    wider = train(config_of(folder, *more, "data.max_prompt_tokens=40", "steps=4"), ONE)
    assert wider is not None
    assert wider.inputs.limits.max_length == 44  # an explicit setting wins


def test_a_checkpoint_without_a_prompt_limit_keeps_the_model_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(sampled_data, "training_prompt_lengths", lambda *arguments: None)
        run = train(config_of(folder, *EAGER, "steps=2"), ONE)
        train(config_of(folder, *EAGER, f"output={folder / 'whole'}"), ONE)
    assert run is not None
    assert run.inputs.limits.max_length == MODEL_LENGTH
    resumed = train(config_of(folder, *EAGER), ONE)
    assert resumed is not None
    assert resumed.inputs.limits == run.inputs.limits
    assert_same_weights(folder / "run", folder / "whole", 3)


# -- validation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["none", "tape"])
def test_longer_validation_prompts_do_not_change_training(folder: Path, impl: str) -> None:
    options = (*FROM_DATA, f"graph.impl={impl}", "steps=2", "validation.every=1")
    train(config_of(folder, *options), ONE)
    write_prompts(folder / "held_out.jsonl", 3, 100, 2, 61)
    longer = train(config_of(folder, *options, f"output={folder / 'longer'}"), ONE)
    assert longer is not None
    assert (longer.inputs.limits.max_length, longer.inputs.limits.validation_length) == (20, 116)
    assert longer.inputs.dropped_validation_prompts == 0
    assert_same_weights(folder / "run", folder / "longer", 1)
    assert training_metrics(folder / "run") == training_metrics(folder / "longer")
    assert all(0 <= row["validation/reward"] <= 1 for row in metrics_of(folder / "longer"))


def training_metrics(output: Path) -> list[dict[str, Any]]:
    """The metrics of the steps, without those of validation."""
    return [{key: row[key] for key in row if not key.startswith("validation/")} for row in metrics_of(output)]


def test_the_samples_of_a_prompt_do_not_depend_on_longer_prompts(folder: Path) -> None:
    """A longer validation prompt leaves the samples of the other prompts as they are."""
    options = (*EAGER, "steps=1")
    write_prompts(folder / "held_out.jsonl", 3, 2, 3)
    short = train(config_of(folder, *options), ONE)
    write_prompts(folder / "held_out.jsonl", 3, 2, 3, 70)
    longer = train(config_of(folder, *options, f"output={folder / 'longer'}"), ONE)
    assert short is not None
    assert longer is not None
    samples = [[rollout.tokens for rollout in run.log.validation_rollouts] for run in (short, longer)]
    assert samples[0] == samples[1][: len(samples[0])]
    assert len(samples[1]) > len(samples[0])


def test_scored_validation_has_the_prompt_limit_of_training(tmp_path: Path) -> None:
    """Scoring replays training graphs, so longer validation prompts are refused."""
    student = make_model(tmp_path / "student", 0, length=MODEL_LENGTH)
    write_prompts(tmp_path / "train.jsonl", 3, 2)
    write_prompts(tmp_path / "held_out.jsonl", 3, 20)
    options = [f"model={{path: {student}}}", f"algorithm={{name: distillation, teacher: {student}}}"]
    config = config_of(tmp_path, *FROM_DATA[1:], *options, "reward.functions=[]")
    with pytest.raises(DataError, match=r"held_out\.jsonl:2: the prompt has 20 tokens, and the limit is 16"):
        check_inputs(config, ONE)


# -- the trainer and the plan ------------------------------------------------------------------------


def test_trainer_with_defaults_has_small_buffers_on_a_large_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 0, length=8192)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(50)]
    trainer = Trainer(model, rows, rewards=[letters], max_tokens=32, prompts_per_step=4, samples_per_prompt=4)
    inputs = read_trainer(trainer)
    assert inputs.limits.max_length == 48
    assert inputs.limits.token_buckets[-1] <= 4 * 48 + 12 * 33 + 64
    shape = make_run_shape(trainer.config, device="cpu", prompt_lengths=inputs.prompt_lengths)
    assert cache_plan(trainer.config, shape).tokens == 16 * 48


def read_trainer(trainer: Trainer) -> Inputs:
    inputs = check_inputs(trainer.config, ONE, objects=trainer._objects)
    inputs.rewards.close()
    return inputs


def test_the_plan_uses_the_longest_prompt_of_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "run.yaml"
    file.write_text(to_yaml(config_of(folder, *FROM_DATA)))
    assert main(["plan", str(file), "--device", "cpu"]) == 0
    note = "note: data.max_prompt_tokens is null, and the longest prompt of the data needs 16"
    measured = capsys.readouterr().out.splitlines()
    assert measured[-1] == note
    assert main(["plan", str(file), "data.max_prompt_tokens=16", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines() == measured[:-1]
    assert main(["plan", str(file), "data.train=org/name", "--device", "cpu"]) == 0
    assert "as long as the model allows" in capsys.readouterr().out.splitlines()[-1]


def test_no_suggestion_shortens_measured_prompts(folder: Path) -> None:
    config = config_of(folder, *FROM_DATA, "model.tiny.max_length=512", "rollout.max_tokens=256")
    for measured in (None, PromptLengths(240)):
        shape = make_run_shape(config, device="cpu", prompt_lengths=measured)
        needed = required_bytes(choose_settings(config, shape, MemoryBudget(1)))
        suggestions = suggest_settings(config, shape, MemoryBudget(int(0.9 * needed)))
        assert any("max_prompt_tokens" in remedy.setting for remedy in suggestions) == (measured is None)
