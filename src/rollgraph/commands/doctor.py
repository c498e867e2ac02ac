"""`rollgraph doctor`: reports what is broken in an installation of the Megatron family, and how to repair it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rollgraph.commands.streams import printing_to_stderr

if TYPE_CHECKING:
    from rollgraph.compat.examination import Examination

WELL, AFFECTED, BROKEN, UNTRIED = 0, 1, 2, 3
ELSEWHERE = (
    "megatron-core is not installed here: run this with the Python of the environment that trains; NeMo-RL's Megatron "
    "workers have their own, in the folder NEMO_RL_VENV_DIR"
)
COLOURS = {"affected": "red", "not affected": "green", "repaired": "green", "cannot tell here": "yellow"}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find what breaks in an installed Megatron, Megatron-Bridge or NeMo-RL",
        description="Try known failures of CUDA graphs and overlap on what is installed here, and check the graph keys "
        f"of a config. Exit code: {WELL} if nothing is affected, or nothing of the family is installed; {AFFECTED} if "
        f"something is affected and not repaired; {BROKEN} if the config cannot be read, or has no known key; "
        f"{UNTRIED} if nothing could be tried here, for example because megatron-core is in another environment.",
    )
    parser.add_argument("--config", metavar="YAML", help="check the graph keys of a NeMo-RL or Megatron config")
    parser.add_argument("--repaired", action="store_true", help="examine with rollgraph's repairs in force")
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from rollgraph.compat.examination import examine
    from rollgraph.config import ConfigError

    try:
        with printing_to_stderr():
            found = examine(options.config, repaired=options.repaired)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BROKEN
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, has_config=options.config is not None, repaired=options.repaired)
    if found.affected:
        return AFFECTED
    return UNTRIED if found.family and not found.tried else WELL


def show(found: Examination, *, has_config: bool = False, repaired: bool = False) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in found.installed.items())
    _print(console, f"installed: {versions}")
    if not found.family:
        _print(console, "Nothing of the Megatron family is installed here, so there is nothing to examine.")
    for finding in found.findings:
        _print(console, "")
        _print(console, f"{finding.state.upper()}  {finding.name}", COLOURS[finding.state])
        for label in ("symptom", "reason", "repair"):
            _row(console, label, getattr(finding, label))
    if has_config:
        _print(console, "")
        _print(console, f"config: {count_remarks(len(found.remarks))}")
    for remark in found.remarks:
        _print(console, f"{remark.place}: {remark.key}: {remark.kind}", "red" if remark.serious else "yellow")
        _row(console, "reason", remark.text)
        _row(console, "repair", remark.advice)
    _print(console, "")
    colour = {True: "red", False: "green", None: "yellow"}[found.affected]
    _print(console, summary(found, repaired=repaired), f"{colour} bold")


def count_remarks(count: int) -> str:
    if count == 0:
        return "no remarks"
    return "1 remark" if count == 1 else f"{count} remarks"


def summary(found: Examination, *, repaired: bool = False) -> str:
    """The last line: how many findings have which state, and what to do next."""
    states = [finding.state.value for finding in found.findings]
    parts = []
    counts = [f"{states.count(state)} {state}" for state in COLOURS if state in states]
    if counts:
        parts.append(", ".join(counts))
    if found.remarks:
        serious = sum(remark.serious for remark in found.remarks)
        parts.append(f"{count_remarks(len(found.remarks))} on the config, {serious} serious")
    if "affected" in states and not repaired:
        parts.append("call rollgraph.compat.megatron.repair() before the model is built; --repaired shows the result")
    if not found.tried:
        parts.append("nothing could be tried here")
    if found.family and not found.installed["megatron-core"]:
        parts.append(ELSEWHERE)
    return "; ".join(parts) or "nothing is affected"


def _print(console: Any, text: str, style: str = "") -> None:
    """Print wrapped lines to a terminal, and unwrapped ones to a pipe or a file."""
    console.print(text, style=style or None, markup=False, soft_wrap=not console.is_terminal)


def _row(console: Any, label: str, text: str) -> None:
    if not console.is_terminal:
        _print(console, f"  {label:<8} {' '.join(text.split())}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=9)
    table.add_column()
    table.add_row(Text(f"  {label}", style="dim"), Text(text))
    console.print(table)
