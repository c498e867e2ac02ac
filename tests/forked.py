"""Programs of rollgraph in a process of their own, forked from one that has imported PyTorch.

This takes seconds less than a new interpreter. One test of each command starts it as a user does; the others start it
like this.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rollgraph import cli

Program = Callable[[list[str]], int]


def _run(program: Program, folder: Path, arguments: tuple[str, ...], out: Path, variables: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path.insert(0, str(folder))  # as `python -m` does
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.exit(program(list(arguments)))


class ForkedCommand:
    """A command that was started. Its methods are those of `subprocess.Popen` that the tests need."""

    def __init__(self, folder: Path, out: Path, *arguments: str, program: Program = cli.main, **variables: str) -> None:
        """Run a program with arguments, in a folder. What it writes passes through files in `out`."""
        self._out = out
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(program, folder, arguments, out, variables))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was written to standard output and to standard error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None
        stdout, stderr = ((self._out / name) for name in ("stdout", "stderr"))
        if not stderr.exists():  # it was killed before it wrote
            return "", ""
        return stdout.read_text(), stderr.read_text()


def run_command(
    folder: Path, out: Path, *arguments: str, program: Program = cli.main
) -> subprocess.CompletedProcess[str]:
    process = ForkedCommand(folder, out, *arguments, program=program)
    output = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, *output)
