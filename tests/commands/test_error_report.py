"""Reports of errors: the line in the user's code, the invalid input, or how to report a bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollgraph.checkpoint.format import CheckpointError
from rollgraph.cli import main
from rollgraph.commands.reporting import HINT, report_error
from rollgraph.config import ConfigError, to_yaml
from rollgraph.errors import InvalidInput
from rollgraph.graph.errors import CaptureError
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.train import NothingToLearn
from tests.test_train import eager_config, folder

__all__ = ["folder"]

USER_CODE = """
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.environment import SingleTurn

class Short(GRPO):
    def advantages(self, rollouts, rewards):
        return [0.5] * (len(rollouts) - 1)

class Nothing(GRPO):
    def advantages(self, rollouts, rewards):
        return None

class Weightless(GRPO):
    def weights(self, lengths):
        return [1.0] * (len(lengths) + 1)

class Raising(GRPO):
    def advantages(self, rollouts, rewards):
        return [rewards[i] for i in range(len(rewards) + 1)]

class Losing(GRPO):
    def loss(self, streams):
        return streams.nothing

class Closed(SingleTurn):
    def run(self, generate, prompts):
        raise KeyError("door")

class Unmade(SingleTurn):
    def __init__(self, samples_per_prompt):
        int("door")
"""


def reported(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    assert report_error("train", error)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.name=OWN:Short", "Short.advantages (OWN:6): returned 15 numbers for 16 rollouts"),
        ("algorithm.name=OWN:Nothing", "Nothing.advantages (OWN:10): returned a NoneType, not numbers for 16 rollouts"),
        ("algorithm.name=OWN:Weightless", "Weightless.weights (OWN:14): returned 9 numbers for 8 sequences"),
        ("algorithm.name=OWN:Raising", "OWN:19: Raising.advantages raised IndexError: list index out of range"),
        ("algorithm.name=OWN:Losing", "OWN:23: Losing.loss raised AttributeError: 'TokenStreams' object has no"),
        ("rollout.environment={name: 'OWN:Closed'}", "OWN:27: Closed.run raised KeyError: 'door'"),
        (
            "rollout.environment={name: 'OWN:Unmade'}",
            "rollout.environment: invalid literal … 'door' (OWN:31)",
        ),
        ("reward.functions=[{name: 'BROKEN:f'}]", "broken.py failed (RuntimeError: half written, BROKEN:2)"),
    ],
)
def test_user_code_is_named_with_its_line(
    folder: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.py").write_text(USER_CODE)
    (folder / "broken.py").write_text("half = 1\nraise RuntimeError('half written')\n")
    files = {"OWN": str(folder / "own.py"), "BROKEN": str(folder / "broken.py")}
    for word, file in files.items():
        override, message = override.replace(word, file), message.replace(word, file)
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "data.validation=null", "algorithm.options={}")))
    assert main(["train", str(path), override]) in (1, 2)
    error = capsys.readouterr().err
    assert all(part in error for part in message.split("…"))
    assert "Traceback" not in error
    assert HINT not in error


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["steps: must be at least 1"]),
        InvalidInput("has no rows", location="data.jsonl"),
        NothingToLearn("no rollout of the first step got a reward"),
        ImportError("No module named 'math_verify'"),
        RankLost("rank 1 disappeared without notice"),
        CheckpointError("run/checkpoints/step_00000001 was not written"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_explains_itself_has_no_hint(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(error, capsys) == f"rollgraph train: {error}\n"


def test_an_error_of_rollgraph_has_a_hint_or_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = CaptureError("the pool is gone")
    assert reported(error, capsys) == f"rollgraph train: the pool is gone\n{HINT}\n"
    assert not report_error("train", KeyError("pool"))  # Python shows all of it
    monkeypatch.setenv("ROLLGRAPH_TRACEBACK", "1")
    assert reported(error, capsys) == "rollgraph.graph.errors.CaptureError: the pool is gone\n"
