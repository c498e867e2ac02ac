"""The last lines of a run: its validation before and after, samples, and commands that can be pasted."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rollgraph.cli import main
from rollgraph.config import to_yaml
from tests.test_train import eager_config, folder

__all__ = ["folder"]


def train_and_read_next(
    folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> tuple[list[str], list[str]]:
    """Train. Return all lines printed, and the words of each command among them."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "log.progress=plain", *overrides)))
    capsys.readouterr()
    main(["train", str(path)])
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line.partition(": ")[2]) for line in lines if line.startswith(("next: ", "  or: "))]
    assert all(command[:3] == [sys.executable, "-m", "rollgraph"] for command in commands)
    return lines, [command[3:] for command in commands]


def test_a_run_ends_with_its_outcome_and_working_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, commands = train_and_read_next(folder, capsys)
    lines = lines[-7:]
    assert lines[0].startswith("validation/reward: ")
    assert lines[0].endswith(" after 4 steps")
    assert all("? → " in line for line in lines[1:4])
    assert lines[4] == (f"in {folder / 'run'}: metrics.jsonl, samples.jsonl, checkpoints")
    assert [command[0] for command in commands] == ["samples", "generate"]
    for command in commands:
        assert main(command) == 0


def test_a_prompt_that_looks_like_an_option_can_be_pasted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "minus.jsonl").write_text('{"prompt": "-3+4=", "answer": "1"}\n' * 4)
    data = f"data.validation={folder / 'minus.jsonl'}"
    _, (_, generate) = train_and_read_next(folder, capsys, data, "data.max_prompt_tokens=6", "steps=1")
    assert "--prompt=-3+4=" in generate
    assert main(generate) == 0


def test_a_stopped_run_prints_the_command_that_resumes_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_AT", "2")
    _, ((name, config),) = train_and_read_next(folder, capsys)
    monkeypatch.delenv("STOP_AT")
    assert main([name, config]) == 0
    assert "after 4 steps" in capsys.readouterr().out


def test_graph_statistics_are_printed_only_with_verbose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "log.progress=plain", "steps=1", "data.validation=null")))
    assert main(["train", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "replays" not in printed
    assert "samples: " in printed  # of the step, since there is no validation
    assert main(["train", str(path), "--verbose", "steps=2"]) == 0
    assert "replays" in capsys.readouterr().out
