"""Repairs DDP's forward pre-hooks: their handles own them, and nothing looks them up through the module tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from rollgraph.compat.megatron.patch import CannotRepair, Patch, closure_values, need, need_parameters
from rollgraph.compat.megatron.probe_objects import wrap_ddp
from rollgraph.compat.megatron.repair import Repair, Verdict, verdict_on


def add_hooks(ddp: Any) -> None:
    """Add a hook to every module of the tree that has none, and remove those of modules that left the tree."""
    handles = ddp.remove_forward_pre_hook_handles
    modules = list(ddp.module.modules())
    for gone in handles.keys() - set(modules):
        handles.pop(gone).remove()
    for module in modules:
        if module not in handles:
            handles[module] = module.register_forward_pre_hook(ddp._make_forward_pre_hook())


def remove_hooks(ddp: Any) -> None:
    handles = ddp.remove_forward_pre_hook_handles
    while handles:
        handles.popitem()[1].remove()


def enable_forward_pre_hook(self: Any) -> None:
    assert self.use_forward_hook
    add_hooks(self)


def disable_forward_pre_hook(self: Any, param_sync: bool = True) -> None:
    assert self.use_forward_hook
    remove_hooks(self)
    if param_sync:
        self.start_param_sync(force_sync=True)


def has_hooks(ddp: Any) -> bool:
    return bool(getattr(ddp, "remove_forward_pre_hook_handles", None))


@contextmanager
def hooks_paused(ddps: Iterable[Any]) -> Iterator[None]:
    """Remove all hooks inside; afterwards, DDPs that had hooks have them on the modules that are then in the tree."""
    with hooks_as_found(ddps) as found:
        for ddp in found:
            remove_hooks(ddp)
        yield


@contextmanager
def hooks_as_found(ddps: Iterable[Any]) -> Iterator[list[Any]]:
    """Restore hooks afterwards, whatever is enabled and disabled inside. Gathers nothing."""
    found: dict[Any, dict[Any, set[int]] | None] = {}
    for ddp in ddps:
        found[ddp] = list_in_front(ddp) if has_hooks(ddp) else None
    try:
        yield list(found)
    finally:
        for ddp, in_front in found.items():
            if in_front is None:
                remove_hooks(ddp)
            else:
                add_hooks(ddp)
                restore_order(ddp, in_front)


def list_in_front(ddp: Any) -> dict[Any, set[int]]:
    """For each module, the ids of the hooks that run before the DDP's. Later hooks read gathered parameters."""
    in_front: dict[Any, set[int]] = {}
    for module, handle in ddp.remove_forward_pre_hook_handles.items():
        ids = list(module._forward_pre_hooks)
        own = ids.index(handle.id) if handle.id in ids else len(ids)
        in_front[module] = set(ids[:own])
    return in_front


def restore_order(ddp: Any, in_front: dict[Any, set[int]]) -> None:
    for module, handle in ddp.remove_forward_pre_hook_handles.items():
        if module in in_front:
            hooks = module._forward_pre_hooks
            for key in list(hooks):
                if key != handle.id and key not in in_front[module]:
                    hooks.move_to_end(key)


def find_owners(model: nn.Module) -> list[Any]:
    """The DDPs whose hooks are on the model's modules. A module does not know the DDP around it; its hooks do."""
    found: dict[Any, None] = {}  # a set that keeps its order
    for module in model.modules():
        candidates = [module]
        for hook in module._forward_pre_hooks.values():
            candidates += closure_values(hook)
        for owner in candidates:
            if overlaps_gather(owner):
                found[owner] = None
    return list(found)


def overlaps_gather(module: Any) -> bool:
    """Whether this is a DDP that overlaps the parameter all-gather: only those have forward pre-hooks."""
    return isinstance(module, nn.Module) and bool(getattr(module, "use_forward_hook", False))


def probe() -> Verdict:
    failures = []
    for what, attempt in ATTEMPTS.items():
        ddp = wrap_ddp(nn.Sequential(nn.Identity(), nn.Identity()))
        try:
            attempt(ddp)
        except (AssertionError, KeyError) as error:
            failures.append(f"{what}: {type(error).__name__}")
    return verdict_on(failures)


def disable_after_removal(ddp: Any) -> None:
    del ddp.module[1]
    ddp.disable_forward_pre_hook(param_sync=False)


def disable_after_addition(ddp: Any) -> None:
    ddp.module.append(nn.Identity())
    ddp.disable_forward_pre_hook(param_sync=False)


def disable_twice(ddp: Any) -> None:
    ddp.disable_forward_pre_hook(param_sync=False)
    ddp.disable_forward_pre_hook(param_sync=False)


def enable_twice(ddp: Any) -> None:
    ddp.enable_forward_pre_hook()


ATTEMPTS: dict[str, Callable[[Any], None]] = {
    "disabling after a module was removed": disable_after_removal,
    "disabling after a module was added": disable_after_addition,
    "disabling twice": disable_twice,
    "enabling twice": enable_twice,
}


def plan() -> list[Patch]:
    from megatron.core.distributed import DistributedDataParallel as DDP

    need(DDP, "enable_forward_pre_hook", "disable_forward_pre_hook", "_make_forward_pre_hook", "start_param_sync")
    need_parameters(DDP.enable_forward_pre_hook, "self")
    need_parameters(DDP.disable_forward_pre_hook, "self", "param_sync")
    ddp = wrap_ddp(nn.Identity())
    need(ddp, "remove_forward_pre_hook_handles", "use_forward_hook")
    if list(ddp.remove_forward_pre_hook_handles) != [ddp.module]:
        raise CannotRepair("remove_forward_pre_hook_handles is not a dictionary from modules to handles")
    return [
        Patch(DDP, "enable_forward_pre_hook", wraps(DDP.enable_forward_pre_hook)(enable_forward_pre_hook)),
        Patch(DDP, "disable_forward_pre_hook", wraps(DDP.disable_forward_pre_hook)(disable_forward_pre_hook)),
    ]


FORWARD_HOOKS = Repair(
    name="forward-pre-hooks",
    symptom=(
        "AssertionError from `assert len(self.remove_forward_pre_hook_handles) == 0`, or a KeyError that prints the "
        "whole model, in enable_forward_pre_hook or disable_forward_pre_hook"
    ),
    reason=(
        "Handles are looked up by walking the current module tree, but CUDA graph managers are modules that come and "
        "go, and disabling twice finds no handle. The all-gather that was asked for is then skipped."
    ),
    try_it=probe,
    plan=plan,
)
