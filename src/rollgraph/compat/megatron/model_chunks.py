"""What may be passed as a model: one, or the list of chunks that Megatron's training loops pass around."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import nn

from rollgraph.compat.megatron.forward_hooks import find_owners, overlaps_gather
from rollgraph.compat.megatron.patch import need

Model = nn.Module | Sequence[nn.Module]


def list_chunks(model: Model) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def list_hooked(model: Model) -> list[Any]:
    """The DDPs with forward pre-hooks, enabled or not: the chunks themselves, or those that a chunk is inside of."""
    chunks = list_chunks(model)
    hooked = list(dict.fromkeys(owner for chunk in chunks for owner in find_owners(chunk) or find_around(chunk)))
    for ddp in hooked:
        need(ddp, "remove_forward_pre_hook_handles", "start_param_sync")
    return hooked


def find_around(chunk: nn.Module) -> list[Any]:
    """The DDPs around a module none of whose hooks says so. Theirs has no way up, so all objects are looked at."""
    if not any(hasattr(parameter, "main_grad") for parameter in chunk.parameters()):  # which a DDP gives them
        return []
    around = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and overlaps_gather(thing))
    return [ddp for ddp in around if any(module is chunk for module in ddp.modules())]
