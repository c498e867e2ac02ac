"""`rollgraph train`, `eval` and `export` as a user runs them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollgraph.cli import main
from rollgraph.config import to_yaml
from rollgraph.model import load_model
from tests.checkpoint.test_checkpoints import untouched
from tests.test_train import config_of, eager_config, flip, folder, metrics_of, weights_of, write_inputs

__all__ = ["folder"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for one step and return the path of the configuration. Tests must not change this run."""
    folder = write_inputs(tmp_path_factory.mktemp("trained"))
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "steps=1")))
    assert main(["train", str(path), "data.validation=null"]) == 0
    return path


def test_a_trained_run_is_evaluated_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config_of(folder, "steps=2")))
    assert main(["eval", str(path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    assert main(["eval", str(path), "output=elsewhere"]) == 2
    assert f"elsewhere has no checkpoint: there is no such folder in {Path.cwd()}" in capsys.readouterr().err
    assert not (folder / "run").exists()
    assert main(["train", str(path), "optimizer.lr=0.02", "data.validation=null"]) == 0
    assert main(["export", str(path), "--which", "best", "--to", str(folder / "best")]) == 2
    assert "no checkpoint with a score" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["eval", str(path), "validation.samples=3"]) == 0
    output = capsys.readouterr()
    values = json.loads(output.out)
    assert set(values) == {"validation/reward", "validation/accuracy", "validation/pass@3"}
    assert "step 1 of" in output.err
    assert main(["export", str(path), "--to", str(folder / "exported")]) == 0
    exported = load_model(folder / "exported")
    saved = weights_of(folder / "run", 1)
    assert torch.equal(exported.norm.detach(), saved["master/norm"])


def test_other_tools_stop_a_tiny_model_at_the_same_token(trained: Path, tmp_path: Path) -> None:
    """After the model emits eos, nothing follows, whatever the weights are."""
    transformers = pytest.importorskip("transformers")
    target = tmp_path / "exported"
    assert main(["export", str(trained), "--to", str(target)]) == 0
    config = json.loads((target / "config.json").read_text())
    assert {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {"bos": 256, "eos": 257, "pad": 258}
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (257, 258)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(10.0 * torch.nn.functional.one_hot(torch.tensor(257), 259).float())
    prompt = torch.tensor([[48, 49, 63]])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert generated[0, 3:].tolist() == [257]


def test_eval_and_export_report_skipped_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, checkpoints = folder / "config.yaml", folder / "run" / "checkpoints"
    path.write_text(to_yaml(eager_config(folder, "steps=2", "checkpoint.every=1")))
    assert main(["train", str(path)]) == 0
    flip(checkpoints / "step_00000001" / "rank0.safetensors")
    for command in (["eval", str(path)], ["export", str(path), "--to", str(folder / "exported")]):
        capsys.readouterr()
        assert main(command) == 0
        first, second = capsys.readouterr().err.splitlines()
        assert "step_00000001 is skipped: " in first
        assert second.startswith("step 0 of")
    flip(checkpoints / "step_00000000" / "rank0.safetensors")
    capsys.readouterr()
    assert main(["eval", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("is skipped") == 2
    assert "has no whole checkpoint" in error


def test_eval_and_export_change_nothing_in_the_folder_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder may therefore be read-only. Root can write anyway, but modification times would reveal it."""
    path, run = folder / "config.yaml", folder / "run"
    path.write_text(to_yaml(eager_config(folder, "steps=2", "checkpoint.every=1")))
    assert main(["train", str(path)]) == 0
    (run / "checkpoints" / "run_00000000.new").touch()  # left by a run that was killed
    before = untouched(run)
    directories = [run, *(directory for directory in run.rglob("*") if directory.is_dir())]
    modes = {directory: directory.stat().st_mode for directory in directories}
    try:
        for directory in directories:
            directory.chmod(0o500)
        assert main(["eval", str(path)]) == 0, capsys.readouterr().err
        assert main(["export", str(path), "--to", str(folder / "exported")]) == 0, capsys.readouterr().err
    finally:
        for directory, mode in modes.items():
            directory.chmod(mode)
    assert untouched(run, now=False) == before


def test_export_does_not_overwrite(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "exported"
    target.mkdir()
    (target / "config.json").write_text("mine")
    capsys.readouterr()
    assert main(["export", str(trained), "--to", str(target)]) == 2
    assert capsys.readouterr().err == (
        f"rollgraph export: --to {target}: is not empty; choose another folder, or overwrite it with --force\n"
    )
    assert [(file.name, file.read_text()) for file in target.iterdir()] == [("config.json", "mine")]
    assert main(["export", str(trained), "--to", str(trained)]) == 2
    assert capsys.readouterr().err == f"rollgraph export: --to {trained}: Not a directory\n"
    assert main(["export", str(trained), "--to", str(target), "--force"]) == 0
    assert load_model(target).architecture.layers == 1
    (tmp_path / "empty").mkdir()
    assert main(["export", str(trained), "--to", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "config.json").read_text() == (target / "config.json").read_text()


def test_mistakes_are_reported_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config_of(folder)).replace("prompts_per_step", "prompt_per_step"))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert "prompts_per_step" in error
    assert "config.yaml:" in error
    path.write_text(to_yaml(config_of(folder)))
    assert main(["train", str(path), f"data.train={folder / 'nowhere.jsonl'}"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    (folder / "demonstrations.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert main(["train", str(path), f"warm_start={{data: {folder / 'demonstrations.jsonl'}}}"]) == 2
    assert "demonstrations.jsonl:1: a demonstration needs `prompt` and `completion`" in capsys.readouterr().err


def test_overrides_may_stand_anywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "config.yaml")
    Path(path).write_text(to_yaml(eager_config(folder, "steps=2")))
    assert main(["train", "data.validation=null", path, "steps=1"]) == 0
    target = str(folder / "exported")
    assert main(["export", "--to", target, path, "--which", "latest", "seed=0", "log.every=2"]) == 0
    assert main(["eval", path, "--which", "latest", "validation.samples=2"]) == 0
    assert "validation/pass@2" in capsys.readouterr().out
    assert main(["plan", path, "--device", "cpu", "memory.cache_gib=0.5", "--json", "sed=1"]) == 2
    assert "override 'sed=1': sed: unknown key" in capsys.readouterr().err
    assert main(["config", "steps=7", path, "seed=1"]) == 0
    assert "seed: 1\nsteps: 7\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", path, "--nothing", "steps=1"])
    assert "unrecognized arguments: --nothing" in capsys.readouterr().err
    assert main(["train", "steps=1"]) == 2
    assert "steps=1: cannot be read" in capsys.readouterr().err


def test_eval_reports_failed_rewards_and_explains_pass_at_k(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(completions, **columns):\n    raise RuntimeError('no idea')\n")
    capsys.readouterr()
    assert main(["eval", str(trained), f"reward.functions=[{{name: '{broken}:f'}}]"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["validation/pass@1"] == 0
    assert "no idea" in output.err
    assert "rewards failed for 8 rollouts: 8 raised" in output.err
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "correct if it has the highest reward" in " ".join(capsys.readouterr().out.split())


def test_eval_prints_only_json_even_if_rewards_print(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "steps=1", "data.validation=null")))
    assert main(["train", str(path)]) == 0
    (folder / "loud.py").write_text(
        "import ctypes, os, sys\n"
        "print('while loading')\n"
        "kept = sys.__stdout__\n"
        "def f(completions, **columns):\n"
        "    print('in a call')\n"
        "    kept.write('to the stream itself\\n')\n"
        "    os.write(1, b'to the descriptor\\n')\n"
        "    ctypes.CDLL(None).puts(b'from C')\n"
        "    return [1.0] * len(completions)\n"
    )
    held_out = (folder / "held_out.jsonl").read_text()
    (folder / "held_out.jsonl").write_text('{"prompt": "longer than others"}\n' + held_out)
    for workers in (0, 1):
        capfd.readouterr()
        options = [
            "data.too_long=drop",
            f"reward.functions=[{{name: '{folder / 'loud.py'}:f'}}]",
            f"reward.workers={workers}",
        ]
        assert main(["eval", str(path), f"data.validation={folder / 'held_out.jsonl'}", *options]) == 0
        output = capfd.readouterr()
        values = json.loads(output.out)
        assert (values["validation/reward"], values["validation/dropped_prompts"]) == (1.0, 1.0)
        for said in ("while loading", "in a call", "to the descriptor"):
            assert said in output.err


def test_a_reward_too_large_is_counted_and_the_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest allowed reward also works, with an algorithm that does not divide by the standard deviation."""
    (folder / "huge.py").write_text(
        "values = [1e200, -1e308, 10**400, float('nan'), 1.0, 0.0, 1e15, -1e15]\n"
        "def f(completions, **columns):\n"
        "    return [values[i % 8] for i in range(len(completions))]\n"
    )
    path = folder / "config.yaml"
    algorithm = "algorithm={name: dr_grpo, options: {max_tokens: 4}}"
    function = f"reward.functions=[{{name: '{folder / 'huge.py'}:f'}}]"
    options = ["steps=2", "data.validation=null", "log.progress=plain", algorithm, function]
    path.write_text(to_yaml(eager_config(folder, *options)))
    assert main(["train", str(path)]) == 0
    for line in metrics_of(folder / "run"):
        assert line["failures/reward/too_large"] == 6
        assert line["failures/reward/not_finite"] == 2
        assert all(math.isfinite(value) for value in line.values())
    output = capsys.readouterr()
    assert "f: 1e+200 is beyond 1e+15 (a sample of prompt " in output.out + output.err


def test_sigterm_to_all_processes_of_a_run_costs_no_reward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers signal every process. The step must still train on its real rewards, not on those of dead workers."""
    (folder / "job.py").write_text(
        "import os, signal\n"
        "calls = []\n"
        "def f(completions, **columns):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        for pid in (int(os.environ['TRAINER']), os.getppid(), os.getpid()):\n"
        "            os.kill(pid, signal.SIGTERM)\n"
        "    return [1.0 + i % 2 for i in range(len(completions))]\n"
    )
    monkeypatch.setenv("TRAINER", str(os.getpid()))
    path = folder / "config.yaml"
    function = f"reward.functions=[{{name: '{folder / 'job.py'}:f'}}]"
    path.write_text(to_yaml(eager_config(folder, "steps=9", "data.validation=null", "reward.workers=1", function)))
    assert main(["train", str(path)]) == 143
    rows = metrics_of(folder / "run")
    assert [row["reward"] for row in rows] == [1.5, 1.5]
    assert not [name for row in rows for name in row if name.startswith("failures/reward/")]


def test_help_does_not_import_pytorch() -> None:
    program = "import sys; from rollgraph.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    program += "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    process = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": os.environ["PYTHONPATH"]}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "train" in process.stdout
