"""Runs the example as users do, with real captures: five rollouts with the repairs, the reported error without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.megatron_world import REASON

pytest.importorskip("megatron.core", reason=REASON)
ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "examples/megatron_repeated_rollouts.py", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [[], ["--reset-graphs"]], ids=["graphs kept", "graphs captured anew"])
def test_five_rollouts_with_the_repairs(arguments: list[str]) -> None:
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    assert "5 graph managers in the module tree, 82 hook handles" in done.stdout
    assert done.stdout.count("4 layers replay captured graphs") == 5
    assert done.stdout.splitlines()[-1].startswith("5 rollouts")


@pytest.mark.gpu
def test_the_reported_error_without() -> None:
    done = start("--without-repair")
    assert done.returncode != 0
    assert "assert len(self.remove_forward_pre_hook_handles) == 0" in done.stderr
    assert "AssertionError" in done.stderr
    assert "rollout 0" not in done.stdout
