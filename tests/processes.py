"""Whether processes have ended."""

from __future__ import annotations

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether any thread of a process runs: a killed process can be a zombie while other threads still exit."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
    except (FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task").exists() and len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    return len(states) > 1 or states != ["Z"]  # a zombie counts as ended


def wait_until_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 300
    while any(map(is_running, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not [pid for pid in pids if is_running(pid)]
