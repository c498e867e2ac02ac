"""Run parts of a benchmark in separate processes, so that memory one leaves on the device does not count for the next.

Such a process returns results with `report`, as often as it likes; the rest of its output is for people.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT = "result: "
LINES_OF_AN_ERROR = 40
_IMPORTED = time.perf_counter()


def report(found: dict[str, Any]) -> None:
    print(RESULT + json.dumps(found), flush=True)


def seconds_of_process() -> float:
    """Return how long this process has been running, including its imports if the system records its start time."""
    if not Path("/proc/self/stat").exists():
        return time.perf_counter() - _IMPORTED
    started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return uptime - started / os.sysconf("SC_CLK_TCK")


def run_apart(
    file: str,
    arguments: list[str],
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run a Python file and return its reports, including those before a failure or a timeout.

    `environment` extends the environment of this process. With `quiet`, a process that succeeds prints nothing, and one
    that fails prints only the end of its output.
    """
    found = []
    lines = []
    process = subprocess.Popen(
        [python, file, *arguments],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, process.kill)
    timer.daemon = True
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith(RESULT):
                found.append(json.loads(line.removeprefix(RESULT)))
            elif quiet:
                lines.append(line)
            else:
                print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()
    if code != 0:
        print("".join(lines[-LINES_OF_AN_ERROR:]), end="")
        print(f"{Path(file).name} {' '.join(arguments)} ended with exit code {code}", flush=True)
    return found
