"""How long each rank took for what it does by itself: a slow one keeps all others waiting."""

from __future__ import annotations

import json

from rollgraph.run.setup import Run

RANKS = "speed/ranks/"  # metrics of a single rank, which follow with its number


def share_rank_times(run: Run) -> dict[str, float]:
    """Metrics of each rank, if there are several: the seconds of its phases up to here, and its memory."""
    if run.world.size == 1:
        return {}
    mine: dict[str, float] = {f"seconds/{phase}": seconds for phase, seconds in run.log.seconds.items()}
    mine["memory_gib"] = run.log.memory.peak / 2**30
    found: dict[str, float] = {}
    for rank, text in enumerate(run.policy.sharded.exchange_text(json.dumps(mine))):
        found |= {f"{RANKS}{rank}/{name}": value for name, value in json.loads(text).items()}
    return found
