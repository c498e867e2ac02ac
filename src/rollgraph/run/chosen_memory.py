"""The settings of memory that a run chooses before it allocates anything, from its first start to its last resume.

What fits is decided by the rank with the least free memory, so that all ranks choose alike. Results depend on these
settings in their last bits, so the first start records what it chose, and a resumed run keeps that; with
`allow_changes: memory` it chooses again. A run that cannot fit is refused here. The record also has the plan, for
whoever compares it with what the run took.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.files import MissingFile, read_object, write_atomically
from rollgraph.run.config_changes import covers
from rollgraph.run.inputs import Inputs
from rollgraph.run.memory_choice import CHOSEN, Choice, MemoryBudget, choose, is_unset, value_of, with_values
from rollgraph.run.memory_plan import pool_bytes
from rollgraph.run.memory_remedies import OPEN, DoesNotFit, Remedy, find_remedies, needed_bytes
from rollgraph.run.plan_lines import gib, peak, peak_phase
from rollgraph.run.run_shape import Device, RunShape, shape_run
from rollgraph.run.shared_work import work_on_some

RECORD = "memory.json"  # in the folder of a run: what its first start chose, and what its last one planned
Note = Callable[[str], None]


def keep_choices(config: Config) -> Config:
    """The configuration of a resumed run with what its first start chose, as far as it leaves that open."""
    if covers(config.allow_changes, "memory"):
        return config
    recorded = _recorded_choices(config)
    return with_values(config, {key: value for key, value in recorded.items() if is_unset(config, key)})


def choose_memory(config: Config, world: World, inputs: Inputs, note: Note) -> tuple[Choice, Inputs]:
    """What was chosen, with a configuration that says so, and the inputs with the limits that follow from it.

    Raises DoesNotFit if nothing fits.
    """
    device: Device = "cpu" if world.device == "cpu" else "cuda"
    shape = shape_run(config, ranks=world.size, nodes=count_nodes(world), device=device, inputs=inputs)
    budget = find_budget(world)
    choice = choose(config, shape, budget)
    if not choice.fits:
        again = _choose_again(config, shape, budget)
        raise DoesNotFit(choice, again or find_remedies(config, shape, budget))
    if shape.cuda and config.graph.impl != "none":
        limits = replace(shape.limits(choice.config), pool_bytes=pool_bytes(shape, choice.settings.lines))
        inputs = replace(inputs, limits=limits)
    elif choice.reasons:
        inputs = replace(inputs, limits=shape.limits(choice.config))
    if choice.reasons:
        for line in describe(choice):
            note(line)
    return choice, inputs


def record_memory(choice: Choice) -> None:
    """Write what was chosen and planned into the folder of the run."""
    before = _read_record(choice.config)
    kept = _kept_choices(choice.config)
    reasons = {key: why for key, why in before.get("reasons", {}).items() if key in kept}
    record = {
        "chosen": {**kept, **choice.values},
        "reasons": {**reasons, **choice.reasons},
        "device": "cuda" if choice.settings.shape.cuda else "cpu",
        "device_bytes": choice.budget.device,
        "lines": [line.to_dict() for line in choice.settings.lines],
    }
    write_atomically(Path(choice.config.output) / RECORD, json.dumps(record, indent=2) + "\n")


def _choose_again(config: Config, shape: RunShape, budget: MemoryBudget) -> list[Remedy]:
    """A remedy for a run that does not fit with what its first start chose, perhaps on a larger device."""
    kept = _kept_choices(config)
    opened = with_values(config, {key: OPEN[key] for key in kept})
    choice = choose(opened, shape, budget)
    if not kept or not choice.fits:
        return []
    return [Remedy("allow_changes: [memory], to choose again", opened, needed_bytes(choice))]


def _kept_choices(config: Config) -> dict[str, Any]:
    """What the first start chose, as far as the configuration still says so."""
    return {key: value for key, value in _recorded_choices(config).items() if value_of(config, key) == value}


def _recorded_choices(config: Config) -> dict[str, Any]:
    """What the run's folder says that its first start chose."""
    chosen = _read_record(config).get("chosen", {})
    return {key: value for key, value in chosen.items() if key in CHOSEN}


def _read_record(config: Config) -> dict[str, Any]:
    try:
        return read_object(Path(config.output) / RECORD)
    except MissingFile:
        return {}


def describe(choice: Choice) -> list[str]:
    """What was chosen and why, for the terminal."""
    lines, budget = choice.settings.lines, choice.budget
    needs = f"memory: {gib(peak(lines))} planned, in {peak_phase(lines)}"
    if budget.device is not None:
        needs += f"; {gib(budget.device)} are free, {gib(budget.reserve)} of them in reserve"
    return [needs, *(f"  {line}" for line in choice.describe())]


def find_budget(world: World) -> MemoryBudget:
    """The memory of the rank that has least. On a CPU, the host is the device. Ranks of one GPU have equal shares."""

    def look() -> str:
        host = available_memory()
        device = host
        if world.device != "cpu":
            device = torch.cuda.mem_get_info(world.device)[0]
        return json.dumps([device, host, platform.node(), gpu_of(world)])

    found = [json.loads(text) for text in work_on_some(world, True, look)]
    machines = [machine for _, _, machine, _ in found]
    shares = [host // machines.count(machine) for _, host, machine, _ in found if host is not None]
    host = min(shares, default=None)
    if world.device == "cpu":
        return MemoryBudget(host)
    gpus = [gpu for _, _, _, gpu in found]
    free = []
    for device, _, _, gpu in found:
        sharers = gpus.count(gpu) if gpu else 1
        free.append(device // sharers)
    return MemoryBudget(min(free), host)


def gpu_of(world: World) -> str:
    """The same for all ranks that share a GPU; nothing if each has its own."""
    return str(torch.cuda.get_device_properties(world.device).uuid) if world.staged else ""


def count_nodes(world: World) -> int:
    """The machines of the ranks; 1 if they do not have equally many, for then no layout can count on nodes."""
    machines = work_on_some(world, True, platform.node)
    shares = {machines.count(machine) for machine in machines}
    return len(set(machines)) if len(shares) == 1 else 1


def available_memory() -> int | None:
    """Bytes of this machine, or of the container, that programs can still take; None if that is unknown."""
    found = [_meminfo(), _left_in_container()]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] * 1024 if sizes else None


def _left_in_container() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        most = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(0, int(most) - used)
