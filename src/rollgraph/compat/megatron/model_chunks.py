"""What may be passed as a model: one, or the list of chunks that Megatron's training loops pass around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rollgraph.compat.megatron.patch import need

Model = nn.Module | Sequence[nn.Module]


def list_chunks(model: Model) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def list_hooked(model: Model) -> list[Any]:
    """The chunks that overlap the parameter all-gather: only those have forward pre-hooks."""
    hooked = [chunk for chunk in list_chunks(model) if getattr(chunk, "use_forward_hook", False)]
    for chunk in hooked:
        need(chunk, "remove_forward_pre_hook_handles", "start_param_sync")
    return hooked
