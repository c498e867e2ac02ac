"""Mistakes in a run's inputs are reported before a model is built, with the configuration key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgraph.checkpoint.changes import ChangedConfig
from rollgraph.checkpoint.format import CheckpointError
from rollgraph.config import Config, ConfigError
from rollgraph.inputs.inputs import check_inputs
from rollgraph.log import SinkError
from rollgraph.model import Architecture, Decoder, save_model
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.data.rows import DataError
from rollgraph.rl.paths import LoadError
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.train import train
from tests.test_train import ONE, config_of, eager_config, folder, metrics_of

__all__ = ["folder"]

CALCULATOR = "rollout.environment={name: 'rollgraph.rl.calculator:calculator', options: {max_tokens: %d}}"
WRONG: list[tuple[list[str], type[Exception], str]] = [
    (["data.train=FOLDER/nowhere.jsonl"], DataError, r"^data\.train: .*nowhere\.jsonl: no such file"),
    (["data.validation=FOLDER/nowhere.jsonl"], DataError, r"^data\.validation: .*nowhere\.jsonl: no such file"),
    (["warm_start.data=FOLDER/nowhere.jsonl"], DataError, r"^warm_start\.data: .*nowhere\.jsonl: no such file"),
    (["data.validation=FOLDER/bare.jsonl", "reward.functions=[{name: exact_match}]"], LoadError,
     r"reward\.functions\[0\]: reward 'exact_match' needs the column 'answer'"),
    (["reward.functions=[{name: 'FOLDER/rewards.py:odd'}]"], LoadError,
     r"reward\.functions\[0\]\.name: .*has no 'odd'"),
    (["reward.functions=[{name: 'os.path:basename'}]"], LoadError,
     r"reward\.functions\[0\]\.name: .*is called with keyword arguments"),
    (["log.sinks=[wandb]", "log.wandb.project=p"], SinkError, r"log\.sinks: not installed: wandb"),
    (["resume=must"], CheckpointError, "resume: must"),
    (["warm_start.data=FOLDER/train.jsonl"], DataError, r"warm_start\.data: .*train\.jsonl:1: a demonstration needs"),
    (["warm_start.data=FOLDER/long.jsonl"], DataError, r"warm_start\.data: .*long\.jsonl:2: .* 16 tokens, .* is 10$"),
    (["warm_start.data=FOLDER/half.jsonl"], DataError, r"warm_start\.data: .*half\.jsonl:1: 'completion' must be text"),
    (["algorithm.options={clip: 0.2}"], ValueError, r"algorithm\.options\.clip: algorithm 'grpo' has no such setting"),
    (["algorithm.options={clip_low: -1}"], ValueError, r"algorithm\.options\.clip_low: expected .*, got -1"),
    (["algorithm={name: dr_grpo}"], ValueError,
     r"^algorithm\.options\.max_tokens: required by algorithm 'dr_grpo', but missing"),
    (["graph.impl=cuda"], ConfigError, r"^graph\.impl: cuda needs a CUDA device, but this run is on cpu"),
    (["optimizer.offload=host"], ConfigError,
     r"^optimizer\.offload: host needs a CUDA device; .* \[offload_from_a_device\]$"),
    (["rollout.stop=['']"], ValueError, r"rollout\.stop: must be"),
    (["data.max_prompt_tokens=2"], DataError, r"data\.max_prompt_tokens: .*the limit is 2; .*data\.too_long='drop'"),
    (["memory.cache_gib=1e-6"], ConfigError, r"memory\.cache_gib: 1e-06 GiB hold 0 tokens.* may have 10"),
    ([CALCULATOR % 11], ConfigError,
     r"rollout\.environment\.options\.max_tokens: data\.max_prompt_tokens \(6\) and 11 tokens after it do not fit: "
     r"model\.tiny\.max_length is 16"),
    ([CALCULATOR % 16, "data.max_prompt_tokens=null"], ConfigError,
     r"rollout\.environment\.options\.max_tokens: a prompt and 16 tokens after it do not fit"),
    ([CALCULATOR % 14, "data.max_prompt_tokens=null"], DataError,
     r"max_prompt_tokens: .*the prompt has 3 tokens, .*the limit is 2"),
    ([CALCULATOR % 0], ValueError, r"rollout\.environment\.options\.max_tokens: must be at least 1, got 0"),
    ([CALCULATOR % 8, "train.token_buckets=[10]"], ConfigError,
     r"train\.token_buckets: the largest holds 10 tokens, but the longest prompt with "
     r"rollout\.environment\.options\.max_tokens \(8\) takes 11"),
    (["train.token_buckets=[6]", "data.max_prompt_tokens=null"], ConfigError,
     r"train\.token_buckets: the largest holds 6 .* rollout\.max_tokens \(4\) takes 7"),
    (["rollout.environment.name=nowhere:Env"], LoadError, r"rollout\.environment: .*there is no module 'nowhere'"),
    (["reward.functions=[]", CALCULATOR % 8], ConfigError, r"reward\.functions: is empty.*calculator gives no rewards"),
    (["model.checkpointing=3"], ConfigError, r"model\.checkpointing: 3 layers, but the model has 1"),
]  # fmt: skip


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("rollgraph.run.setup.make_model", build)


def write_rows(path: Path, *rows: dict[str, str]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("overrides", "kind", "message"), WRONG, ids=[wrong[2][:40] for wrong in WRONG])
def test_mistakes_are_reported_before_a_model_is_built(
    folder: Path, overrides: list[str], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgraph.log.metrics._is_installed", lambda package: False)
    write_rows(folder / "bare.jsonl", {"prompt": "1"})
    write_rows(folder / "long.jsonl", {"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": "2" * 14})
    write_rows(folder / "half.jsonl", {"prompt": "1", "completion": "b\ud83d"})
    config = config_of(folder, *(override.replace("FOLDER", str(folder)) for override in overrides))
    with pytest.raises(kind, match=message):
        train(config, ONE)
    assert not (folder / "run").exists()


@pytest.mark.usefixtures("no_model")
def test_valid_inputs_get_as_far_as_the_model(folder: Path) -> None:
    for overrides in ([], [CALCULATOR % 10], [CALCULATOR % 13, "data.max_prompt_tokens=null"]):
        with pytest.raises(AssertionError, match="a model was built"):
            train(config_of(folder, *overrides), ONE)


def test_each_rank_needs_a_prompt(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data\.prompts_per_step: each of 5 ranks needs at least one prompt per step, got 4"
    ):
        check_inputs(config_of(folder), World(0, 5, "cpu"))


def with_model(folder: Path, vocabulary: int, *overrides: str) -> Config:
    architecture = Architecture(
        "llama", vocabulary=vocabulary, hidden=16, mlp=24, layers=1, heads=2, kv_heads=1, head_dim=8, max_length=16
    )
    model = Decoder(architecture)
    model.reset_parameters()
    save_model(model, folder / "model")
    ByteTokenizer().save(folder / "model")
    return config_of(folder, "model.tiny=null", f"model.path={folder / 'model'}", *overrides)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path, no_model: None) -> None:
    size = ByteTokenizer().vocab_size
    message = rf"tokenizer\.path: .*model has ids up to {size - 1}, but .*model\.path .* a vocabulary of {size - 1}"
    with pytest.raises(ValueError, match=message):
        train(with_model(folder, size - 1), ONE)
    with pytest.raises(AssertionError, match="a model was built"):
        train(with_model(folder, size + 7), ONE)


def test_the_length_of_a_model_folder_is_a_limit(folder: Path, no_model: None) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens: data\.max_prompt_tokens \(6\) and 11 .* takes\W+16"):
        train(with_model(folder, 300, "rollout.max_tokens=11"), ONE)


def test_max_length_fits_all_turns_of_an_environment(folder: Path) -> None:
    """Several turns may take more than `rollout.max_tokens`, which limits a single turn."""
    inputs = check_inputs(config_of(folder, CALCULATOR % 9), ONE)
    assert inputs.limits.max_length == 15


def test_reward_workers_end_if_a_later_check_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollgraph.rl.rewards import pool

    stopped: list[int] = []
    stop: Callable[..., int] = pool.WorkerHandle.stop
    monkeypatch.setattr(pool.WorkerHandle, "stop", lambda self: stopped.append(1) or stop(self))
    with pytest.raises(DataError):
        train(config_of(folder, "reward.workers=1", "data.train=nowhere.jsonl"), ONE)
    assert stopped


JUDGE = """
from rollgraph.rl.environment import SingleTurn

