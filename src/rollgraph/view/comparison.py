"""Several runs beside each other: how their configurations differ, and which prompts they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgraph.view.run_data import RunData
from rollgraph.view.sample_search import key_of

MOST_PROMPTS = 100


def compare(runs: Sequence[RunData]) -> dict[str, Any]:
    """Keys that do not have the same value in all runs, with null where a run does not have the key."""
    flat = [flatten(run.files.config.value) for run in runs]
    keys = sorted(set().union(*flat)) if flat else []
    differing = []
    for key in keys:
        values = [config.get(key) for config in flat]
        if any(value != values[0] for value in values):
            differing.append({"key": key, "values": {run.id: value for run, value in zip(runs, values, strict=True)}})
    names = [set(run.metrics.names) for run in runs]
    return {
        "runs": [run.summary() for run in runs],
        "config": differing,
        "equal_keys": len(keys) - len(differing),
        "names": sorted(set.intersection(*names)) if names else [],
        "prompts": shared_prompts(runs),
    }


def shared_prompts(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Prompts that all runs have samples of; those that came last in the first run come first."""
    shared: set[int] | None = None
    for run in runs:
        keys = {int(key) for key in np.unique(run.samples.groups["prompt"])}
        shared = keys if shared is None else shared & keys
    if not shared:
        return []
    first = runs[0].samples
    found: dict[int, str] = {}
    for row in first.groups[::-1]:
        key = int(row["prompt"])
        if key in shared and key not in found:
            records = first.read_group(row)
            found[key] = str(records[0].get("prompt", "")) if records else ""
            if len(found) == min(len(shared), MOST_PROMPTS):
                break
    return [{"key": key_of(key), "prompt": prompt} for key, prompt in found.items()]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by their dotted key, as `rollgraph train` takes them."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
