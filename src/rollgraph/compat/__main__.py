"""`python -m rollgraph.compat run script.py …`: repairs first, then runs a script as if it had been started itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from rollgraph.compat.finding import Finding, State

USAGE = """usage: python -m rollgraph.compat run script.py [argument ...]
       python -m rollgraph.compat run -m module [argument ...]

Repairs megatron-core in this process, then runs the script or module in it."""


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"], ["run", "-h"], ["run", "--help"]):
        print(USAGE)
        return 0
    command, target = arguments[:1], arguments[1:]
    as_module = target[:1] == ["-m"]
    if as_module:
        target = target[1:]
    if command != ["run"] or not target:
        return complain(USAGE)
    if not as_module and not Path(target[0]).exists():
        return complain(f"there is no script {target[0]}")

    from rollgraph.compat.megatron import repair

    try:
        found = repair()
    except ModuleNotFoundError as error:
        return complain(str(error))
    for finding in found:
        print(f"rollgraph: {describe(finding)}", file=sys.stderr)
    run(target, as_module)
    return 0


def run(target: list[str], as_module: bool) -> None:
    """As Python starts them: a script's folder, or the working directory, is the first place to import from."""
    sys.argv = target
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target[0]).resolve().parent)
        runpy.run_path(target[0], run_name="__main__")


def describe(finding: Finding) -> str:
    if finding.state is State.AFFECTED:  # and could not be repaired
        return f"{finding.name}: {finding.state}; {finding.repair}"
    if finding.state is State.UNKNOWN:
        return f"{finding.name}: {finding.state}: {finding.reason}"
    return f"{finding.name}: {finding.state}"


def complain(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
