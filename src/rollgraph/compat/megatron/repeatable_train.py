"""A one-shot train(), once per rollout: the functions it plants in the config, and hooks it disables a second time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from rollgraph.compat.megatron.forward_hooks import (
    add_hooks,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    has_hooks,
    remove_hooks,
)
from rollgraph.compat.megatron.model_chunks import Model, list_hooked
from rollgraph.compat.megatron.patch import ABSENT, Installed, Patch, install, put_back

PLANTED = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


@contextmanager
def repeatable_train(model: Model, config: Any) -> Iterator[None]:
    """Inside, `config` is as train() expects it; afterwards config and hooks are what they were.

    Enabling and disabling hooks is safe in any order inside, with or without `repair()`. After an exception hooks are
    put back without an all-gather, in which other ranks may not take part.
    """
    planted = {name: getattr(config, name) for name in PLANTED if hasattr(config, name)}
    hooked = list_hooked(model)
    had_hooks = [has_hooks(ddp) for ddp in hooked]
    for name in planted:
        setattr(config, name, None)
    installed = install([patch for ddp in hooked for patch in guard_hooks(ddp)])
    try:
        yield
        for ddp, had in zip(hooked, had_hooks, strict=True):
            if has_hooks(ddp) and not had:
                ddp.disable_forward_pre_hook()
    finally:
        restore(installed)
        for name, value in planted.items():
            setattr(config, name, value)
        for ddp, had in zip(hooked, had_hooks, strict=True):
            (add_hooks if had else remove_hooks)(ddp)


def guard_hooks(ddp: Any) -> list[Patch]:
    """The object's own methods, in place of its class's. Not twice, so that contexts nest."""
    if "disable_forward_pre_hook" in vars(ddp):
        return []
    return [
        Patch(vars(ddp), "enable_forward_pre_hook", MethodType(enable_forward_pre_hook, ddp)),
        Patch(vars(ddp), "disable_forward_pre_hook", MethodType(disable_forward_pre_hook, ddp)),
    ]


def restore(installed: list[Installed]) -> None:
    assert all(entry.before is ABSENT for entry in installed)
    put_back(installed)
