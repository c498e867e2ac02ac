"""`rollgraph samples`: print samples of a run for people to read."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgraph.log.progress import describe_step_count, format_number
from rollgraph.log.samples import first_of_each_group, format_sample

DONE, REFUSED = 0, 2
STARTS = "starts.jsonl"  # every run has this file, from its start
SPLITS = ("validation", "train", "dropped")  # we show the first split that the step has


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "samples",
        help="show samples of a run",
        description="Show prompts, completions and rewards from samples.jsonl in the folder of a run. By default, they "
        "are from the last validation or, without one, from the last step with samples, with one completion for each "
        "prompt. With --best or --worst, they are chosen from all completions, by reward. "
        f"Exit code: {DONE} if there are samples, {REFUSED} if not.",
    )
    parser.add_argument("folder", metavar="RUN", help="output folder of a run")
    parser.add_argument("--step", type=int, metavar="N", help="samples after N steps; 0: before the first step")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="samples with the highest reward, best first")
    order.add_argument("--worst", action="store_true", help="samples with the lowest reward, worst first")
    parser.add_argument("-n", type=int, default=4, metavar="COUNT", help="number of samples (default: 4)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    file = Path(options.folder) / "samples.jsonl"
    try:
        lines = _format_rows(list(_read_rows(file)), options)
    except (OSError, ValueError) as error:
        print(f"rollgraph samples: {error}", file=sys.stderr)
        return REFUSED
    for line in lines:
        print(line)
    return DONE


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that may still be growing. An incomplete last line is skipped."""
    if not file.exists():
        if not (file.parent / STARTS).exists():
            raise ValueError(f"{file.parent} is not the folder of a run: it has no {file.name}")
        reason = "they come after a warm start, with the validation before the first step or with that step"
        raise ValueError(f"{file.parent} has no samples yet: {reason}. With log.samples_every: 0 there are none")
    with file.open(encoding="utf-8", errors="replace") as rows:
        for row in rows:
            if row.endswith("\n"):
                yield json.loads(row)


def _format_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    if options.n < 1:
        raise ValueError(f"-n: must be at least 1, got {options.n}")
    steps = sorted({row["step"] + 1 for row in rows})
    if not steps:
        raise ValueError(f"{options.folder} has no samples yet")
    chosen_step = _default_step(rows) if options.step is None else options.step
    if chosen_step not in steps:
        nearest = sorted(sorted(steps, key=lambda step: abs(step - chosen_step))[:2])
        raise ValueError(f"no samples of step {chosen_step}; the nearest are of {' and '.join(map(str, nearest))}")
    step_rows = [row for row in rows if row["step"] + 1 == chosen_step]
    split = next(split for split in SPLITS if any(row["split"] == split for row in step_rows))
    split_rows = [row for row in step_rows if row["split"] == split]
    mean = math.fsum(row["reward"] for row in split_rows) / len(split_rows)
    lines = [
        f"{describe_step_count(chosen_step)}, {split}: {len(split_rows)} samples, mean reward {format_number(mean)}",
        "",
    ]
    for row in _sort_rows(split_rows, options)[: options.n]:
        lines += [*format_sample(row), ""]
    return lines[:-1]


def _default_step(rows: list[dict[str, Any]]) -> int:
    """The step of the last validation or, without one, the last step."""
    validation_steps: list[int] = [row["step"] + 1 for row in rows if row["split"] == "validation"]
    return max(validation_steps or (row["step"] + 1 for row in rows))


def _sort_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[Any]:
    if options.best or options.worst:
        return sorted(rows, key=lambda row: row["reward"], reverse=options.best)
    return list(first_of_each_group(rows))
