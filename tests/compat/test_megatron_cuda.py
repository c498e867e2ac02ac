"""The example with real captures: five rollouts with the repairs, the reported error without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.megatron_world import REASON

pytest.importorskip("megatron.core", reason=REASON)
ROOT = Path(__file__).parents[2]


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "examples/megatron_repeated_rollouts.py", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [[], ["--reset-graphs"]], ids=["graphs kept", "graphs captured again"])
def test_five_rollouts_succeed_with_the_repairs(arguments: list[str]) -> None:
    completed = run_example(*arguments)
    assert completed.returncode == 0, completed.stderr
    assert "5 graph managers in the module tree, 82 hook handles" in completed.stdout
    assert completed.stdout.count("4 layers replay captured graphs") == 5
    assert completed.stdout.splitlines()[-1].startswith("5 rollouts")


@pytest.mark.gpu
def test_the_reported_error_occurs_without_the_repairs() -> None:
    completed = run_example("--without-repair")
    assert completed.returncode != 0
    assert "assert len(self.remove_forward_pre_hook_handles) == 0" in completed.stderr
    assert "AssertionError" in completed.stderr
    assert "rollout 0" not in completed.stdout
