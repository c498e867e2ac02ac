"""Whole training runs: they learn, stop, resume, and survive signals, kills and damaged files."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from rollgraph.checkpoint import write as checkpoint_writer
from rollgraph.checkpoint.changes import ChangedConfig
from rollgraph.checkpoint.format import CheckpointError
from rollgraph.checkpoint.keep import Checkpoints
from rollgraph.cli import main
from rollgraph.config import Config, parse_config, to_yaml
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.failures import ExitCode
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.policy.generate import TurnGenerator
from rollgraph.policy.train_graphs import TrainGraphs
from rollgraph.policy.weights import WeightSlots
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.data.rows import DataError
from rollgraph.rl.turns import Request, Turn
from rollgraph.run.setup import make_run
from rollgraph.run.step_log import StepLog
from rollgraph.train import check_graph_report, open_run, take_steps, train
from tests.forked import ForkedCommand
from tests.parallel.worlds import run_world


def slow(value: str) -> Any:
    """A test parameter that only `make test-all` runs."""
    return pytest.param(value, marks=pytest.mark.slow)


TIMING_PREFIX = "speed/"  # of metrics that differ even between identical runs

SMALL = """
steps: 4
model:
  tiny: {layers: 1, width: 16, heads: 2, kv_heads: 1, mlp: 24, max_length: 16}
data: {prompts_per_step: 4, max_prompt_tokens: 6}
rollout: {samples_per_prompt: 4, max_tokens: 4, rows: 8}
reward:
  functions: [{name: "REWARD"}]
