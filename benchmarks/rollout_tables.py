"""The comparison of `generate.py --vllm`: it measures each system in separate processes and prints tables."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import rollouts
from apart import run_apart
from common import table


def measure_system(name: str, only: Sequence[str], repeats: int, limit_s: float) -> dict[str, Any]:
    """Return a system's reports for each part, from one process per group of parts."""
    found: dict[str, Any] = {"start": {}}
    for group, parts in rollouts.GROUPS.items():
        chosen = [part for part in parts if part in only]
        if not chosen:
            continue
        print(f"== {name}: {', '.join(chosen)}", flush=True)
        arguments = [name, group, "--repeats", str(repeats), "--only", *chosen]
        for reported in run_apart(rollouts.__file__, arguments, limit_s=limit_s, quiet=True):
            found["start"] |= reported.pop("start", {})
            found |= reported
    return found


def compare_with_vllm(only: Sequence[str], repeats: int, limit_s: float) -> None:
    systems = {"rollgraph": measure_system("rollgraph", only, repeats, limit_s)}
    if find_spec("vllm") is None:
        print("vLLM is not installed, so it is skipped: pip install vllm==0.25.1")
    else:
        show(systems)  # show these now, because vLLM takes minutes
        systems["vLLM"] = measure_system("vllm", only, repeats, limit_s)
    show(systems)


def show(systems: dict[str, dict[str, Any]]) -> None:
    for name, found in systems.items():
        print(f"{name}: {found.get('settings', 'nothing was measured')}")
    show_decode(systems)
    show_rollouts(systems)
    show_starts(systems)


def show_decode(systems: dict[str, dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for batch, shape in rollouts.DECODE.items():
        # The step time is the average over the steps that only the longer run has.
        floor = 1e3 * rollouts.floor_of_step(shape, (rollouts.SHORT + rollouts.LONG) / 2)
        times = {name: found["decode"][str(batch)] for name, found in systems.items() if "decode" in found}
        ours = times.get("rollgraph")
        for name, time_of in times.items():
            step = time_of["step"]
            ratios = (step / ours["step"], time_of["whole"] / ours["whole"]) if ours else ("-", "-")
            speed = (step, batch * 1e3 / step, step / floor)
            rows.append((f"{name}, batch {batch}", *speed, ratios[0], time_of["whole"], ratios[1]))
        if times:
            rows.append((f"floor, batch {batch}", floor, batch * 1e3 / floor, 1.0, "-", "-", "-"))
    if rows:
        header = ("", "decode, ms/step", "tokens/s", "x floor", "x rollgraph", "whole run, ms", "x rollgraph")
        title = f"decode step: (run of {rollouts.LONG} - run of {rollouts.SHORT} new tokens) / difference; "
        table(title + f"whole run: 128 + {rollouts.SHORT}", header, rows)


def show_rollouts(systems: dict[str, dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for part, shape in rollouts.ROLLOUTS.items():
        floor = rollouts.floor_of_rollout(shape)
        tokens = shape.rows * shape.new
        ours = systems["rollgraph"].get(part, {}).get("logprobs")
        title = f"{part}, {shape}"
        measured = False
        for name, found in systems.items():
            for kind, seconds in found.get(part, {}).items():
                label = f"{title}: {name}{', with log-probabilities' if kind == 'logprobs' else ''}"
                rows.append((label, seconds, tokens / seconds, seconds / floor, seconds / ours if ours else "-"))
                measured = True
        if measured:
            rows.append((f"{title}: floor", floor, tokens / floor, 1.0, "-"))
    if rows:
        table("whole rollouts", ("", "seconds", "tokens/s", "x floor", "x rollgraph"), rows)


def show_starts(systems: dict[str, dict[str, Any]]) -> None:
    rows = [
        (f"{name}, {group}", start["ready"], start["first"], start["run"])
        for name, found in systems.items()
        for group, start in found["start"].items()
    ]
    if rows:
        header = ("", "ready, s", "first run finished, s", "the first run")
        table("from the start of the process, with imports, weights and captures", header, rows)
