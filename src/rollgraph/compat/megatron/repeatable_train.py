"""A one-shot train(), once per rollout: the functions it plants in the config, and hooks it disables a second time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

from rollgraph.compat.megatron.forward_hooks import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    has_hooks,
    hooks_as_found,
)
from rollgraph.compat.megatron.model_chunks import Model, list_hooked
from rollgraph.compat.megatron.patch import swapped

PLANTED = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


@contextmanager
def repeatable_train(model: Model, config: Any) -> Iterator[None]:
    """Inside, `config` is as train() expects it; afterwards config and hooks are what they were.

    Enabling and disabling hooks is safe in any order inside, with or without `repair()`. Hooks that train() leaves
    behind are removed with the parameters gathered; after an exception without, as other ranks may not take part.
    """
    planted = {name: getattr(config, name) for name in PLANTED if hasattr(config, name)}
    with hooks_as_found(list_hooked(model)) as hooked, ExitStack() as guards:
        had_hooks = {ddp for ddp in hooked if has_hooks(ddp)}
        for ddp in hooked:
            guards.enter_context(hooks_guarded(ddp))
        for name in planted:
            setattr(config, name, None)
        try:
            yield
            for ddp in hooked:
                if ddp not in had_hooks and has_hooks(ddp):
                    ddp.disable_forward_pre_hook()
        finally:
            for name, value in planted.items():
                setattr(config, name, value)


def hooks_guarded(ddp: Any) -> AbstractContextManager[None]:
    """The object's own methods, in place of its class's."""
    return swapped(
        ddp,
        enable_forward_pre_hook=MethodType(enable_forward_pre_hook, ddp),
        disable_forward_pre_hook=MethodType(disable_forward_pre_hook, ddp),
    )