algorithm: {minibatches: 2, options: {kl_coef: 0.05}}
optimizer: {lr: 1e-2, schedule: linear}
train: {token_buckets: [96]}
validation: {every: 2, max_prompts: 8, temperature: 1.0}
checkpoint: {every: 2, export_at_end: false}
memory: {cache_gib: 0.001}
log: {progress: none, sinks: [jsonl]}
graph: {warmup: 1}
"""


def write_inputs(path: Path) -> Path:
    """Write prompts made of digits, and a reward function that counts even bytes."""
    rows = [{"prompt": f"{i:02}?", "answer": "4"} for i in range(40)]
    for name, part in (("train", rows[:30]), ("held_out", rows[30:])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (path / "rewards.py").write_text(
        "import os, signal\n"
        "calls = []\n"
        "def even(prompts, completions, **columns):\n"
        "    calls.append(1)\n"
        "    if os.environ.get('STOP_AT') == str(len(calls)):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [sum(b % 2 == 0 for b in c.encode()) / max(1, len(c.encode())) for c in completions]\n"
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def config_of(folder: Path, *overrides: str, text: str = SMALL) -> Config:
    paths = [f"output={folder / 'run'}", f"data.train={folder / 'train.jsonl'}"]
    paths += [f"data.validation={folder / 'held_out.jsonl'}"]
    return parse_config(text.replace("REWARD", f"{folder / 'rewards.py'}:even"), [*paths, *overrides])


def eager_config(folder: Path, *overrides: str) -> Config:
    """Configure a run without graphs, because captures take most of a short run's time."""
    return config_of(folder, "graph.impl=none", *overrides)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` without timings."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMING_PREFIX)} for line in lines]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps, without the validation before the first one."""
    return [row for row in rows_of(folder) if row["step"] >= 0]


def weights_of(folder: Path, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors that a rank saved in a checkpoint: weights and optimizer moments."""
    return load_file(folder / "checkpoints" / f"step_{step:08}" / f"rank{rank}.safetensors")


def assert_same_run(first: Path, second: Path, step: int) -> None:
    assert rows_of(first) == rows_of(second)
    assert_same_weights(first, second, step)


def assert_same_weights(first: Path, second: Path, step: int) -> None:
    ours, theirs = weights_of(first, step), weights_of(second, step)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


ONE = World(0, 1, "cpu")


def test_a_run_writes_its_files_and_captures_each_graph_once(folder: Path) -> None:
    run = train(config_of(folder, "checkpoint.export_at_end=true", "algorithm.minibatches=1"), ONE)
    out = folder / "run"
    values = metrics_of(out)
    assert [entry["step"] for entry in values] == [0, 1, 2, 3]
    assert values[0]["policy/kl"] == 0.0  # before the first update
    for entry in values:  # generation and training agree bit for bit, before and after updates
        assert entry["policy/token_mult_prob_error"] == 1.0
        assert entry["policy/token_mult_prob_error_max"] == 1.0
    assert values[2]["policy/kl"] > 0
    assert all(0 <= entry["reward"] <= 1 for entry in values)
    assert [entry["step"] for entry in values if "validation/pass@1" in entry] == [1, 3]
    report = json.loads((out / "graphs.json").read_text())
    assert all(graph["captures"] == 1 and not graph["eager_runs"] for graph in report["graphs"])
    assert sum(graph["replays"] for graph in report["graphs"]) > 0
    assert (out / "model" / "model.safetensors").exists()
    assert (out / "samples.jsonl").exists()
    assert not run.policy.sharded.hooks.modules


CUSTOM = """
from pathlib import Path
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.environment import SingleTurn

with (Path(__file__).parent / "runs.txt").open("a") as file:
    file.write("run VERSION\\n")

def mine(completions, **columns):
    return [VERSION + i % 2 for i in range(len(completions))]

class Single(SingleTurn):
    version = VERSION

class Custom(GRPO):
    version = VERSION
"""


def test_a_second_run_in_one_process_sees_edited_files(folder: Path) -> None:
    module_path = folder / "own.py"
    options = [
        f"reward.functions=[{{name: '{module_path}:mine'}}]",
        f"rollout.environment={{name: '{module_path}:Single'}}",
        f"algorithm={{name: '{module_path}:Custom'}}",
    ]
    for version in (1, 2):
        module_path.write_text(CUSTOM.replace("VERSION", str(version)))
        out = folder / f"run{version}"
        run = train(eager_config(folder, "steps=1", "data.validation=null", f"output={out}", *options), ONE)
        assert run is not None
        assert metrics_of(out)[0]["reward"] == version + 0.5
        assert run.inputs.environment.version == version
        assert run.inputs.algorithm.version == version
    assert (folder / "runs.txt").read_text().split("\n") == ["run 1", "run 2", ""]  # imported once for each version


def test_a_finished_run_is_not_changed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(eager_config(folder, "checkpoint.export_at_end=true", "steps=2"), ONE)
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr("rollgraph.run.setup.make_model", lambda *arguments: pytest.fail("a model was made"))
        train(eager_config(folder, "checkpoint.export_at_end=true", "steps=2", "log.progress=plain"), ONE)
        with pytest.raises(ChangedConfig, match="seed: 0 → 5"):
            train(eager_config(folder, "checkpoint.export_at_end=true", "steps=2", "seed=5"), ONE)
        train(eager_config(folder, "checkpoint.export_at_end=true", "steps=1", "log.progress=plain"), ONE)
    output = capsys.readouterr().out
    for steps in (1, 2):
        assert f"steps: {steps}, and {folder / 'run'} has taken 2 already; nothing to do. Raise `steps`" in output
    assert "resumed after" not in output
    assert {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()} == before
    train(eager_config(folder, "checkpoint.export_at_end=true", "steps=3"), ONE)  # more steps resume the run
    assert metrics_of(folder / "run")[-1]["step"] == 2


def test_a_run_killed_before_its_export_is_not_finished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has an exported model, but of fewer steps."""
    model = folder / "run" / "model" / "model.safetensors"
    train(eager_config(folder, "checkpoint.export_at_end=true", "steps=2"), ONE)
    short_export = model.read_bytes()
    longer = eager_config(folder, "checkpoint.export_at_end=true", "steps=3")
    with monkeypatch.context() as patch:
        patch.setattr("rollgraph.train.finish_run", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(longer, ONE)
    assert model.read_bytes() == short_export
    train(longer, ONE)
    assert model.read_bytes() != short_export


@pytest.mark.parametrize("sampling", ["rollout.top_p=0.6", slow("rollout.top_k=5"), slow("rollout.min_p=0.2")])
def test_filtered_rollouts_use_log_probabilities_of_the_policy(folder: Path, sampling: str) -> None:
    """The sampler normalizes over filtered tokens. With its values, ratios would be far from 1 before any update."""
    train(eager_config(folder, sampling, "steps=2", "optimizer.lr=0"), ONE)
    for entry in metrics_of(folder / "run"):
        assert entry["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert entry["policy/token_mult_prob_error"] > 1.01  # this metric still compares with the sampler


@pytest.mark.parametrize(
    ("updates", "exact", "is_scored"),
    [
        ("minibatches=1", "off", False),
        ("minibatches=2", "off", True),
        ("epochs=2", "off", True),
        ("epochs=2", "must", False),
    ],
)
def test_old_log_probabilities_are_scored_for_several_inexact_updates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, updates: str, exact: str, is_scored: bool
) -> None:
    slots: list[str] = []
    original = PolicyWorker.logprobs

    def logprobs(worker: PolicyWorker, samples: Any, weights: str = "policy") -> list[list[float]]:
        slots.append(weights)
        return original(worker, samples, weights)

    monkeypatch.setattr(PolicyWorker, "logprobs", logprobs)
    options = ["steps=1", "algorithm.minibatches=1", f"algorithm.{updates}", f"graph.exact={exact}"]
    options.append("log.samples_every=0")  # logged samples would be scored, too
    train(eager_config(folder, *options), ONE)
    assert ("policy" in slots) == is_scored


def test_a_difference_of_rollouts_and_training_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sampler's log-probabilities are falsified. The run reports it once, and with `must` it stops."""
    original = TurnGenerator.__call__

    def generate(generator: TurnGenerator, requests: list[Request]) -> list[Turn]:
        turns = original(generator, requests)
        return [replace(turn, logprobs=[value - 1e-3 for value in turn.logprobs]) for turn in turns]

    monkeypatch.setattr(TurnGenerator, "__call__", generate)
    train(eager_config(folder, "steps=2", "data.validation=null", "log.progress=plain"), ONE)
    reports = [line for line in capsys.readouterr().out.splitlines() if "disagree" in line]
    assert reports == [
        "step 0: generation and training disagree about a log-probability by 0.001, although all matmuls agree"
    ]
    with pytest.raises(RuntimeError, match="disagree about a log-probability by"):
        train(eager_config(folder, "steps=3", "data.validation=null", "graph.exact=must"), ONE)


def test_samples_are_written_with_their_own_advantages(folder: Path) -> None:
    """Within a group, a higher reward means a higher advantage, in any minibatch."""
    train(eager_config(folder, "log.samples_every=1", "algorithm.minibatches=4"), ONE)
    lines = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for line in lines:
        groups.setdefault((line["step"], line["prompt"]), []).append((line["reward"], line["advantage"]))
    for group in groups.values():
        by_reward = sorted(group)
        assert [advantage for _, advantage in by_reward] == sorted(advantage for _, advantage in by_reward)
    assert any(len({reward for reward, _ in group}) > 1 for group in groups.values())


def test_samples_are_written_with_values_of_tokens(folder: Path) -> None:
    """They are scored again for the log, which does not change training."""
    train(eager_config(folder, "log.samples_every=1", "steps=2"), ONE)
    lines = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["split"] == "train"]
    ratios = []
    for line in trained:
        values = line["token_values"]
        text = re.sub(r"<\|\w+\|>|\ufffd", "", "".join(values["text"]))  # a completion has no special tokens
        assert text == line["completion"].replace("\ufffd", "")
        assert values["advantage"] == [float(f"{line['advantage']:.5g}")] * line["tokens"]
        assert len(values["logprob"]) == line["tokens"]
        if line["step"] == 0:
            assert values["kl"] == [0.0] * line["tokens"]  # the policy is its reference
        for advantage, ratio in zip(values["advantage"], values["ratio"], strict=True):
            ratios.append((advantage, ratio))
    encouraged = [ratio for advantage, ratio in ratios if advantage > 0]
    discouraged = [ratio for advantage, ratio in ratios if advantage < 0]
    assert math.fsum(encouraged) / len(encouraged) > 1 > math.fsum(discouraged) / len(discouraged)
    validated = next(line["token_values"] for line in lines if line["split"] == "validation")
    assert validated["absent"].keys() == {"advantage", "ratio", "kl", "entropy"}
    train(eager_config(folder, "log.samples_every=0", "steps=2", f"output={folder / 'silent'}"), ONE)
    assert_same_run(folder / "run", folder / "silent", step=1)


def test_the_time_of_the_first_step_excludes_validation(folder: Path) -> None:
    """It excludes the validation before it."""
    train(eager_config(folder, "steps=2", "validation.every=100"), ONE)
    _, *lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["speed/seconds/generate"] > 0
    assert "speed/seconds/validate" not in lines[0]
    assert "speed/seconds/validate" in lines[1]  # validation also follows the last step


def test_metrics_have_speed_by_phase_and_memory(folder: Path) -> None:
    train(eager_config(folder, "steps=1", "data.validation=null", "algorithm.options={kl_coef: 0.05}"), ONE)
    (line,) = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    sampled = 16 * line["length/mean"]
    tokens = {"generate": sampled, "score": sampled + 16 * 3, "train": line["tokens/train"]}
    for phase, count in tokens.items():
        assert line[f"speed/tokens_per_second/{phase}"] * line[f"speed/seconds/{phase}"] == pytest.approx(count)
    assert 0.05 < line["speed/memory_gib"] < 100  # PyTorch alone takes more than the lower bound


def test_dropped_groups_are_in_the_metrics(folder: Path) -> None:
    """Two of three groups have equal rewards, so dapo drops them. The mean reward of the others is 0.5."""
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [float(int(p[:2]) % 3 == 0 and i % 2) for i, p in enumerate(prompts)]\n"
    )
    options = ["algorithm.name=dapo", "data.shuffle=false", "data.validation=null", "data.prompts_per_step=3"]
    train(eager_config(folder, *options, "steps=2"), ONE)
    for values in metrics_of(folder / "run"):
        assert (values["groups/rounds"], values["groups/dropped"]) == (3, 6)
        assert values["reward"] == 0.5
        assert values["reward/sampled"] == pytest.approx(0.5 / 3)


def test_the_number_of_threads_is_restored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = make_run(eager_config(folder, "cpu_threads=1"), ONE)
        assert torch.get_num_threads() == 1
        run.close()
        assert torch.get_num_threads() == 2
        monkeypatch.setattr("rollgraph.run.setup.make_policy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_run(eager_config(folder, "cpu_threads=1"), ONE)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_graphs_and_eager_give_the_same_run(folder: Path) -> None:
    train(config_of(folder), ONE)
    train(config_of(folder, "graph.impl=none", f"output={folder / 'eager'}"), ONE)
    assert_same_run(folder / "run", folder / "eager", step=3)


def test_a_graph_report_against_the_configuration_ends_the_run(folder: Path) -> None:
    run = make_run(config_of(folder), ONE)
    try:
        run.policy.generate([([1, 2, 3], 0)], seed="x")
        check_graph_report(run)
        run.policy.pool.disable()
        run.policy.generate([([1, 2, 3], 0)], seed="x")
        with pytest.raises(RuntimeError, match=r"asks for tape graphs, but the report has tape and [1-9]"):
            check_graph_report(run)
    finally:
        run.close()


def test_the_validation_curve_starts_before_the_first_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed in its first step, and starts over, has one baseline."""
    config = eager_config(folder, "validation.every=1", "log.progress=plain", "steps=2")
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": -1, "validation/reward": 7}\n{"step": 0}\n')
    train(config, ONE)
    baseline, *steps = rows_of(folder / "run")
    assert [row["step"] for row in (baseline, *steps)] == [-1, 0, 1]
    assert baseline.keys() == {"step"} | {name for name in steps[0] if name.startswith("validation/")}
    reward = baseline["validation/reward"]
    assert f"before the first step: validation/reward {reward:.3f}, " in capsys.readouterr().out
    assert reward != steps[0]["validation/reward"]  # measured after the step
    train(replace(config, steps=3), ONE)
    assert rows_of(folder / "run")[:3] == [baseline, *steps]


def test_accuracy_does_not_depend_on_weights_of_rewards(folder: Path) -> None:
    """The weights 0.7, 0.2 and 0.1 add up to less than 1 in floating point."""
    (folder / "parts.py").write_text(
        "def ones(completions, **columns):\n"
        "    return [1.0] * len(completions)\n"
        "def some(prompts, completions, **columns):\n"
        "    return [None if p.startswith('30') else float(int(p[:2]) % 2) for p in prompts]\n"
    )
    weights, ones = {"a": 0.7, "b": 0.2, "c": 0.1}, f"{folder / 'parts.py'}:ones"
    functions = [f"{{name: '{ones}', label: {label}, weight: {weight}}}" for label, weight in weights.items()]
    options = ["steps=1", "validation.samples=2", f"reward.functions=[{', '.join(functions)}]"]
    train(eager_config(folder, *options, f"output={folder / 'all'}"), ONE)
    (values,) = metrics_of(folder / "all")
    assert (values["validation/accuracy"], values["validation/pass@2"], values["validation/rewards/b"]) == (1, 1, 1)
    options[-1] = (
        f"reward.functions=[{{name: '{ones}', weight: 0.5}}, {{name: '{folder / 'parts.py'}:some', weight: 0.5}}]"
    )
    train(eager_config(folder, *options), ONE)
    (values,) = metrics_of(folder / "run")
    assert (values["validation/rewards/ones"], values["validation/rewards/some"]) == (1, 4 / 7)  # one prompt gets None
    # Of 8 prompts, 4 are right by both functions, and the one with None by the other function.
    assert (values["validation/accuracy"], values["validation/pass@2"]) == (5 / 8, 5 / 8)


def test_a_perfect_model_has_accuracy_1_with_any_weight(folder: Path) -> None:
    (folder / "ones.py").write_text("def ones(completions, **columns):\n    return [1.0] * len(completions)\n")
    reward = f"reward.functions=[{{name: '{folder / 'ones.py'}:ones', weight: 0.9}}]"
    train(eager_config(folder, "steps=1", "validation.samples=2", reward), ONE)
    (values,) = metrics_of(folder / "run")
    assert values["validation/reward"] == pytest.approx(0.9)
    assert (values["validation/accuracy"], values["validation/pass@2"]) == (1, 1)


@pytest.mark.parametrize("name", ["dapo", slow("gspo"), slow("rloo")])
def test_a_resumed_run_is_the_same_run(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends the first half in its second step."""
    options = [f"algorithm.name={name}", "algorithm.options={kl_coef: 0.05}", "validation.every=100"]
    halves = config_of(folder, *options, f"output={folder / 'halves'}")
    monkeypatch.setenv("STOP_AT", "2")
    train(halves, ONE)
    assert metrics_of(folder / "halves")[-1]["step"] < 3
    monkeypatch.delenv("STOP_AT")
    train(halves, ONE)
    train(eager_config(folder, *options), ONE)
    assert_same_run(folder / "run", folder / "halves", step=3)


def test_each_value_of_resume_is_enforced(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="resume: must"):
        train(eager_config(folder, "resume=must"), ONE)
    train(eager_config(folder, "steps=1"), ONE)
    with pytest.raises(CheckpointError, match="resume: never"):
        train(eager_config(folder, "resume=never"), ONE)
    with pytest.raises(ChangedConfig, match="seed: 0 → 5"):
        train(eager_config(folder, "seed=5"), ONE)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_with_only_broken_checkpoints_is_refused(folder: Path) -> None:
    options = ["checkpoint.every=1", "data.validation=null"]
    train(eager_config(folder, *options, "steps=2"), ONE)
    checkpoints = sorted((folder / "run" / "checkpoints").glob("step_*"))
    assert len(checkpoints) == 2
    for file in ("rank0.safetensors", "manifest.json"):
        for checkpoint in checkpoints:
            flip(checkpoint / file)
        before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
        for resume in ("auto", "must", "never"):
            with pytest.raises(CheckpointError) as raised:
                train(eager_config(folder, *options, f"resume={resume}"), ONE)
            if resume == "never":
                assert "has checkpoints: choose another output" in str(raised.value)
            else:
                assert "has no whole checkpoint; nothing was changed there. Choose another output" in str(raised.value)
                assert all(f"{checkpoint / file} is not" in str(raised.value) for checkpoint in checkpoints)
            assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == before
        for checkpoint in checkpoints:
            flip(checkpoint / file)


@pytest.mark.parametrize("file", ["rank0.safetensors", slow("manifest.json")])
def test_falling_back_to_an_older_checkpoint_is_reported(
    folder: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["checkpoint.every=1", "data.validation=null", "log.progress=plain"]
    train(eager_config(folder, *options, "steps=2"), ONE)
    flip(folder / "run" / "checkpoints" / "step_00000001" / file)
    capsys.readouterr()
    train(eager_config(folder, *options, "steps=3"), ONE)
    lines = capsys.readouterr().out.splitlines()
    (skipped,) = [i for i, line in enumerate(lines) if "step_00000001 is skipped: " in line]
    assert lines[skipped + 1] == "resumed after 1 of 3 steps"


def test_a_changed_reference_is_refused(folder: Path) -> None:
    options = ["data.validation=null"]
    train(eager_config(folder, *options, "steps=1"), ONE)
    weights, config = (folder / "run" / "reference" / name for name in ("model.safetensors", "config.json"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    with pytest.raises(CheckpointError, match=r"reference/model.safetensors is not what was written.*restore it"):
        train(eager_config(folder, *options), ONE)
    no_kl = ["algorithm.options={kl_coef: 0}", "allow_changes=algorithm"]
    train(eager_config(folder, *options, *no_kl, "steps=2"), ONE)  # reads no reference
    weights.write_bytes(whole)
    config.write_bytes(config.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=r"reference/config.json is not what was written"):
        train(eager_config(folder, *options, "allow_changes=algorithm"), ONE)


def test_a_changed_model_folder_is_refused(folder: Path) -> None:
    train(eager_config(folder, "steps=1", f"output={folder / 'tiny'}"), ONE)
    model = folder / "tiny" / "reference"
    options = [f"model={{path: {model}}}", "tokenizer.path=bytes", "data.validation=null"]
    train(eager_config(folder, *options, "steps=1"), ONE)
    assert not (folder / "run" / "reference").exists()
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not what was written"):
        train(eager_config(folder, *options), ONE)
    content[-2] ^= 1
    (model / "model.safetensors").write_bytes(content)
    train(eager_config(folder, *options), ONE)


def test_missing_checksums_of_the_reference_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run saves like a version without checksums."""
    options = ["data.validation=null", "log.progress=plain", "checkpoint.every=1"]
    with monkeypatch.context() as patch:
        patch.setattr("rollgraph.run.reference._record_reference_files", lambda run: [])
        train(eager_config(folder, *options, "steps=1"), ONE)
    for steps, is_reported in ((2, True), (3, False)):
        capsys.readouterr()
        train(eager_config(folder, *options, f"steps={steps}"), ONE)
        assert ("has no checksums of the reference policy: " in capsys.readouterr().out) == is_reported


def test_leftover_checkpoints_of_a_killed_run_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was killed between saving the newest checkpoint and deleting the oldest."""
    options = ["data.validation=null", "checkpoint.every=1"]
    train(eager_config(folder, *options, "steps=2", "checkpoint.keep_last=2"), ONE)
    with monkeypatch.context() as patch:
        patch.setattr("rollgraph.train.collect_rollouts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(eager_config(folder, *options, "steps=3", "checkpoint.keep_last=1"), ONE)
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step_00000001"]


# -- exceptions that end a run ---------------------------------------------------------------------


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Make a method or function of `owner` raise at its call number `call`, counted from 1."""
    calls, original = [0], getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt if name == "validate" else ZeroDivisionError(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


FAILURES_WITH_GRAPHS = {"the reference swap", "backward"}
FAILURES = {
    "the reference swap": (WeightSlots, "_swap", 9),
    "backward": (TrainGraphs, "train", 4),
    "sampling": (TurnGenerator, "__call__", 5),
    "sampling for the same step or the next": (TurnGenerator, "__call__", 6),
    "the batch": (GRPO, "make_batch", 4),
    "the metrics": (StepLog, "write", 4),
}


def sparse_config(folder: Path, *overrides: str) -> Config:
    """Configure six steps that drop a third of all groups, so that some steps sample a surplus."""
    options = ["steps=6", "checkpoint.every=100", "data.validation=null", "algorithm.minibatches=1"]
    options += ["algorithm.options={kl_coef: 0.05, dynamic_sampling: true}", "log.progress=plain"]
    with (folder / "rewards.py").open("a") as file:
        file.write("def some(prompts, completions, **columns):\n")
        file.write("    return [r * (int(p[:2]) % 3 > 0) for p, r in zip(prompts, even(prompts, completions))]\n")
    options.append(f"reward.functions=[{{name: '{folder / 'rewards.py'}:some'}}]")
    return config_of(folder, *options, *overrides)


def test_surplus_groups_are_no_disagreement(folder: Path) -> None:
    train(sparse_config(folder, "graph.exact=must", "graph.impl=none", "log.samples_every=1"), ONE)
    errors = [entry["policy/token_mult_prob_error_max"] for entry in metrics_of(folder / "run")]
    assert errors[0] == 1.0
    assert max(errors) > 1.0  # a step used surplus groups of the step before
    rows = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    dropped = [row for row in rows if row["split"] == "dropped"]
    assert dropped
    assert {int(row["prompt"][:2]) % 3 for row in dropped} == {0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run without graphs. Runs with graphs have the same bits."""
    folder = write_inputs(tmp_path_factory.mktemp("undisturbed"))
    train(sparse_config(folder, "graph.impl=none"), ONE)
    return folder / "run"


@pytest.mark.parametrize("failure", [slow("the reference swap"), *list(FAILURES)[1:]])
def test_an_exception_in_a_step_loses_no_finished_step(
    folder: Path, undisturbed: Path, failure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resumed run equals an undisturbed one, even if the failed step had sampled a surplus."""
    impl = "graph.impl=tape" if failure in FAILURES_WITH_GRAPHS else "graph.impl=none"
    with monkeypatch.context() as patch:
        fail_at(patch, *FAILURES[failure])
        with pytest.raises(ZeroDivisionError):
            train(sparse_config(folder, impl), ONE)
    (saved,) = (folder / "run" / "checkpoints").glob("step_*")
    steps_saved = int(saved.name.removeprefix("step_")) + 1
    assert 1 < steps_saved < 6
    assert f"saved after {steps_saved} of 6 steps" in capsys.readouterr().out
    train(sparse_config(folder, impl, "resume=must"), ONE)
    expected = metrics_of(undisturbed)
    if failure == "the metrics":  # the failed step wrote none
        del expected[steps_saved - 1]
    assert metrics_of(folder / "run") == expected
    assert_same_weights(undisturbed, folder / "run", step=5)


def test_ctrl_c_saves_the_last_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, sys.modules["rollgraph.train"], "validate", 3)
        with pytest.raises(KeyboardInterrupt):
            train(eager_config(folder, "checkpoint.every=100", "data.validation=null"), ONE)
    assert [path.name for path in (folder / "run" / "checkpoints").glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize(("method", "call"), [((TrainGraphs, "train"), 6), ((ShardedAdamW, "update"), 3)])
def test_weights_between_two_updates_are_not_saved(
    folder: Path,
    method: tuple[Any, str],
    call: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exception is raised between two updates of a step, or inside an update."""
    fail_at(monkeypatch, *method, call)
    options = ["checkpoint.every=100", "data.validation=null", "log.progress=plain"]
    with pytest.raises(ZeroDivisionError):
        train(eager_config(folder, *options), ONE)
    assert not list((folder / "run" / "checkpoints").glob("step_*"))
    assert "progress since the last checkpoint is lost" in capsys.readouterr().out


def test_a_failed_save_is_reported_and_retried_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["checkpoint.every=1", "data.validation=null", "log.progress=plain"]
    with monkeypatch.context() as patch:
        fail_at(patch, checkpoint_writer, "_write_tensors", 3)  # in the second save
        train(eager_config(folder, *options), ONE)
    assert capsys.readouterr().out.splitlines().count("_write_tensors") == 1
    assert sorted(path.name for path in (folder / "run" / "checkpoints").glob("step_*")) == [
        "step_00000002",
        "step_00000003",
    ]
    with monkeypatch.context() as patch:
        fail_at(patch, checkpoint_writer, "_write_tensors", 3)
        with pytest.raises(ZeroDivisionError):
            train(eager_config(folder, *options, "steps=6"), ONE)  # the failing save is the last one


def test_a_failed_save_is_repeated_when_an_error_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(monkeypatch, checkpoint_writer, "_write_tensors", 3)  # in the second save
    fail_at(monkeypatch, TurnGenerator, "__call__", 3)
    with pytest.raises(ZeroDivisionError, match="__call__"):
        train(eager_config(folder, "checkpoint.every=1", "data.validation=null", "log.progress=plain"), ONE)
    assert capsys.readouterr().out.splitlines()[-2:] == ["saved after 2 of 4 steps", "_write_tensors"]
    assert (folder / "run" / "checkpoints" / "step_00000001").exists()


def test_the_best_checkpoint_is_kept_with_any_intervals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = iter([0.5, 0.9, 0.1, 0.2, 0.3, 0.4, 0.5])  # before the first step, then after steps 1, 3, ...
    for module in ("validation", "begin"):
        monkeypatch.setattr(
            f"rollgraph.run.{module}.evaluate_policy", lambda run, seed: {"validation/reward": next(rewards)}
        )
    saved = []
    original = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, step, *args, **kw: (saved.append(step), original(self, step, *args, **kw))
    )
    run = train(
        eager_config(folder, "steps=12", "validation.every=2", "checkpoint.every=5", "checkpoint.keep_last=1"), ONE
    )
    assert run is not None
    assert saved == [1, 4, 9, 11]
    names = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step_*"))
    assert names == ["step_00000001", "step_00000011"]


def test_prompts_that_are_too_long_are_dropped_once(folder: Path) -> None:
    rows = [{"prompt": "x" * length, "answer": "4"} for length in (3, 30, 4, 40, 5, 50)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["data.max_prompt_tokens=null", "data.prompts_per_step=2", "data.too_long=drop", "steps=2"]
    run = train(eager_config(folder, *options), ONE)
    assert [len(prompt.tokens) for prompt in run.inputs.validation] == [3, 4, 5]
    assert metrics_of(folder / "run")[-1]["data/dropped_prompts"] == 3
    with pytest.raises(DataError, match="jsonl:2"):
        train(eager_config(folder, *options, "data.too_long=error", f"output={folder / 'other'}"), ONE)


def test_a_run_without_usable_rollouts_ends_with_its_checkpoints(folder: Path) -> None:
    (folder / "fragile.py").write_text(
        "from pathlib import Path\n"
        "from rollgraph.rl.algorithms.grpo import GRPO\n"
        "class Fragile(GRPO):\n"
        "    def weights(self, lengths):\n"
        "        broken = Path(__file__).with_name('broken').exists()\n"
        "        return [float('nan')] * len(lengths) if broken else super().weights(lengths)\n"
    )
    options = ["data.validation=null", "checkpoint.every=1", f"algorithm.name={folder / 'fragile.py'}:Fragile"]
    train(eager_config(folder, *options, "steps=2"), ONE)
    (folder / "broken").touch()
    with pytest.raises(RuntimeError, match="every rollout failed, or the loss is not finite"):
        train(eager_config(folder, *options, "steps=9"), ONE)
    assert (folder / "run" / "checkpoints" / "step_00000001").exists()  # the last good checkpoint is not pruned
    (folder / "broken.py").write_text("def f(prompts, completions, **columns):\n    raise RuntimeError('no idea')\n")
    broken = [f"reward.functions=[{{name: '{folder / 'broken.py'}:f'}}]", f"output={folder / 'other'}"]
    with pytest.raises(RuntimeError, match=r"no rollout of the first step got a reward: .*no idea"):
        train(eager_config(folder, *broken), ONE)


def test_failing_rewards_do_not_end_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    if any(ord(c[0]) % 3 == 0 for c in completions if c):\n"
        "        raise RuntimeError(f'cannot read {ord(completions[0][0])}')\n"
        "    return [1.0] * len(completions)\n"
    )
    run = train(eager_config(folder, "reward.on_failure=-1.0", "log.progress=plain"), ONE)
    failures = run.inputs.rewards.failures["raised"]
    assert failures > 10
    assert len(metrics_of(folder / "run")) == 4
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("a reward failed and counts as -1: even: RuntimeError: cannot")]
    assert len(notes) == len(set(notes)) == 5  # out of many failures
    assert f"rewards failed for {failures} rollouts: {failures} raised" in lines


def test_failures_beside_rewards_of_zero_do_not_end_the_run(folder: Path) -> None:
    """All rewards of the first step are 0, but the function succeeded for some rollouts."""
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    if any(ord(c[0]) % 3 == 0 for c in completions if c):\n"
        "        raise RuntimeError('no idea')\n"
        "    return [0.0] * len(completions)\n"
    )
    train(eager_config(folder, "steps=1", "data.validation=null"), ONE)
    (values,) = metrics_of(folder / "run")
    assert 0 < values["failures/unrewarded"] == values["failures/reward/raised"] / 16 < 1


def test_failures_are_counted_per_step(folder: Path) -> None:
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    if any(int(p[:2]) % 2 for p in prompts):\n"
        "        raise RuntimeError('no idea')\n"
        "    return [len(c) / 4 for c in completions]\n"
    )
    halves = ["optimizer.schedule=constant", f"output={folder / 'halves'}"]
    train(eager_config(folder, *halves, "steps=2"), ONE)
    train(eager_config(folder, *halves), ONE)
    train(eager_config(folder, "optimizer.schedule=constant"), ONE)
    failures = [entry.get("failures/reward/raised", 0) for entry in metrics_of(folder / "run")]
    assert sum(failures) > max(failures) > 0
    assert_same_run(folder / "run", folder / "halves", step=3)


def test_a_second_sigterm_changes_nothing(folder: Path) -> None:
    """As when a scheduler signals the whole job, and `torchrun` forwards its own signal."""
    (folder / "rewards.py").write_text(
        "import os, signal\n"
        "def even(prompts, completions, **columns):\n"
        "    for _ in range(3):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [len(c) / 4 for c in completions]\n"
    )
    train(eager_config(folder, "steps=100", "checkpoint.every=100", "data.validation=null"), ONE)
    assert [entry["step"] for entry in metrics_of(folder / "run")] == [0]
    assert weights_of(folder / "run", 0)


def test_a_stop_is_reported_after_its_checkpoint_is_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Checkpoints._write

    def slow_disk(self: Checkpoints, *arguments: Any) -> None:
        time.sleep(0.3)  # long enough to reveal a run that does not wait
        write(self, *arguments)
        print("it is on the disk", flush=True)

    monkeypatch.setattr(Checkpoints, "_write", slow_disk)
    monkeypatch.setenv("STOP_AT", "2")
    train(eager_config(folder, "steps=100", "checkpoint.every=100", "data.validation=null", "log.progress=plain"), ONE)
    lines = capsys.readouterr().out.splitlines()
    report = next(index for index, line in enumerate(lines) if line.startswith("asked to stop: saved after 2 of 100"))
    assert "it is on the disk" in lines[:report]


def test_a_stop_that_cannot_be_saved_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(self: Checkpoints, *arguments: Any) -> None:
        raise CheckpointError("no space left")

    monkeypatch.setattr(Checkpoints, "_write", full_disk)
    monkeypatch.setenv("STOP_AT", "2")
    with pytest.raises(CheckpointError, match="no space left"):
        train(
            eager_config(folder, "steps=100", "checkpoint.every=100", "data.validation=null", "log.progress=plain"), ONE
        )
    assert "asked to stop: saved" not in capsys.readouterr().out


def test_a_step_whose_reward_workers_died_at_the_stop_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker is killed at the time of the stop, by a signal that it cannot catch."""
    monkeypatch.setenv("TRAINER", str(os.getpid()))
    (folder / "rewards.py").write_text(
        "import os, pathlib, signal\n"
        "def even(prompts, completions, **columns):\n"
        "    calls = pathlib.Path(__file__).with_name('calls')\n"
        "    with calls.open('a') as file:\n"
        "        file.write('x')\n"
        "    if calls.stat().st_size == 3:\n"
        "        os.kill(int(os.environ['TRAINER']), signal.SIGTERM)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [sum(b % 2 == 0 for b in c.encode()) / 8 for c in completions]\n"
    )
    workers = ["reward.workers=1", "reward.timeout=60", "data.validation=null", "checkpoint.every=100"]
    with open_run(eager_config(folder, *workers, "log.progress=plain"), ONE) as (run, first_step):
        assert run is not None
        assert first_step is not None
        assert list(take_steps(run, first_step)) == [0, 1]
    assert "asked to stop: saved after 2 of 4 steps" in capsys.readouterr().out
    assert [entry["step"] for entry in metrics_of(folder / "run")] == [0, 1]
    train(eager_config(folder, *workers, "resume=must"), ONE)
    train(eager_config(folder, *workers, f"output={folder / 'undisturbed'}"), ONE)
    assert_same_run(folder / "undisturbed", folder / "run", step=3)


TWO_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
COMMAND = [sys.executable, "-m", "rollgraph", "train"]


def start(
    folder: Path,
    *overrides: str,
    prefix: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[str]:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config_of(folder, *overrides)))
    environment = {**os.environ, **(environment or {})}
    command = [*prefix, *COMMAND[1:]] if prefix else COMMAND
    return subprocess.Popen(
        [*command, str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=new_session,
    )


def fork(folder: Path, *overrides: str) -> ForkedCommand:
    """Start the command in a forked process, which is faster."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(config_of(folder, *overrides)))
    return ForkedCommand(folder, folder, "train", str(path))


def wait_for(condition: Any, process: subprocess.Popen[str] | ForkedCommand, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_sigterm_saves_and_has_its_exit_code(folder: Path) -> None:
    process = fork(folder, "steps=1000", "checkpoint.every=1000", "graph.impl=none")
    metrics = folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)
    assert process.returncode == ExitCode.TERMINATED, output
    saved = max((folder / "run" / "checkpoints").glob("step_*"))
    assert int(saved.name.removeprefix("step_")) == metrics_of(folder / "run")[-1]["step"]


@pytest.mark.slow
@pytest.mark.multi
def test_sigterm_to_a_whole_job_is_saved(folder: Path) -> None:
    """Slurm and systemd send SIGTERM to `torchrun`, its ranks and their reward workers."""
    options = ["steps=1000", "checkpoint.every=1000", "reward.workers=1", "reward.timeout=60", "log.progress=plain"]
    prefix = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    process = start(folder, *options, prefix=prefix, new_session=True)
    metrics = folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=200)[0]
    saved = max((folder / "run" / "checkpoints").glob("step_*"))
    taken = metrics_of(folder / "run")[-1]["step"] + 1
    assert int(saved.name.removeprefix("step_")) == taken - 1, output
    assert f"asked to stop: saved after {taken} of 1000 steps" in output
    assert not any("failures/reward/died" in entry for entry in metrics_of(folder / "run"))


@pytest.mark.multi
def test_a_killed_run_resumes_with_the_same_bits(folder: Path) -> None:
    """SIGKILL comes at its start, while it writes a checkpoint, and after step 6."""
    options = ["steps=12", "checkpoint.every=1", "validation.every=100"]
    train(eager_config(folder, *options), ONE)
    killed = [*options, "graph.impl=none", f"output={folder / 'killed'}"]
    checkpoints = folder / "killed" / "checkpoints"

    def saving() -> bool:
        return checkpoints.exists() and any(
            p.is_dir() and not p.name.removeprefix("step_").isdigit() for p in checkpoints.iterdir()
        )

    def steps(count: int) -> Any:
        return lambda: (checkpoints / f"step_{count:08}").exists()

    for condition in (lambda: True, saving, steps(6)):
        process = fork(folder, *killed)
        wait_for(condition, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = fork(folder, *killed)
    output = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_run(folder / "run", folder / "killed", step=11)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments_change_nothing(folder: Path) -> None:
    """Every step is saved, so many of the kills hit a save."""
    options = ["steps=400", "checkpoint.every=1", "validation.every=100"]
    train(config_of(folder, *options), ONE)
    assert kill_at_random_moments(folder, 20, *options) > 0  # at least one kill hit a save
    assert_same_run(folder / "run", folder / "killed", step=399)


def kill_at_random_moments(folder: Path, kills: int, *options: str) -> int:
    """Start and kill a run in the folder `killed` repeatedly, then finish it. Return how many kills hit a save.

    A fast machine may take all steps before the last kill: then there are fewer.
    """
    killed = [*options, f"output={folder / 'killed'}"]
    checkpoints = folder / "killed" / "checkpoints"
    generator, during_a_save = random.Random(0), 0
    for _ in range(kills):
        before = set(checkpoints.iterdir()) if checkpoints.exists() else set()
        process = start(folder, *killed)
        # Wait until it has started to save.
        while process.poll() is None and not (checkpoints.exists() and set(checkpoints.iterdir()) != before):
            time.sleep(0.005)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=generator.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        output = process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, output
            break
        during_a_save += any(path.name.endswith(".incomplete") for path in checkpoints.iterdir())
    process = start(folder, *killed)
    assert process.wait(timeout=900) == 0, process.communicate()[0]
    return during_a_save


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_share_the_prompts_and_learn_the_same(folder: Path) -> None:
    process = start(folder, "steps=3", "validation.max_prompts=7", prefix=(sys.executable, *TWO_RANKS))
    output = process.communicate()[0]
    assert process.returncode == 0, output
    values = metrics_of(folder / "run")
    assert [entry["step"] for entry in values] == [0, 1, 2]
    train(eager_config(folder, "steps=3", "validation.max_prompts=7", f"output={folder / 'alone'}"), ONE)
    alone = metrics_of(folder / "alone")
    assert values[0]["reward"] == pytest.approx(alone[0]["reward"])  # the same prompts, the same noise
    assert rows_of(folder / "run")[0] == pytest.approx(rows_of(folder / "alone")[0])  # ranks share the validation
    assert values[2]["loss"] == pytest.approx(alone[2]["loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_evaluate_the_model_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(eager_config(folder, "steps=2"), ONE)
    (folder / "run.yaml").write_text(to_yaml(config_of(folder, "steps=2", "validation.max_prompts=7")))
    assert main(["eval", str(folder / "run.yaml")]) == 0
    alone = capsys.readouterr().out
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = []
    for rank in range(2):
        out = folder / f"rank{rank}"
        out.mkdir()
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # as `torchrun` does
        ranks.append(ForkedCommand(folder, out, "eval", str(folder / "run.yaml"), **variables))
    outputs = [process.communicate() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    together = "".join(stdout for stdout, _ in outputs)
    assert json.loads(together) == pytest.approx(json.loads(alone))


def train_on_a_rank(world: World, config: Config, output: Path) -> None:
    os.environ["RANK"] = str(world.rank)
    with output.open("a") as file, redirect_stdout(file):
        train(config, world)


@pytest.mark.multi
def test_failed_rewards_of_other_ranks_are_reported_and_counted(folder: Path) -> None:
    (folder / "rewards.py").write_text(
        "import os\n"
        "def even(prompts, completions, **columns):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('no idea')\n"
        "    return [len(c) / 4 for c in completions]\n"
    )
    config = eager_config(folder, "steps=2", "data.validation=null", "log.progress=plain")
    assert run_world(2, folder, train_on_a_rank, config, folder / "output") == [None, None]
    output = (folder / "output").read_text()
    assert output.count("a reward failed and counts as 0: even: RuntimeError: no idea") == 1
    assert "rewards failed for 16 rollouts: 16 raised" in output
    for entry in metrics_of(folder / "run"):
        assert (entry["failures/reward/raised"], entry["failures/unrewarded"]) == (8, 0.5)
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for rank in range(2):
            assert 0 < values[f"speed/ranks/{rank}/seconds/generate"] < values["speed/seconds"] + 60
            assert values[f"speed/ranks/{rank}/memory_gib"] > 0
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    failed = [sample["failures"]["even"] for sample in samples if "failures" in sample]
    assert 0 < len(failed) < len(samples)
    assert all(message.startswith("RuntimeError: no idea (") for message in failed)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_overlap_swaps_and_a_resume_change_nothing(folder: Path, ranks: int) -> None:
    """Compare 20 steps with graphs, stopped by SIGTERM and resumed, with an undisturbed eager run."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone")
    options = ["steps=20", "validation.every=7", "checkpoint.every=100", "algorithm.options={kl_coef: 0.05}"]

    def run(*overrides: str, stop_at: str = "") -> None:
        process = start(folder, *options, *overrides, prefix=torchrun, environment={"STOP_AT": stop_at})
        output = process.communicate(timeout=900)[0]
        assert (process.returncode == 0) == (not stop_at), output

    run("graph.impl=none", f"output={folder / 'eager'}")
    run(stop_at="9")
    assert metrics_of(folder / "run")[-1]["step"] < 15
    run("resume=must")
    assert metrics_of(folder / "eager") == metrics_of(folder / "run")
    for rank in range(ranks):
        ours, theirs = (weights_of(folder / name, 19, rank) for name in ("run", "eager"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    report = json.loads((folder / "run" / "graphs.json").read_text())
    assert all(graph["captures"] == 1 and not graph["eager_runs"] for graph in report["graphs"])
    assert any(graph["backward_replays"] for graph in report["graphs"]) == (ranks > 1)  # several ranks capture layers
