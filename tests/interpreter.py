"""Triton's interpreter, which runs kernels on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable


def run_interpreted(compare: Callable[[str], None]) -> None:
    """Call a function of a test module with "cpu" in another process: the interpreter has to be chosen before Triton is
    imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": "src:."}
    program = f"from {compare.__module__} import {compare.__name__}; {compare.__name__}('cpu')"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=900)
