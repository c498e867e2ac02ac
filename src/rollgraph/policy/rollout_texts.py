"""Rollouts as ranks exchange them: a JSON text for each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from rollgraph.types import Rollout


def join_rollouts(texts: Sequence[str]) -> list[Rollout]:
    """The rollouts of all ranks, in the order of ranks, with a number of its own for each group."""
    gathered: list[Rollout] = []
    for text in texts:
        offset = 1 + max((rollout.group for rollout in gathered), default=-1)
        theirs = [Rollout.from_dict(entry) for entry in json.loads(text)]
        gathered += [replace(rollout, group=rollout.group + offset) for rollout in theirs]
    return gathered
