"""The repair of DDP's forward pre-hooks: hooks are found through their handles, never by walking the module tree."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from rollgraph.compat.megatron.repair import (
    CannotRepair,
    Patch,
    Repair,
    Verdict,
    closure_values,
    require_attributes,
    require_parameters,
    verdict_from,
    wrap_ddp,
)

# -- the repair ------------------------------------------------------------------------------------


def add_hooks(ddp: Any) -> None:
    """Add a hook to every module without one, and remove the hooks of modules that are no longer in the tree."""
    handles = ddp.remove_forward_pre_hook_handles
    modules = list(ddp.module.modules())
    for removed_module in handles.keys() - set(modules):
        handles.pop(removed_module).remove()
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
def pause_hooks(ddps: Iterable[Any]) -> Iterator[None]:
    """Remove all hooks inside. Afterwards, DDPs that had hooks get them on the modules that are in the tree by then."""
    with preserve_hooks(ddps) as all_ddps:
        for ddp in all_ddps:
            remove_hooks(ddp)
        yield


@contextmanager
def preserve_hooks(ddps: Iterable[Any]) -> Iterator[list[Any]]:
    """Restore the hooks afterwards, whatever is enabled or disabled inside. Does not gather parameters."""
    hooks_before: dict[Any, dict[Any, set[int]] | None] = {}
    for ddp in ddps:
        hooks_before[ddp] = list_preceding_hooks(ddp) if has_hooks(ddp) else None
    try:
        yield list(hooks_before)
    finally:
        for ddp, preceding in hooks_before.items():
            if preceding is None:
                remove_hooks(ddp)
            else:
                add_hooks(ddp)
                restore_order(ddp, preceding)


def list_preceding_hooks(ddp: Any) -> dict[Any, set[int]]:
    """For each module, the ids of the hooks that run before the DDP's hook, which gathers parameters for later ones."""
    preceding: dict[Any, set[int]] = {}
    for module, handle in ddp.remove_forward_pre_hook_handles.items():
        ids = list(module._forward_pre_hooks)
        position = ids.index(handle.id) if handle.id in ids else len(ids)
        preceding[module] = set(ids[:position])
    return preceding


def restore_order(ddp: Any, preceding: dict[Any, set[int]]) -> None:
    for module, handle in ddp.remove_forward_pre_hook_handles.items():
        if module in preceding:
            hooks = module._forward_pre_hooks
            for key in list(hooks):
                if key != handle.id and key not in preceding[module]:
                    hooks.move_to_end(key)


def find_ddps(model: nn.Module) -> list[Any]:
    """The DDPs whose hooks are on the model's modules. A module does not know its DDP, but the hook's closure does."""
    ddps: dict[Any, None] = {}  # a set that keeps its order
    for module in model.modules():
        candidates = [module]
        for hook in module._forward_pre_hooks.values():
            candidates += closure_values(hook)
        for candidate in candidates:
            if overlaps_gather(candidate):
                ddps[candidate] = None
    return list(ddps)


def overlaps_gather(module: Any) -> bool:
    """Whether this is a DDP with `overlap_param_gather`: only those have forward pre-hooks."""
    return isinstance(module, nn.Module) and bool(getattr(module, "use_forward_hook", False))


def probe_hooks() -> Verdict:
    failures = []
    for what, attempt in ATTEMPTS.items():
        ddp = wrap_ddp(nn.Sequential(nn.Identity(), nn.Identity()))
        try:
            attempt(ddp)
        except (AssertionError, KeyError) as error:
            failures.append(f"{what}: {type(error).__name__}")
    return verdict_from(failures)


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


def make_hook_patches() -> list[Patch]:
    from megatron.core.distributed import DistributedDataParallel as DDP

    require_attributes(
        DDP, "enable_forward_pre_hook", "disable_forward_pre_hook", "_make_forward_pre_hook", "start_param_sync"
    )
    require_parameters(DDP.enable_forward_pre_hook, "self")
    require_parameters(DDP.disable_forward_pre_hook, "self", "param_sync")
    ddp = wrap_ddp(nn.Identity())
    require_attributes(ddp, "remove_forward_pre_hook_handles", "use_forward_hook")
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
        "go, and disabling twice finds no handle. The requested all-gather is then skipped."
    ),
    run_probe=probe_hooks,
    make_patches=make_hook_patches,
)


# -- chunks of a model -----------------------------------------------------------------------------

Model = nn.Module | Sequence[nn.Module]


def list_chunks(model: Model) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def list_hooked_ddps(model: Model) -> list[Any]:
    """The DDPs of the chunks that have forward pre-hooks, enabled or not: the chunks themselves, or around them."""
    ddps: dict[Any, None] = {}  # a set that keeps its order
    for chunk in list_chunks(model):
        for ddp in find_ddps(chunk) or find_enclosing_ddps(chunk):
            require_attributes(ddp, "remove_forward_pre_hook_handles", "start_param_sync")
            ddps[ddp] = None
    return list(ddps)


def find_enclosing_ddps(chunk: nn.Module) -> list[Any]:
    """The DDPs that contain a module, for when their hooks are off and do not lead to them.

    A module does not know its parents, so this searches all objects.
    """
    if not any(hasattr(parameter, "main_grad") for parameter in chunk.parameters()):  # set by a DDP
        return []
    ddps = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), nn.Module)  # `isinstance` would ask proxies for their `__class__`
        and overlaps_gather(candidate)
    ]
    return [ddp for ddp in ddps if any(module is chunk for module in ddp.modules())]
