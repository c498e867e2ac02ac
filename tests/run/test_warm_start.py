"""Warm starts use the chat template, and can be stopped, killed and resumed like the steps after them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollgraph.checkpoint.changes import ChangedConfig
from rollgraph.checkpoint.format import CheckpointError
from rollgraph.config import Config, parse_config, to_yaml
from rollgraph.inputs.inputs import check_inputs
from rollgraph.rl.data.rows import DataError
from rollgraph.train import train
from tests.forked import ForkedCommand
from tests.run.test_supervised import write_rows
from tests.test_train import ONE, assert_same_run

WARM = """
steps: 2
model:
  tiny: {layers: 1, width: 16, heads: 2, kv_heads: 1, mlp: 24, max_length: 64}
data: {prompts_per_step: 2, max_prompt_tokens: 40, chat: true}
rollout: {samples_per_prompt: 2, max_tokens: 24, rows: 4}
reward: {functions: [{name: "REWARD"}]}
algorithm: {options: {kl_coef: 0.05}}
optimizer: {lr: 1e-2, schedule: linear}
train: {token_buckets: [192]}
checkpoint: {every: 2, export_at_end: false, asynchronous: false}
memory: {cache_gib: 0.001}
log: {progress: plain, sinks: [jsonl]}
graph: {impl: none}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Prompts, demonstrations, and a reward that can end its process. The size of `calls` counts its calls."""
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib, signal\n"
        "def count(completions, **columns):\n"
        "    calls = pathlib.Path(__file__).with_name('calls')\n"
        "    with calls.open('a') as file:\n"
        "        file.write('x')\n"
        "    if os.environ.get('STOP_AT') == str(calls.stat().st_size):\n"
        "        os.kill(os.getpid(), getattr(signal, os.environ['STOP_BY']))\n"
        "    return [len(set(c)) / 8 for c in completions]\n"
    )
    write_rows(tmp_path / "other.jsonl", [{"prompt": "a", "completion": "b"}])
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i}?"} for i in range(7)])
    write_rows(tmp_path / "demonstrations.jsonl", [{"prompt": f"{i}?", "completion": "odd" * i} for i in range(6)])
    return tmp_path


def warm_config(folder: Path, name: str, *overrides: str) -> Config:
    """A warm start of eight steps. The reward is checked after every third one and is never high enough to stop."""
    rows = [f"data.train={folder / 'prompts.jsonl'}", f"output={folder / name}"]
    warm = "{data: DATA, steps: 8, batch_size: 4, lr: 1e-2, stop_at: 9.0, check_every: 3}"
    rows.append("warm_start=" + warm.replace("DATA", str(folder / "demonstrations.jsonl")))
    return parse_config(WARM.replace("REWARD", f"{folder / 'rewards.py'}:count"), [*rows, *overrides])


def assert_undisturbed(folder: Path, name: str) -> None:
    """The warm start and the steps after it gave the weights of a run without interruption."""
    train(warm_config(folder, "undisturbed"), ONE)
    reference = Path("reference") / "model.safetensors"
    assert (folder / name / reference).read_bytes() == (folder / "undisturbed" / reference).read_bytes()
    assert_same_run(folder / name, folder / "undisturbed", step=1)


def test_demonstrations_use_the_chat_template_of_the_prompts(folder: Path) -> None:
    inputs = check_inputs(warm_config(folder, "run"), ONE)
    assert inputs.warm_start is not None
    prompts = {prompt.text for prompt in inputs.data.next_prompts()}
    assert all(text.startswith("<|bos|>user: ") for text in prompts)
    for rollout in inputs.warm_start.next_rollouts():
        assert rollout.prompt.text == f"<|bos|>user: {rollout.prompt.id}?<|eos|>\nassistant: "


def test_demonstrations_show_the_tools_of_the_environment(folder: Path) -> None:
    environment = '{name: "rollgraph.rl.chat:Chat", options: {tools: ["rollgraph.rl.calculator:calculate"]}}'
    sizes = ["model.tiny.max_length=1024", "data.max_prompt_tokens=900", "train.token_buckets=[2048]"]
    options = [f"rollout.environment={environment}", "rollout.environment.options.max_tokens=24", "data.chat=false"]
    inputs = check_inputs(warm_config(folder, "run", *sizes, *options), ONE)
    assert inputs.warm_start is not None
    rollouts = [rollout for _ in range(2) for rollout in inputs.warm_start.next_rollouts()][:6]
    prompt = next(prompt for prompt in inputs.data.next_prompts() if prompt.id < 6)
    (demonstration,) = (rollout for rollout in rollouts if rollout.prompt.id == prompt.id)
    assert '"name": "calculate"' in prompt.text
    assert (demonstration.prompt.text, demonstration.prompt.tokens) == (prompt.text, prompt.tokens)
    assert demonstration.text == "odd" * prompt.id + "<|eos|>\n"


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("by", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_stopped_warm_start_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    monkeypatch.setenv("STOP_AT", "1")
    monkeypatch.setenv("STOP_BY", by)
    if by == "SIGINT":
        with pytest.raises(KeyboardInterrupt):
            train(warm_config(folder, "stopped"), ONE)
    else:
        train(warm_config(folder, "stopped"), ONE)
    assert "asked to stop: saved after 3 of 8 steps of the warm start" in capsys.readouterr().out
    monkeypatch.delenv("STOP_AT")
    with pytest.raises(DataError, match=r"warm_start\.data and seed do not match"):
        train(warm_config(folder, "stopped", f"warm_start.data={folder / 'other.jsonl'}"), ONE)
    with pytest.raises(CheckpointError, match="resume: never"):
        train(warm_config(folder, "stopped", "resume=never"), ONE)
    with pytest.raises(CheckpointError, match="is of a warm start, but warm_start is null: choose another output"):
        train(warm_config(folder, "stopped", "warm_start=null", "allow_changes=warm_start"), ONE)
    moved = (folder / "prompts.jsonl").rename(folder / "moved.jsonl")
    resumed = warm_config(folder, "stopped", "resume=must", f"data.train={moved}", "log.every=2")
    moved.with_name("prompts.jsonl").hardlink_to(moved)
    train(resumed, ONE)
    output = capsys.readouterr().out
    assert "resumed after 3 of 8 steps of the warm start\nchanged since then: log.every: 1 → 2\n" in output
    starts = (folder / "stopped" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(start)["changes"] for start in starts] == [[], [{"key": "log.every", "old": 1, "new": 2}]]
    assert not (folder / "stopped" / "warm_start").exists()  # the run has a checkpoint by now
    assert_undisturbed(folder, "stopped")


def test_a_warm_start_resumes_with_other_data_if_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_AT", "1")
    monkeypatch.setenv("STOP_BY", "SIGTERM")
    train(warm_config(folder, "run"), ONE)
    monkeypatch.delenv("STOP_AT")
    changes = [f"data.train={folder / 'other.jsonl'}", f"warm_start.data={folder / 'other.jsonl'}", "seed=1"]
    with pytest.raises(ChangedConfig, match=r"seed: 0 → 1; data\.train: .*prompts\.jsonl → .*other\.jsonl"):
        train(warm_config(folder, "run", *changes), ONE)
    train(warm_config(folder, "run", *changes, "allow_changes=seed,data.train", "steps=1"), ONE)
    assert (folder / "run" / "checkpoints" / "step_00000000").is_dir()


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_warm_start_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is killed in step 6, after a checkpoint of step 4, and again in the first step after the warm start."""
    config = folder / "config.yaml"
    config.write_text(to_yaml(warm_config(folder, "killed")))
    for call in ("2", "4"):
        process = ForkedCommand(folder, folder, "train", str(config), STOP_AT=call, STOP_BY="SIGKILL")
        process.communicate(timeout=600)
        assert process.returncode == -9
    train(warm_config(folder, "killed", "resume=must"), ONE)
    assert "resumed after 8 of 8 steps of the warm start" in capsys.readouterr().out
    assert_undisturbed(folder, "killed")
