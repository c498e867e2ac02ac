"""Running kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


def require_interpreter() -> None:
    """Skip the test if Triton is missing or its interpreter does not work with the installed NumPy."""
    pytest.importorskip("triton")
    problem = _probe()
    if problem:
        pytest.skip(f"Triton's interpreter does not work here: {problem}")


@functools.cache
def _probe() -> str:
    program = [sys.executable, str(ROOT / "tests" / "interpreter_probe.py")]
    completed = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    return "" if completed.returncode == 0 else completed.stderr.strip().splitlines()[-1]


def run_interpreted(compare: Callable[[str], None]) -> None:
    """Call a function of a test module with "cpu", in a new process, since TRITON_INTERPRET is read on import."""
    require_interpreter()
    program = f"from {compare.__module__} import {compare.__name__}; {compare.__name__}('cpu')"
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, cwd=ROOT, check=True, timeout=900)
