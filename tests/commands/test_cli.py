"""What all commands share: a closed standard output, and configuration keys written as options."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollgraph.cli import main
from rollgraph.config import to_yaml
from tests.commands.test_generate import folder as model
from tests.test_train import eager_config, write_inputs

__all__ = ["model"]


@contextmanager
def closed_pipe(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Replace these streams of sys by a pipe that its reader has closed, as `head` does."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patch:
        for name in names:
            patch.setattr(sys, name, stream)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("trained"))
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "steps=1", "log.progress=none")))
    assert main(["train", str(path), "data.validation=null"]) == 0
    return path


@pytest.mark.parametrize("options", [[], ["-n", "3", "--rows", "1"]])
def test_generate_ends_quietly_when_its_output_is_closed(
    model: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(model), "--prompt", "a", "--prompt", "b", "--max-tokens", "3", *options]
    with closed_pipe(monkeypatch, "stdout"):
        assert main([*words, "--quiet"]) == 141
    assert capfd.readouterr().err == ""
    with closed_pipe(monkeypatch, "stdout", "stderr"):  # as in `2>&1 | head`
        assert main(words) == 141


@pytest.mark.parametrize("command", ["eval", "plan", "config"])
def test_other_commands_end_quietly_when_their_output_is_closed(
    trained: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with closed_pipe(monkeypatch, "stdout"):
        assert main([command, str(trained)]) == 141
    assert "roken" not in capfd.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval", "plan", "config"])
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("FILE --steps 4", "--steps 4: configuration keys have no dashes; write steps=4"),
        ("FILE --learning-rate 4", "--learning-rate: GRPOConfig's learning_rate is optimizer.lr here"),
        ("--steps 4 FILE", "--steps 4: configuration keys have no dashes; write steps=4"),
        ("--steps=4 FILE seed=1", "--steps=4: configuration keys have no dashes; write steps=4"),
        ("FILE --optimizer.lr 1e-6 --seed -1", "write optimizer.lr=1e-6 seed=-1"),
        ("FILE --rollout.max-tokens 9 --nothing", "write rollout.max_tokens=9"),
        ("FILE --algorithm.options.kl_coef=0.1", "write algorithm.options.kl_coef=0.1"),
        ("FILE --resume", "--resume: configuration keys have no dashes; write resume=VALUE"),
    ],
)
def test_a_key_written_as_an_option_is_corrected(
    tmp_path: Path, command: str, words: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: m}}\noutput: {tmp_path / 'run'}\ndata: {{train: t}}\nreward: {{functions: []}}\n")
    assert main([command, *words.replace("FILE", str(path)).split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"rollgraph {command}: --")
    assert line.endswith(advice)
    assert list(tmp_path.iterdir()) == [path]  # nothing was started


def test_overrides_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "the following arguments are required: config\n" in capsys.readouterr().err


def test_a_value_with_spaces_is_quoted_for_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "--reward.functions=[{name: exact_match}]"]) == 2
    assert capsys.readouterr().err.endswith("write 'reward.functions=[{name: exact_match}]'\n")


def test_options_of_a_command_are_not_taken_for_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("steps: 0\n")
    assert main(["plan", str(path), "--ranks", "2"]) == 2  # `ranks` is also a section of the configuration
    assert "steps: expected whole number" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["generate", "model", "--prompt", "a", "--steps", "4"])  # has no configuration
    assert ended.value.code == 2
    assert "unrecognized arguments: --steps 4" in capsys.readouterr().err
    assert main(["config", str(path), "--output", "runs/mine"]) == 2
    assert "-o only works with import; the folder of a run is output=runs/mine" in capsys.readouterr().err
