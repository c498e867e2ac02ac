"""A model folder, a checkpoint or a run, as `rollgraph generate` and `rollgraph eval --model` take them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rollgraph.cli import main
from rollgraph.config import Config, parse_config, to_dict, to_yaml
from rollgraph.model import load_model
from rollgraph.parallel.ranks.world import World
from rollgraph.run.model_source import open_model, read_checkpoint_config
from rollgraph.train import train
from tests.parallel.worlds import run_world
from tests.test_train import ONE, eager_config, flip, write_inputs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of two steps whose last model is exported. Do not change the run."""
    folder = write_inputs(tmp_path_factory.mktemp("trained"))
    path = folder / "config.yaml"
    overrides = ["steps=2", "checkpoint.every=1", "checkpoint.export_at_end=true", "validation.every=1"]
    path.write_text(to_yaml(eager_config(folder, *overrides, "optimizer.lr=0.05")))
    assert main(["train", str(path)]) == 0
    return path


def run_generate(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    capsys.readouterr()
    words = ["--prompt", "12?", "--max-tokens", "6", "-n", "4", "--seed", "1", "--logprobs", "--quiet"]
    assert main(["generate", str(folder), *words, *options]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def run_eval(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> tuple[dict[str, float], str]:
    capsys.readouterr()
    assert main(["eval", str(config), *options]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.slow
def test_generate_takes_a_model_a_checkpoint_or_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.parent / "run"
    first, last = (run / "checkpoints" / f"step_0000000{step}" for step in (0, 1))
    expected = run_generate(capsys, run / "model")
    assert run_generate(capsys, last) == expected
    assert run_generate(capsys, run) == expected
    assert run_generate(capsys, run, "--which", "latest") == expected
    assert run_generate(capsys, first) != expected
    assert run_generate(capsys, run, "--which", "best") in (expected, run_generate(capsys, first))
    assert main(["generate", str(run), "--prompt", "a", "--max-tokens", "1"]) == 0
    output = capsys.readouterr().err
    assert f"step 1 of {run}\n" in output
    assert "\n\n" not in output  # without a terminal, the progress bar of captures leaves no lines


def test_generate_hints_at_chat_for_a_run_with_chat_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["model.tiny.max_length=64", "data.max_prompt_tokens=48", "train.token_buckets=[64]"]
    train(eager_config(write_inputs(tmp_path), "steps=1", "data.chat=true", "data.validation=null", *lengths), ONE)
    command = ["generate", str(tmp_path / "run"), "--prompt", "12?", "--max-tokens", "1"]
    for options, has_hint in (([], True), (["--chat"], False), (["--quiet"], False)):
        capsys.readouterr()
        assert main([*command, *options]) == 0
        assert ("--chat asks the same way" in capsys.readouterr().err) == has_hint


def test_eval_takes_a_model_a_checkpoint_or_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.parent / "run"
    expected, message = run_eval(capsys, trained)
    assert message == f"step 1 of {run}\n"
    elsewhere = f"output={tmp_path / 'nowhere'}"  # --model needs nothing of the configuration's run
    for folder, name in ((run, f"step 1 of {run}"), (run / "model", str(run / "model"))):
        assert run_eval(capsys, trained, elsewhere, "--model", str(folder)) == (expected, f"{name}\n")
    copy = tmp_path / "a copy"
    shutil.copytree(run / "checkpoints" / "step_00000001", copy)
    assert run_eval(capsys, trained, elsewhere, "--model", str(copy)) == (expected, f"{copy}\n")
    baseline, _ = run_eval(capsys, trained, elsewhere, "--model", str(run / "reference"), "tokenizer.path=bytes")
    before = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert baseline.keys() == expected.keys()
    assert before.keys() == {"step", *baseline}
    assert not (tmp_path / "nowhere").exists()


def test_eval_model_uses_the_architecture_of_that_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration has a larger model."""
    run = trained.parent / "run"
    expected, _ = run_eval(capsys, trained)
    assert run_eval(capsys, trained, "model.tiny.width=32", "--model", str(run))[0] == expected
    assert main(["eval", str(trained), "model.tiny.width=32"]) == 1
    assert "the checkpoint is of another model" in capsys.readouterr().err


def assert_refused(
    capsys: pytest.CaptureFixture[str], config: Path, folder: Path, message: str, *options: str, code: int = 2
) -> None:
    """Both commands refuse the folder in the same words; `code` is that of `eval`."""
    capsys.readouterr()
    for exit_code, words in ((2, ["generate", folder, "--prompt", "a"]), (code, ["eval", config, "--model", folder])):
        assert main([*map(str, words), *options]) == exit_code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"rollgraph {words[0]}: ")
        assert message in captured.err


def test_other_paths_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.parent / "run"
    expected = "expected a model folder (with config.json), an adapter (with adapter_config.json), a checkpoint (with"
    assert_refused(capsys, trained, tmp_path, f"{tmp_path}: {expected}")
    assert_refused(capsys, trained, tmp_path / "none", f"none: no such folder; {expected}")
    assert_refused(capsys, trained, trained, f"config.yaml: not a folder; {expected}")
    checkpoints = run / "checkpoints"
    assert_refused(
        capsys,
        trained,
        checkpoints,
        f"{checkpoints}: holds the checkpoints of a run; name one of them, or the run, {run}",
    )
    message = f"--which best chooses a checkpoint of a run, but {run / 'model'} is a model"
    assert_refused(capsys, trained, run / "model", message, "--which", "best")
    (tmp_path / "checkpoints").mkdir()
    assert_refused(capsys, trained, tmp_path, f"{tmp_path} has no checkpoint\n")


def test_damaged_checkpoints_are_refused_or_skipped(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.parent / "run", run)
    first, last = (run / "checkpoints" / f"step_0000000{step}" for step in (0, 1))
    expected = run_generate(capsys, first)
    flip(last / "rank0.safetensors")
    assert_refused(capsys, trained, last, "rank0.safetensors is not what was written: its checksum differs", code=1)
    assert run_generate(capsys, run) == expected
    assert main(["generate", str(run), "--prompt", "a", "--max-tokens", "1", "--quiet"]) == 0
    assert f"{last} is skipped: " in capsys.readouterr().err
    (last / "state.json").unlink()
    assert run_eval(capsys, trained, "--model", str(run))[1].endswith(f"step 0 of {run}\n")
    flip(first / "rank0.safetensors")
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "a"]) == 2
    assert f"rollgraph generate: {run} has no whole checkpoint\n" in capsys.readouterr().err


def test_a_checkpoint_without_its_base_model_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the base model may be relative to the working directory of the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.parent / "run" / "model", tmp_path / "base")
    run = tmp_path / "run"
    config = eager_config(trained.parent, "steps=1", "model={path: base}", "model.tiny=null", f"output={run}")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert main(["eval", str(path)]) == 2
    assert f"{run} has no checkpoint; for the model that training begins with, add --model base" in (
        capsys.readouterr().err
    )
    assert main(["train", str(path)]) == 0
    assert run_generate(capsys, run)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    message = "its run took model.path from base, and there is no such folder (in "
    assert_refused(capsys, path, run, message)


def train_and_export(world: World, config: Config) -> None:
    train(config, world)


@pytest.mark.slow
@pytest.mark.multi
def test_a_checkpoint_of_two_ranks_is_the_exported_model(tmp_path: Path) -> None:
    folder = write_inputs(tmp_path)
    config = eager_config(folder, "steps=1", "checkpoint.export_at_end=true", "data.validation=null")
    assert run_world(2, folder, train_and_export, config) == [None, None]
    stored = open_model(str(folder / "run"), None, [])
    model = stored.load(None, "cpu")
    exported = load_model(folder / "run" / "model").state_dict()
    assert model.state_dict().keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in model.state_dict().items())
    halved = stored.load(torch.bfloat16, "cpu")
    assert torch.equal(halved.norm, model.norm.bfloat16())
    assert halved.frequencies.dtype == torch.float32


def test_a_checkpoint_has_the_configuration_of_its_run(trained: Path) -> None:
    config = parse_config(trained.read_text())
    assert read_checkpoint_config(trained.parent / "run" / "checkpoints" / "step_00000001") == config
    assert parse_config(json.dumps(to_dict(config))) == config
