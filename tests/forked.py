"""Commands of rollgraph in processes that are forked from one that has imported PyTorch.

This saves seconds over a new interpreter. One test of each command starts it as a user does, the others like this.
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
    """A running command, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, folder: Path, out: Path, *arguments: str, program: Program = cli.main, **variables: str) -> None:
        """Start a program in a folder. Its output goes to files in `out`."""
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
        """Wait for the end, and return standard output and standard error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None
        stdout, stderr = ((self._out / name) for name in ("stdout", "stderr"))
        if not stderr.exists():  # killed before it opened its files
            return "", ""
        return stdout.read_text(), stderr.read_text()


def run_command(
    folder: Path, out: Path, *arguments: str, program: Program = cli.main
) -> subprocess.CompletedProcess[str]:
    process = ForkedCommand(folder, out, *arguments, program=program)
    output = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, *output)
