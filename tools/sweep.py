"""Run the test suite as other machines would: `make sweep`.

Three instruction sets (default, avx2, avx512), for PyTorch's kernels and for Numba's, times three thread counts (1, 2,
4) make nine runs. Other factors are spread over these nine: random test order (two seeds), load (eight busy processes
beside the tests) and, if root runs the sweep, an unprivileged user. `--cross` combines each of the nine with each
factor instead.

Every run has its own copy of the working tree, in a folder with a space in its name, and uses the environment of the
Python that runs the sweep. A run that fails does not end the sweep; its output is kept and its path is printed. The
exit status is 1 if any run failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTION_SETS = ("default", "avx2", "avx512")
THREADS = (1, 2, 4)
BUSY_PROCESSES = 8
NUMBA_TARGETS = {"default": "generic", "avx2": "haswell", "avx512": "skylake-avx512"}


@dataclass(frozen=True)
class Run:
    """One run of the suite."""

    instructions: str
    threads: int
    seed: int | None = None  # seed of a random test order; None: pytest's order
    load: bool = False
    unprivileged: bool = False

    @property
    def name(self) -> str:
        parts = [f"{self.instructions}-{self.threads}"]
        if self.seed is not None:
            parts.append(f"order{self.seed}")
        if self.load:
            parts.append("load")
        if self.unprivileged:
            parts.append("user")
        return "+".join(parts)


FOLDED = [
    Run("default", 1),
    Run("default", 2, seed=1, unprivileged=True),
    Run("default", 4),
    Run("avx2", 1, seed=2, load=True),
    Run("avx2", 2),
    Run("avx2", 4, seed=1, unprivileged=True),
    Run("avx512", 1, unprivileged=True),
    Run("avx512", 2, seed=2),
    Run("avx512", 4),
]
QUICK = [Run("default", 4, seed=1, unprivileged=True), Run("avx2", 1, seed=2), Run("avx512", 2, load=True)]


def cross_product() -> list[Run]:
    runs = []
    for instructions in INSTRUCTION_SETS:
        for threads in THREADS:
            runs.append(Run(instructions, threads))
            runs.append(Run(instructions, threads, seed=1))
            runs.append(Run(instructions, threads, seed=2))
            runs.append(Run(instructions, threads, load=True))
            runs.append(Run(instructions, threads, unprivileged=True))
    return runs


# -- what this machine can do ------------------------------------------------------------------------------------------


def supported_instructions(python: str) -> Sequence[str]:
    """Return the instruction sets of this processor.

    PyTorch does not check the requested set: on a processor without it, the process would crash.
    """
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    best = subprocess.check_output([python, "-c", program], env=environment, text=True).strip().lower()
    if best not in INSTRUCTION_SETS:
        return INSTRUCTION_SETS[:1]
    return INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1]


def without_rights(python: str) -> tuple[list[str], str]:
    """Return the command that drops root's rights; if there is none, an empty command and the reason.

    In a user namespace without a mapping, root becomes nobody: permission bits apply, and files that root owns can
    still be read.
    """
    if os.geteuid() != 0:
        return [], "this user has no special rights"
    command = ["unshare", "--user"]
    program = "import os, sys; sys.exit(os.geteuid() == 0)"
    try:
        tried = subprocess.run([*command, python, "-c", program], capture_output=True)
    except FileNotFoundError:
        return [], "the command unshare is missing"
    if tried.returncode != 0:
        return [], "user namespaces are not allowed here"
    return command, ""


# -- one run -----------------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy all files that git tracks or would track, in their current state."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).is_file():  # deleted, and not yet committed
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_suite(run: Run, python: str, prefix: list[str], arguments: str, folder: Path) -> tuple[bool, str]:
    """Run the tests in a copy of the tree; return whether they passed, and pytest's summary line."""
    tree = folder / "a copy" / "rollgraph"
    copy_tree(tree)
    environment = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": run.instructions,
        "NUMBA_CPU_NAME": NUMBA_TARGETS[run.instructions],
        "NUMBA_CPU_FEATURES": "",  # the features of the named CPU alone, not of this processor
        "OMP_NUM_THREADS": str(run.threads),
        "PYTHONPATH": str(tree / "src"),
        "TMPDIR": str(folder),
        "HOME": str(folder),
    }
    found = subprocess.check_output(
        [*prefix, python, "-c", "import rollgraph; print(rollgraph.__file__)"], cwd=tree, env=environment, text=True
    )
    if not Path(found.strip()).is_relative_to(tree):
        raise SystemExit(f"the tests in {tree} would import {found.strip()}, not the copy")
    if run.seed is not None:
        arguments = f"{arguments} --shuffle {run.seed}"
    command = ["make", "test", f"PY={shlex.join([*prefix, python])}", f"ARGS={arguments}"]
    with busy(BUSY_PROCESSES if run.load else 0), (folder / "output").open("w") as output:
        done = subprocess.run(command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return done.returncode == 0, find_summary((folder / "output").read_text())


def find_summary(output: str) -> str:
    """Return the last line of pytest's output that looks like `==== 12 passed in 3.4s ====`."""
    for line in reversed(output.splitlines()):
        if " in " in line and "====" in line:
            return line.strip("= ")
    return "no result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="three runs that cover every factor")
    which.add_argument("--cross", action="store_true", help="each of the nine with each factor: 45 runs")
    parser.add_argument("--only", metavar="TEXT", help="only runs whose name contains this, such as avx2-1 or load")
    parser.add_argument("--list", action="store_true", help="print the names of the runs and exit")
    parser.add_argument("--pytest", metavar="ARGUMENTS", default="", help='more arguments for pytest: "-k hooks"')
    given = parser.parse_args()

    runs = FOLDED
    if given.quick:
        runs = QUICK
    elif given.cross:
        runs = cross_product()
    if given.only is not None:
        runs = [run for run in runs if given.only in run.name]
    if given.list:
        print("\n".join(run.name for run in runs))
        return 0
    python = sys.executable
    supported = supported_instructions(python)
    prefix, reason = without_rights(python)
    failed = 0
    for run in runs:
        print(f"{run.name:28}", end="", flush=True)
        if run.instructions not in supported:
            print("skipped: this processor lacks these instructions", flush=True)
            continue
        if run.unprivileged and reason:
            print(f"(as this user: {reason}) ", end="", flush=True)
            run = Run(run.instructions, run.threads, run.seed, run.load)
        folder = Path(tempfile.mkdtemp(prefix="sweep "))
        started = time.monotonic()
        passed, summary = run_suite(run, python, prefix if run.unprivileged else [], given.pytest, folder)
        minutes = (time.monotonic() - started) / 60
        print(f"{'passed' if passed else 'FAILED'} {minutes:5.1f} min  {summary}", flush=True)
        if passed:
            shutil.rmtree(folder)
        else:
            failed += 1
            print(f"  see {folder / 'output'}", flush=True)
    print(f"{failed} of {len(runs)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
