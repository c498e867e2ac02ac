"""What may be passed as a model: one, or the list of chunks that Megatron's training loops pass around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rollgraph.compat.megatron.forward_hooks import find_owners
from rollgraph.compat.megatron.patch import need

Model = nn.Module | Sequence[nn.Module]


def list_chunks(model: Model) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def list_hooked(model: Model) -> list[Any]:
    """The DDPs with forward pre-hooks: the chunks themselves, or those that a chunk is inside of."""
    hooked = list(dict.fromkeys(owner for chunk in list_chunks(model) for owner in find_owners(chunk)))
    for ddp in hooked:
        need(ddp, "remove_forward_pre_hook_handles", "start_param_sync")
    return hooked