class Judge(SingleTurn):
    gives_rewards = {gives}

    def run(self, generate, prompts):
        rollouts = super().run(generate, prompts)
        for rollout in rollouts:
            rollout.reward = float(len(rollout.text) % 2)
        return rollouts
"""


def test_an_environment_may_give_the_rewards(folder: Path) -> None:
    (folder / "judge.py").write_text(JUDGE.format(gives=True))
    options = ["reward.functions=[]", f"rollout.environment.name={folder / 'judge.py'}:Judge", "steps=1"]
    run = train(eager_config(folder, *options), ONE)
    (values,) = metrics_of(folder / "run")
    assert 0 < values["reward"] < 1
    assert values["rewards/environment"] == pytest.approx(values["reward"])
    assert not run.inputs.rewards.failures
    (folder / "mute.py").write_text(JUDGE.format(gives=False))
    with pytest.raises(ConfigError, match=r"reward\.functions: is empty"):
        train(eager_config(folder, *options, f"rollout.environment.name={folder / 'mute.py'}:Judge"), ONE)


def test_rewards_are_added_to_those_of_the_environment(folder: Path) -> None:
    (folder / "judge.py").write_text(JUDGE.format(gives=True))
    (folder / "one.py").write_text("def one(completions, **columns):\n    return [1.0] * len(completions)\n")
    functions = f"reward.functions=[{{name: '{folder / 'one.py'}:one', weight: 2.0}}]"
    train(eager_config(folder, functions, f"rollout.environment.name={folder / 'judge.py'}:Judge", "steps=1"), ONE)
    (values,) = metrics_of(folder / "run")
    assert values["reward"] == pytest.approx(2.0 + values["rewards/environment"])


def test_a_resume_with_other_rows_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(eager_config(folder, "steps=1"), ONE)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows[7]["prompt"] = "xx?"
    write_rows(folder / "train.jsonl", *rows)
    monkeypatch.setattr("rollgraph.run.setup.make_model", lambda *arguments: pytest.fail("a model was built"))
    with pytest.raises(ChangedConfig, match=r"step_00000000 .*data\.train: the content of .*train\.jsonl has changed"):
        train(eager_config(folder), ONE)
