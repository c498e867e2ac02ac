"""The model argument of this package: one module, or the list of chunks that Megatron's training loops pass around."""

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
    """The DDPs with forward pre-hooks, enabled or not: the chunks themselves, or those around them."""
    hooked: dict[Any, None] = {}  # a set that keeps its order
    for chunk in list_chunks(model):
        for ddp in find_owners(chunk) or find_around(chunk):
            need(ddp, "remove_forward_pre_hook_handles", "start_param_sync")
            hooked[ddp] = None
    return list(hooked)


def find_around(chunk: nn.Module) -> list[Any]:
    """The DDPs around a module that has none of their hooks. Modules do not know their parents: search all objects."""
    if not any(hasattr(parameter, "main_grad") for parameter in chunk.parameters()):  # set by a DDP
        return []
    ddps = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and overlaps_gather(thing)]
    return [ddp for ddp in ddps if any(module is chunk for module in ddp.modules())]
