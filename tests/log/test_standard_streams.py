"""A terminal that is closed, as by a lost connection, costs a run no step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollgraph import cli
from rollgraph.config import to_yaml
from rollgraph.log.streams import survive_closed_terminal, write_to_stderr
from rollgraph.parallel.ranks.failures import ExitCode
from tests.forked import ForkedCommand
from tests.test_train import eager_config, folder, metrics_of, wait_for

__all__ = ["folder"]

NOISY = """
import sys
def even(completions, **columns):
    print("a reward function prints", flush=True)
    print("and it complains", file=sys.stderr, flush=True)
    return [float(len(text) % 2) for text in completions]
"""


def in_terminal(arguments: list[str]) -> int:
    """Run the command with a terminal of its own, as a shell in a window does."""
    os.setsid()
    terminal = os.open(os.environ["TERMINAL"], os.O_RDWR)
    for descriptor in range(3):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    return cli.main(arguments)


@contextmanager
def terminal() -> Iterator[tuple[int, str, Callable[[], None]]]:
    """A descriptor that reads the output of a terminal, the path of the terminal, and a function that closes it."""
    reader, writer = os.openpty()
    os.set_blocking(reader, False)
    is_open = True

    def close() -> None:
        nonlocal is_open
        is_open = False
        os.close(reader)

    try:
        yield reader, os.ttyname(writer), close
    finally:
        os.close(writer)
        if is_open:
            close()


def drain(reader: int) -> bytes:
    try:
        return os.read(reader, 2**16)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    "options", [["log.progress=live"], ["log.progress=plain", "reward.workers=1", "reward.timeout=60"]], ids=" ".join
)
def test_a_closed_terminal_loses_no_step(folder: Path, options: list[str]) -> None:
    (folder / "noisy.py").write_text(NOISY)
    options += [f"reward.functions=[{{name: '{folder / 'noisy.py'}:even'}}]"]
    path = folder / "config.yaml"
    path.write_text(to_yaml(eager_config(folder, "steps=1000", "checkpoint.every=1000", *options)))
    metrics = folder / "run" / "metrics.jsonl"
    with terminal() as (reader, name, close):
        process = ForkedCommand(folder, folder, "train", str(path), program=in_terminal, TERMINAL=name, TERM="xterm")

        def has_taken_steps() -> bool:
            drain(reader)
            return metrics.exists() and len(metrics.read_text().splitlines()) >= 2

        wait_for(has_taken_steps, process)
        close()
        process.communicate(timeout=600)
    assert process.returncode == ExitCode.TERMINATED
    rows = metrics_of(folder / "run")
    saved = max((folder / "run" / "checkpoints").glob("step_*"))
    assert int(saved.name.removeprefix("step_")) == rows[-1]["step"]
    assert not any(name.startswith("failures/reward/") for row in rows for name in row)


def test_printing_to_a_closed_terminal_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (reader, name, close), open(name, "w") as stream, monkeypatch.context() as replaced:
        replaced.setattr(sys, "stdout", stream)
        replaced.setattr(sys, "stderr", stream)
        with survive_closed_terminal():
            outer = sys.stdout
            with survive_closed_terminal():
                assert sys.stdout is outer  # nothing to replace twice
            print("read", flush=True)
            assert drain(reader) == b"read\r\n"
            close()
            with pytest.raises(OSError, match="Input/output error"):
                os.write(stream.fileno(), b"lost")
            print("lost", flush=True)
            print("lost, too", file=sys.stderr, flush=True)
        assert sys.stdout is stream


def test_streams_other_than_terminals_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with survive_closed_terminal():
        assert (sys.stdout, sys.stderr) == before
        print("kept")
    assert capsys.readouterr().out == "kept\n"


def test_writing_to_a_closed_standard_error_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (_, name, close), open(name, "w") as stream:
        monkeypatch.setattr("rollgraph.log.streams.STANDARD_ERROR", stream.fileno())
        close()
        write_to_stderr("lost")
