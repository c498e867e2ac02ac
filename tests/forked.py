"""`rollgraph` in a process of its own, forked from one that has imported PyTorch: a second less than a new interpreter.

One test of each command starts it as a user does; the others start it like this.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from rollgraph.cli import main


def _run(folder: Path, arguments: tuple[str, ...], out: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as `python -m` does
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.exit(main(list(arguments)))


def run_command(folder: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rollgraph` with arguments, in a folder. What it writes passes through files in `out`."""
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(folder, arguments, out))
    process.start()
    process.join()
    assert process.exitcode is not None
    found = [(out / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(arguments, process.exitcode, *found)
