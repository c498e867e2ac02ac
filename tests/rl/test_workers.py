"""A call is lost with its process only if the process had begun it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgraph.rl.workers import Failure, WorkerPool

PROGRAM = """
import os
from pathlib import Path

def make(folder):
    starts = Path(folder) / "starts"
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (count + 1))
    if (Path(folder) / "broken").exists():
        os._exit(7)
    return square

def square(number):
    if number < 0:
        os._exit(5)
    return number * number
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    (tmp_path / "program.py").write_text(PROGRAM)
    made = WorkerPool(1, f"{tmp_path / 'program.py'}:make", (str(tmp_path),), timeout=20.0)
    yield made
    made.close()


def kill_before_it_begins(pool: WorkerPool) -> None:
    """The next call reaches a process that is there, and dies before it has looked at it."""
    process = pool._workers[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()


def test_a_call_that_was_not_begun_is_given_to_a_new_process(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run([(3,)]) == [9]
    kill_before_it_begins(pool)
    assert pool.run([(4,), (5,)]) == [16, 25]
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_call_that_its_process_died_of_is_not(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run([(-1,), (2,)]) == [Failure("died", "ended with exit code 5"), 4]
    assert (tmp_path / "starts").read_text() == "xx"


def test_it_is_given_away_once_more_and_not_for_ever(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    kill_before_it_begins(pool)
    assert pool.run([(4,)]) == [Failure("died", "ended with exit code 7")]
    assert (tmp_path / "starts").read_text() == "xx"
    (tmp_path / "broken").unlink()
    assert pool.run([(4,)]) == [16]
