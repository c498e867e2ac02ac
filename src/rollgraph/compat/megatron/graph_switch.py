"""Repairs toggle_cuda_graphs: it pauses hooks, switches every graph manager of a module, and really resets state."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from rollgraph.compat.megatron.forward_hooks import find_owners, hooks_paused
from rollgraph.compat.megatron.patch import Patch, closure_values, need, need_names, need_parameters, swapped
from rollgraph.compat.megatron.probe_objects import make_config, wrap_ddp
from rollgraph.compat.megatron.repair import Repair, Verdict, verdict_on

PARKED = "_rollgraph_parked_managers"


@dataclass(frozen=True)
class Parked:
    """A graph manager that is outside of the tree while graphs are off."""

    attribute: str  # such as cudagraph_manager_router
    manager: Any
    function: str | None  # such as _forward_mlp_router; None for a manager of the whole module
    wrapper: Any = None  # calls the manager in place of the function


def park_managers(model: nn.Module) -> None:
    """Take all managers out of the tree, and give modules their unwrapped functions back."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    module: Any
    manager: Any
    for module in list(model.modules()):
        for attribute, manager in list(module._modules.items()):
            if not isinstance(manager, CudaGraphManager):
                continue
            delattr(module, attribute)
            others = [parked for parked in vars(module).get(PARKED, ()) if parked.attribute != attribute]
            vars(module)[PARKED] = [*others, unwrap(module, attribute, manager)]


def unwrap(module: Any, attribute: str, manager: Any) -> Parked:
    function = find_wrapped(module, manager)
    if function is None:
        return Parked(attribute, manager, None)
    wrapper = vars(module)[function]
    if getattr(manager.func, "__self__", None) is module:
        delattr(module, function)
    else:
        setattr(module, function, manager.func)
    if getattr(module, "use_partial_cudagraphs", False):
        run_whole(module)
    return Parked(attribute, manager, function, wrapper)


def run_whole(layer: Any) -> None:
    """Run a mixture-of-experts layer as a whole again. Generation refuses a layer that runs in parts."""
    layer.use_partial_cudagraphs = False
    if hasattr(layer.mlp, "fwd_execution_map"):  # still set to the last part
        layer.mlp.fwd_execution_map = ["route", "expert_compute", "postprocess"]


def run_in_parts(layer: Any) -> None:
    if hasattr(layer, "use_partial_cudagraphs"):
        layer.use_partial_cudagraphs = True


def unpark_managers(model: nn.Module, anew: bool) -> None:
    """Put the parked managers back or, with `anew`, make new ones where Megatron has not."""
    module: Any
    for module in list(model.modules()):
        parking = vars(module).get(PARKED, [])
        while parking:
            parked = parking[-1]
            if not anew:
                put_back(module, parked)
            elif not hasattr(module, parked.attribute):
                make_anew(module, parked)
            parking.pop()
        vars(module).pop(PARKED, None)


def put_back(module: Any, parked: Parked) -> None:
    """Put a manager back, also over the one that Megatron restored, which is the first the module ever had."""
    if parked.function is not None:
        setattr(module, parked.function, parked.wrapper)
        run_in_parts(module)
    setattr(module, parked.attribute, parked.manager)


def make_anew(module: Any, parked: Parked) -> None:
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    need_backward = parked.manager.need_backward
    if parked.function is None:
        manager = CudaGraphManager(module.config, need_backward=need_backward)
    else:
        manager = CudaGraphManager(
            module.config, base_module=module, function_name=parked.function, need_backward=need_backward
        )
    setattr(module, parked.attribute, manager)
    if parked.function is not None:
        run_in_parts(module)


def release_parked() -> None:
    """Leave everything as the unpatched function expects it: it parks only managers of whole modules, in its cache."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and PARKED in vars(thing)]
    for module in modules:
        parking = vars(module).pop(PARKED)
        with hooks_paused(find_owners(module)):
            for parked in parking:
                if parked.function is not None:
                    put_back(module, parked)


def list_managers(module: nn.Module) -> list[Any]:
    """The managers of this module, in the tree or parked."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    inside = [child for child in module._modules.values() if isinstance(child, CudaGraphManager)]
    return [*inside, *(parked.manager for parked in vars(module).get(PARKED, ()))]


def find_wrapped(module: nn.Module, manager: Any) -> str | None:
    """The name of the module's function that is wrapped to call the manager."""
    for name, value in vars(module).items():
        if any(held is manager for held in closure_values(value)):
            return name
    return None


