"""Exit codes of errors, and their table in the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollgraph.checkpoint.format import CheckpointError
from rollgraph.checkpoint.lock import FolderError
from rollgraph.checkpoint.start import CannotResume
from rollgraph.commands.reporting import exit_code_of
from rollgraph.config import ConfigError
from rollgraph.errors import InvalidInput
from rollgraph.parallel.data.together import FailedElsewhere, RefusedElsewhere
from rollgraph.parallel.ranks.failures import ExitCode, LossReport, RankLost
from rollgraph.parallel.ranks.join import RefusedBefore
from rollgraph.train import NothingToLearn

PAGE = Path(__file__).parents[2] / "docs" / "restarts.md"
REFUSED = LossReport(1, "rank 1 failed with ValueError: no rows", refused=True)
GARBAGE = json.JSONDecodeError("Expecting value", "", 0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["steps: must be at least 1"]), ExitCode.REFUSED),
        (InvalidInput("has no rows", location="data.jsonl"), ExitCode.REFUSED),
        (ImportError("No module named 'math_verify'"), ExitCode.REFUSED),
        (FolderError("output: run is in use by another run"), ExitCode.REFUSED),
        (CannotResume("resume: must, but there is nothing"), ExitCode.REFUSED),
        (NothingToLearn("no rollout of the first step got a reward"), ExitCode.REFUSED),
        (RefusedElsewhere(1, "has no rows"), ExitCode.REFUSED),
        (RefusedBefore("has no rows"), ExitCode.REFUSED),
        (RankLost("rank 1 failed", REFUSED), ExitCode.REFUSED),
        (RankLost("rank 1 disappeared without notice", LossReport(1, "gone")), ExitCode.RANK_LOST),
        (RankLost("the network is down"), ExitCode.RANK_LOST),
        (CheckpointError("no space left"), ExitCode.FAILED),
        (FailedElsewhere(1, "out of memory"), ExitCode.FAILED),
        (GARBAGE, ExitCode.FAILED),
        (OSError(5, "Input/output error"), ExitCode.FAILED),
        (RuntimeError("CUDA error"), ExitCode.FAILED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
def test_user_errors_lost_ranks_and_failures_have_different_codes(error: Exception, code: ExitCode) -> None:
    assert exit_code_of(error) == code


def test_the_documentation_has_all_codes() -> None:
    rows = re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(row) for row in rows] == list(ExitCode)
