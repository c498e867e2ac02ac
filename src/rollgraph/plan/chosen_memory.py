"""Chooses, records and restores the memory settings of a run, before it allocates anything.

The rank with the least free memory decides what fits, so that all ranks choose alike. Results depend on these settings
in their last bits, so the first start records its choice and a resumed run keeps it; with `allow_changes: memory` it
chooses again. A run that cannot fit is refused here. The record also has the plan, to compare it with the memory that
the run really used.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollgraph.checkpoint.changes import covers
from rollgraph.config import Config
from rollgraph.files import MissingFile, read_json_object, write_atomically
from rollgraph.inputs.inputs import Inputs
from rollgraph.parallel.data.together import run_on_some_ranks
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.choose import MEMORY_KEYS, Choice, MemoryBudget, choose_settings, is_unset, value_of, with_values
from rollgraph.plan.memory import format_bytes, peak_bytes, peak_phase, pool_bytes
from rollgraph.plan.run_shape import Device, RunShape, make_run_shape
from rollgraph.plan.suggest import AUTO_VALUES, DoesNotFit, Suggestion, required_bytes, suggest_settings

RECORD = "memory.json"  # in the folder of a run: the choice of its first start, and the plan of its last one
Note = Callable[[str], None]


def restore_choices(config: Config) -> Config:
    """The configuration of a resumed run, with the first start's choice for every key that is still unset."""
    if covers(config.allow_changes, "memory"):
        return config
    recorded = _recorded_choices(config)
    return with_values(config, {key: value for key, value in recorded.items() if is_unset(config, key)})


def choose_memory(config: Config, world: World, inputs: Inputs, note: Note) -> tuple[Choice, Inputs]:
    """Choose the memory settings. Returns the choice, and the inputs with the limits that follow from it.

    Raises DoesNotFit if nothing fits.
    """
    device: Device = "cpu" if world.device == "cpu" else "cuda"
    nodes = count_nodes(world)
    shape = make_run_shape(
        config, ranks=world.size, nodes=nodes, device=device, inputs=inputs, prompt_lengths=inputs.prompt_lengths
    )
    budget = find_memory_budget(world)
    choice = choose_settings(config, shape, budget)
    if not choice.fits:
        choosing_again = _suggest_choosing_again(config, shape, budget)
        raise DoesNotFit(choice, choosing_again or suggest_settings(config, shape, budget))
    if shape.cuda and config.graph.impl != "none":
        limits = replace(shape.limits(choice.config), pool_bytes=pool_bytes(shape, choice.settings.lines))
        inputs = replace(inputs, limits=limits)
    elif choice.reasons:
        inputs = replace(inputs, limits=shape.limits(choice.config))
    if choice.reasons:
        for line in describe_choice(choice):
            note(line)
    return choice, inputs


def record_memory(choice: Choice) -> None:
    """Write the choice and the plan into the folder of the run.

    A resumed run makes only the choices that the first start did not make. The record therefore keeps the earlier ones,
    with their reasons, unless the configuration has changed them.
    """
    previous = _read_record(choice.config)
    unchanged = _unchanged_choices(choice.config)
    reasons = {key: reason for key, reason in previous.get("reasons", {}).items() if key in unchanged}
    record = {
        "chosen": {**unchanged, **choice.values},
        "reasons": {**reasons, **choice.reasons},
        "device": "cuda" if choice.settings.shape.cuda else "cpu",
        "device_bytes": choice.budget.device,
        "lines": [line.to_dict() for line in choice.settings.lines],
    }
    write_atomically(Path(choice.config.output) / RECORD, json.dumps(record, indent=2) + "\n")


def _suggest_choosing_again(config: Config, shape: RunShape, budget: MemoryBudget) -> list[Suggestion]:
    """Suggest choosing again if a resumed run does not fit with its first start's choice, but would with another."""
    unchanged = _unchanged_choices(config)
    unset = with_values(config, {key: AUTO_VALUES[key] for key in unchanged})
    choice = choose_settings(unset, shape, budget)
    if not unchanged or not choice.fits:
        return []
    return [Suggestion("allow_changes: [memory], to choose again", unset, required_bytes(choice))]


def _unchanged_choices(config: Config) -> dict[str, Any]:
    """The choices of the first start that this configuration has not changed."""
    return {key: value for key, value in _recorded_choices(config).items() if value_of(config, key) == value}


def _recorded_choices(config: Config) -> dict[str, Any]:
    """The first start's choices, from the record in the run's folder."""
    chosen = _read_record(config).get("chosen", {})
    return {key: value for key, value in chosen.items() if key in MEMORY_KEYS}


def _read_record(config: Config) -> dict[str, Any]:
    try:
        return read_json_object(Path(config.output) / RECORD)
    except MissingFile:
        return {}


def describe_choice(choice: Choice) -> list[str]:
    """The planned memory and the choices with their reasons, for the terminal."""
    lines, budget = choice.settings.lines, choice.budget
    needs = f"memory: {format_bytes(peak_bytes(lines))} planned, in {peak_phase(lines)}"
    if budget.device is not None:
        needs += f"; {format_bytes(budget.device)} are free, {format_bytes(budget.reserve)} of them in reserve"
    return [needs, *(f"  {line}" for line in choice.describe())]


def find_memory_budget(world: World) -> MemoryBudget:
    """The memory of the rank with the least. On a CPU, the host is the device. Ranks that share a GPU split it."""

    def measure() -> str:
        host = available_memory()
        device = host
        if world.device != "cpu":
            device = torch.cuda.mem_get_info(world.device)[0]
        return json.dumps([device, host, platform.node(), gpu_uuid(world)])

    measured = [json.loads(text) for text in run_on_some_ranks(world, True, measure)]
    machines = [machine for _, _, machine, _ in measured]
    shares = [host // machines.count(machine) for _, host, machine, _ in measured if host is not None]
    host = min(shares, default=None)
    if world.device == "cpu":
        return MemoryBudget(host)
    gpus = [gpu for _, _, _, gpu in measured]
    free = []
    for device, _, _, gpu in measured:
        sharing_ranks = gpus.count(gpu) if gpu else 1
        free.append(device // sharing_ranks)
    return MemoryBudget(min(free), host)


def gpu_uuid(world: World) -> str:
    """The UUID of a rank's GPU if several ranks share it; empty if each has its own."""
    return str(torch.cuda.get_device_properties(world.device).uuid) if world.staged else ""


def count_nodes(world: World) -> int:
    """How many machines the ranks run on; 1 if these have different numbers of ranks, which no layout can use."""
    machines = run_on_some_ranks(world, True, platform.node)
    shares = {machines.count(machine) for machine in machines}
    return len(set(machines)) if len(shares) == 1 else 1


def available_memory() -> int | None:
    """Bytes that this machine or container has available; None if unknown."""
    candidates = [_machine_memory(), _container_memory()]
    return min((nbytes for nbytes in candidates if nbytes is not None), default=None)


def _machine_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] * 1024 if sizes else None


def _container_memory() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
