"""`rollgraph samples`, on a file such as a run writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollgraph.cli import main
from tests.log.test_sample_text import make_row


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Training samples of two steps, and two validations; the file may still be growing."""
    rows = []
    for step in (0, 10):
        rows += [make_row(step=step, completion=f"trained {step} {index}", reward=index / 4) for index in range(3)]
    for step in (-1, 9):
        for group in (0, 1):
            rows.append(
                make_row(step=step, split="validation", group=group, completion=f"{step} {group}", reward=group)
            )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "samples.jsonl").write_text(text + '{"step": 11')
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, list[str]]:
    """The first line, and the completions."""
    assert main(["samples", *map(str, arguments)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    return first, [line.split(maxsplit=1)[1] for line in lines if line.startswith("completion")]


def test_the_last_validation_or_the_chosen_step_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, run) == ("after 10 steps, validation: 2 samples, mean reward 0.5", ["9 0", "9 1"])
    assert shown(capsys, run, "--step", 0)[0].startswith("before the first step, validation: ")
    assert shown(capsys, run, "--step", 11) == ("after 11 steps, train: 3 samples, mean reward 0.25", ["trained 10 0"])


def test_the_best_and_the_worst_come_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, run, "--best")[1] == ["9 1", "9 0"]
    assert shown(capsys, run, "--worst", "--step", 1, "-n", 2)[1] == ["trained 0 0", "trained 0 1"]


def test_missing_samples_are_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--step", "7"]) == 2
    assert capsys.readouterr().err == "rollgraph samples: no samples of step 7; the nearest are of 10 and 11\n"
    assert main(["samples", str(run), "-n", "0"]) == 2
    assert capsys.readouterr().err == "rollgraph samples: -n: must be at least 1, got 0\n"
    assert main(["samples", str(run / "elsewhere")]) == 2
    assert "elsewhere is not the folder of a run: it has no samples.jsonl\n" in capsys.readouterr().err
    (run / "starts.jsonl").touch()
    (run / "samples.jsonl").unlink()
    assert main(["samples", str(run)]) == 2
    assert "has no samples yet: they come after a warm start" in capsys.readouterr().err
    (run / "samples.jsonl").write_text("")
    assert main(["samples", str(run)]) == 2
    assert "has no samples yet" in capsys.readouterr().err
