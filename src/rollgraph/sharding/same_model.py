"""Checks that all ranks shard the same model with the same settings, before anything is allocated."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rollgraph.sharding.bucket_plan import ParameterSpec
from rollgraph.sharding.collectives import Collectives


def check_same_on_all_ranks(
    collectives: Collectives, rank: int, settings: Mapping[str, Any], parameters: Sequence[ParameterSpec]
) -> str:
    """Raise if the ranks differ; return a unique name for this model that is the same on all ranks."""
    mine = [f"{name} {value}" for name, value in settings.items()]
    for spec in parameters:
        trained = "trained" if spec.trainable else ""
        mine.append(f"{spec.name} {spec.dtype} {tuple(spec.shape)} {trained}")
    names = []
    for other, text in enumerate(collectives.all_gather_text("\n".join([uuid.uuid4().hex, *mine]))):
        name, *theirs = text.split("\n")
        names.append(name)
        for here, there in zip_longest(mine, theirs, fillvalue="nothing"):
            if here != there:
                raise ValueError(f"rank {rank} has {here!r} where rank {other} has {there!r}")
    return names[0]
