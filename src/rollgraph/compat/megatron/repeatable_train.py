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
from rollgraph.compat.megatron.patch import kept, swapped

PLANTED = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")

NOT_GATHERED = (
    "rollgraph: hooks are off, as before train(), and what they would have gathered is not: call "
    "start_param_sync(force_sync=True) of the DDP on all ranks before the model is used again"
)


@contextmanager
def repeatable_train(model: Model, config: Any) -> Iterator[None]:
    """Inside, `config` is as train() expects it; afterwards config and hooks are what they were.

    Enabling and disabling hooks is safe in any order inside, with or without `repair()`, except that methods which a
    subclass of DDP overrides need it. Hooks that train() leaves behind are removed with the parameters gathered; after
    an exception without, as other ranks may not take part, and the exception gets a note that says so.
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
    """The object's own methods, in place of its class's."""
    from megatron.core.distributed import DistributedDataParallel as DDP

    methods = (enable_forward_pre_hook, disable_forward_pre_hook)
    names = ("enable_forward_pre_hook", "disable_forward_pre_hook")
    inherited = {
        name: MethodType(method, ddp)
        for name, method in zip(names, methods, strict=True)
        if getattr(type(ddp), name) is getattr(DDP, name)
    }
    return swapped(ddp, **inherited)
