"""Makes a one-shot train() repeatable: removes the functions it puts into the config, and guards DDP's hooks."""

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
from rollgraph.compat.megatron.patch import kept, swapped

PLANTED = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")

NOT_GATHERED = (
    "rollgraph: hooks are off, as before train(), and the parameters are not gathered: call the DDP's "
    "start_param_sync(force_sync=True) on all ranks before the model is used again"
)


@contextmanager
def repeatable_train(model: Model, config: Any) -> Iterator[None]:
    """Give train() the `config` that it expects; afterwards, config and hooks are what they were.

    Inside, hooks can be enabled and disabled in any order, with or without `repair()`; only methods that a subclass of
    DDP overrides need it. Hooks that train() leaves behind are removed and the parameters gathered. After an exception
    nothing is gathered, because other ranks may not take part, and a note on the exception says so.
    """
    with hooks_as_found(list_hooked(model)) as hooked, kept(config, *PLANTED), ExitStack() as guards:
        had_hooks = {ddp for ddp in hooked if has_hooks(ddp)}
        for ddp in hooked:
            guards.enter_context(hooks_guarded(ddp))
        for name in PLANTED:
            if hasattr(config, name):
                setattr(config, name, None)
        try:
            yield
        except BaseException as error:
            if any(has_hooks(ddp) for ddp in hooked if ddp not in had_hooks):
                error.add_note(NOT_GATHERED)
            raise
        for ddp in hooked:
            if ddp not in had_hooks and has_hooks(ddp):
                ddp.disable_forward_pre_hook()


def hooks_guarded(ddp: Any) -> AbstractContextManager[None]:
    """Override the class's hook methods on this object, unless a subclass has its own."""
    from megatron.core.distributed import DistributedDataParallel as DDP

    methods = {
        "enable_forward_pre_hook": enable_forward_pre_hook,
        "disable_forward_pre_hook": disable_forward_pre_hook,
    }
    overrides = {}
    for name, method in methods.items():
        if getattr(type(ddp), name) is getattr(DDP, name):
            overrides[name] = MethodType(method, ddp)
    return swapped(ddp, **overrides)
