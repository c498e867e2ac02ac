"""The record of a run's starts: with what it ran, for whoever finds its folder a year later.

config.yaml     the configuration with all defaults, as of the last start; `rollgraph train` takes it as it is
starts.jsonl    one line for each start, which is never changed: when, how, on what, with which configuration
memory.json     the settings of memory that were chosen, and what was planned: see `chosen_memory.py`
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rollgraph.config import to_dict, to_yaml
from rollgraph.distributed.world import World
from rollgraph.files import append_line, write_atomically
from rollgraph.run.chosen_memory import record_memory
from rollgraph.run.setup import Run

CONFIG = "config.yaml"
STARTS = "starts.jsonl"


def record_start(run: Run, first_step: int) -> None:
    """Add this start to the record. Rank 0 writes."""
    if run.world.rank != 0:
        return
    folder = Path(run.config.output)
    folder.mkdir(parents=True, exist_ok=True)
    append_line(folder / STARTS, json.dumps(describe_start(run, first_step), ensure_ascii=False))
    write_atomically(folder / CONFIG, to_yaml(run.config))
    record_memory(run.memory)


def tell_changes(run: Run) -> None:
    """Say what is not as it was when the checkpoint of a resumed run was saved."""
    if run.inputs.changes:
        run.log.note(f"changed since then: {'; '.join(map(str, run.inputs.changes))}")


def describe_start(run: Run, first_step: int) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": first_step,
        "command": shlex.join(sys.orig_argv),
        "folder": str(Path.cwd()),
        "seed": run.config.seed,
        "ranks": run.world.size,
        "device": describe_device(run.world),
        "versions": find_versions(),
        "fingerprints": dict(run.inputs.fingerprints),
        "changes": [vars(change) for change in run.inputs.changes],
        "config": to_dict(run.config),
    }


def find_versions() -> dict[str, str | None]:
    return {
        "rollgraph": sys.modules["rollgraph"].__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
    }


def describe_device(world: World) -> str:
    """The name of the GPU or, without one, of the CPU."""
    if world.device.startswith("cuda"):
        return torch.cuda.get_device_name(world.device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