def drop_stale_cache(model: nn.Module) -> None:
    """Drop Megatron's cache entry of a dead model: the cache is keyed by id(model), which a later model can reuse."""
    from megatron.core.transformer import utils

    cached = (utils.cuda_graph_attr_cache or {}).get(id(model), {})
    modules = set(model.modules())
    if any(module not in modules for module, _ in cached.get("cudagraph_manager", ())):
        del utils.cuda_graph_attr_cache[id(model)]


def plan() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs, utils

    need(utils, "toggle_cuda_graphs", "init_cuda_graph_cache", "cuda_graph_attr_cache")
    need(cuda_graphs, "CudaGraphManager", "delete_cuda_graphs", "_CudagraphGlobalRecord")
    need(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created")
    original = utils.toggle_cuda_graphs
    need_parameters(original, "model", "set_to", "reset_cuda_graphs")
    constructor = cuda_graphs.CudaGraphManager.__init__
    need_parameters(constructor, "self", "config", "base_module", "function_name", "need_backward")
    need_names(constructor, "func", "need_backward")

    @wraps(original)
    def toggle_cuda_graphs(model: Any, set_to: str = "none", reset_cuda_graphs: bool = True) -> None:
        drop_stale_cache(model)
        utils.init_cuda_graph_cache(model)  # while the managers are still in the tree
        before = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        was_on = any(isinstance(module, cuda_graphs.CudaGraphManager) for module in model.modules())
        with hooks_paused(find_owners(model)):
            try:
                park_managers(model)  # even if graphs stay on: Megatron would restore the first managers it saw
                if set_to == "local" and reset_cuda_graphs and cuda_graphs._CudagraphGlobalRecord.cudagraph_created:
                    cuda_graphs.delete_cuda_graphs()  # or new managers are asked to replay graphs they do not have
                original(model, set_to, reset_cuda_graphs)
                if set_to == "local":
                    unpark_managers(model, anew=reset_cuda_graphs)
            except BaseException:
                if was_on:
                    unpark_managers(model, anew=False)
                else:
                    park_managers(model)  # the managers that were made before the failure
                raise
        # The first new manager changes the current stream, and nothing makes that wait for the work in progress.
        if before is not None and torch.cuda.current_stream() != before:
            torch.cuda.current_stream().wait_stream(before)

    return [Patch(utils, "toggle_cuda_graphs", toggle_cuda_graphs, everywhere=True)]


def probe() -> Verdict:
    from megatron.core.transformer import utils
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    need(utils, "cuda_graph_attr_cache")
    model, ddp = make_switchable()
    with swapped(utils, cuda_graph_attr_cache=None):
        utils.toggle_cuda_graphs(model, "none", reset_cuda_graphs=False)
    failures = []
    if any(isinstance(module, CudaGraphManager) for module in model.modules()):
        failures.append("graph managers not called cudagraph_manager stay")
    try:
        ddp.disable_forward_pre_hook(param_sync=False)
    except (AssertionError, KeyError) as error:
        failures.append(f"hooks cannot be disabled afterwards: {type(error).__name__}")
    return verdict_on(failures)


def make_switchable() -> tuple[nn.Module, Any]:
    """A module with both kinds of graph manager, inside a DDP."""
    from megatron.core.transformer.module import MegatronModule

    module = MegatronModule(make_config())
    module.cudagraph_manager = make_manager()
    module.cudagraph_manager_router = manager = make_manager()
    manager.func = module.state_dict_for_save_checkpoint  # any method

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return manager(module, args, kwargs)

    module.state_dict_for_save_checkpoint = wrapped
    return module, wrap_ddp(module)


def make_manager() -> Any:
    """A manager made without its constructor, which needs a GPU and sets the process's RNG tracker."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    manager = CudaGraphManager.__new__(CudaGraphManager)
    nn.Module.__init__(manager)
    return manager


GRAPH_SWITCH = Repair(
    name="switching-graphs",
    symptom=(
        "after toggle_cuda_graphs, AssertionError or KeyError in disable_forward_pre_hook; `AssertionError: Partial "
        "cudagraphs for MoEs were detected during inference!`; `cudagraph_created` is set to True but no matching "
        "cudagraph runners were found"
    ),
    reason=(
        "toggle_cuda_graphs removes and replaces modules that DDP's hooks are on, knows only one of the three "
        "attributes that hold graph managers, and makes new managers while the old graphs still count as created."
    ),
    try_it=probe,
    plan=plan,
    clean=release_parked,
)
