"""Repairs of CUDA graph managers: toggle_cuda_graphs switches all of them, and after delete_cuda_graphs they capture
again.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.forward_hooks import find_ddps, pause_hooks
from rollgraph.compat.megatron.repair import (
    GcStandIn,
    Patch,
    Repair,
    Verdict,
    closure_values,
    make_config,
    make_runner,
    patch_attributes,
    preserve_attributes,
    require_attributes,
    require_names_in_code,
    require_parameters,
    verdict_from,
    wrap_ddp,
)

# -- toggle_cuda_graphs ----------------------------------------------------------------------------

PARKED = "_rollgraph_parked_managers"


@dataclass(frozen=True)
class ParkedManager:
    """A graph manager that is taken out of the module tree while graphs are off."""

    attribute: str  # such as cudagraph_manager_router
    manager: Any
    function: str | None  # such as _forward_mlp_router; None for a manager of the whole module
    wrapper: Any = None  # replaces the function and calls the manager


def park_managers(model: nn.Module) -> None:
    """Take all managers out of the tree, and restore the functions of modules that they wrap."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    module: Any
    manager: Any
    for module in list(model.modules()):
        for attribute, manager in list(module._modules.items()):
            if not isinstance(manager, CudaGraphManager):
                continue
            delattr(module, attribute)
            still_parked = [parked for parked in vars(module).get(PARKED, ()) if parked.attribute != attribute]
            vars(module)[PARKED] = [*still_parked, unwrap_manager(module, attribute, manager)]


def unwrap_manager(module: Any, attribute: str, manager: Any) -> ParkedManager:
    function = find_wrapped_function(module, manager)
    if function is None:
        return ParkedManager(attribute, manager, None)
    wrapper = vars(module)[function]
    if getattr(manager.func, "__self__", None) is module:
        delattr(module, function)
    else:
        setattr(module, function, manager.func)
    if getattr(module, "use_partial_cudagraphs", False):
        disable_partial_graphs(module)
    return ParkedManager(attribute, manager, function, wrapper)


def disable_partial_graphs(layer: Any) -> None:
    """Run a mixture-of-experts layer as a whole. Generation refuses a layer with partial CUDA graphs."""
    layer.use_partial_cudagraphs = False
    if hasattr(layer.mlp, "fwd_execution_map"):  # it still lists only the last part
        layer.mlp.fwd_execution_map = ["route", "expert_compute", "postprocess"]


def enable_partial_graphs(layer: Any) -> None:
    if hasattr(layer, "use_partial_cudagraphs"):
        layer.use_partial_cudagraphs = True


def unpark_managers(model: nn.Module, rebuild: bool) -> None:
    """Restore the parked managers or, with `rebuild`, make new ones where Megatron has not made any."""
    module: Any
    for module in list(model.modules()):
        parking = vars(module).get(PARKED, [])
        while parking:
            parked = parking[-1]
            if not rebuild:
                restore_manager(module, parked)
            elif not hasattr(module, parked.attribute):
                rebuild_manager(module, parked)
            parking.pop()
        vars(module).pop(PARKED, None)


def restore_manager(module: Any, parked: ParkedManager) -> None:
    """Restore a manager. It replaces the one that Megatron may have restored: the first that the module ever had."""
    if parked.function is not None:
        setattr(module, parked.function, parked.wrapper)
        enable_partial_graphs(module)
    setattr(module, parked.attribute, parked.manager)


def rebuild_manager(module: Any, parked: ParkedManager) -> None:
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
        enable_partial_graphs(module)


def release_parked() -> None:
    """Restore the state that the unpatched function expects: it only removes managers of whole modules itself."""
    modules = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), nn.Module) and PARKED in vars(candidate)
    ]
    for module in modules:
        parking = vars(module).pop(PARKED)
        with pause_hooks(find_ddps(module)):
            for parked in parking:
                if parked.function is not None:
                    restore_manager(module, parked)


def list_managers(module: nn.Module) -> list[Any]:
    """The managers of this module, parked or not."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    in_tree = [child for child in module._modules.values() if isinstance(child, CudaGraphManager)]
    return [*in_tree, *(parked.manager for parked in vars(module).get(PARKED, ()))]


def find_wrapped_function(module: nn.Module, manager: Any) -> str | None:
    """The name of the module's function that the manager wraps; None if it captures the whole module."""
    for name, value in vars(module).items():
        if any(cell_value is manager for cell_value in closure_values(value)):
            return name
    return None


def drop_stale_cache(model: nn.Module) -> None:
    """Drop a dead model's entry from Megatron's cache, whose keys are id(model), which a later model can reuse."""
    from megatron.core.transformer import utils

    cached = (utils.cuda_graph_attr_cache or {}).get(id(model), {})
    modules = set(model.modules())
    if any(module not in modules for module, _ in cached.get("cudagraph_manager", ())):
        del utils.cuda_graph_attr_cache[id(model)]


def make_switch_patches() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs, utils

    require_attributes(utils, "toggle_cuda_graphs", "init_cuda_graph_cache", "cuda_graph_attr_cache")
    require_attributes(cuda_graphs, "CudaGraphManager", "delete_cuda_graphs", "_CudagraphGlobalRecord")
    require_attributes(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created")
    original = utils.toggle_cuda_graphs
    require_parameters(original, "model", "set_to", "reset_cuda_graphs")
    constructor = cuda_graphs.CudaGraphManager.__init__
    require_parameters(constructor, "self", "config", "base_module", "function_name", "need_backward")
    require_names_in_code(constructor, "func", "need_backward")

    @wraps(original)
    def toggle_cuda_graphs(model: Any, set_to: str = "none", reset_cuda_graphs: bool = True) -> None:
        drop_stale_cache(model)
        utils.init_cuda_graph_cache(model)  # while the managers are still in the tree
        before = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        was_on = any(isinstance(module, cuda_graphs.CudaGraphManager) for module in model.modules())
        with pause_hooks(find_ddps(model)):
            try:
                park_managers(model)  # even if graphs stay on: Megatron would restore the first managers that it saw
                if set_to == "local" and reset_cuda_graphs and cuda_graphs._CudagraphGlobalRecord.cudagraph_created:
                    cuda_graphs.delete_cuda_graphs()  # otherwise new managers try to replay graphs that they lack
                original(model, set_to, reset_cuda_graphs)
                if set_to == "local":
                    unpark_managers(model, rebuild=reset_cuda_graphs)
            except BaseException:
                if was_on:
                    unpark_managers(model, rebuild=False)
                else:
                    park_managers(model)  # managers that were made before the failure
                raise
        # The first new manager changes the current stream without making it wait for work in progress.
        if before is not None and torch.cuda.current_stream() != before:
            torch.cuda.current_stream().wait_stream(before)

    return [Patch(utils, "toggle_cuda_graphs", toggle_cuda_graphs, everywhere=True)]


def probe_switch() -> Verdict:
    from megatron.core.transformer import utils
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    require_attributes(utils, "cuda_graph_attr_cache")
    model, ddp = make_probe_model()
    with patch_attributes(utils, cuda_graph_attr_cache=None):
        utils.toggle_cuda_graphs(model, "none", reset_cuda_graphs=False)
    failures = []
    if any(isinstance(module, CudaGraphManager) for module in model.modules()):
        failures.append("graph managers not called cudagraph_manager stay")
    try:
        ddp.disable_forward_pre_hook(param_sync=False)
    except (AssertionError, KeyError) as error:
        failures.append(f"hooks cannot be disabled afterwards: {type(error).__name__}")
    return verdict_from(failures)


def make_probe_model() -> tuple[nn.Module, Any]:
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
    """A manager without a constructor call: that needs a GPU and sets the process's RNG tracker."""
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
        "toggle_cuda_graphs removes and replaces modules with DDP's hooks on them, knows only one of the three "
        "attributes that hold graph managers, and makes new managers while the old graphs still count as created."
    ),
    run_probe=probe_switch,
    make_patches=make_switch_patches,
    cleanup=release_parked,
)


# -- delete_cuda_graphs ----------------------------------------------------------------------------

RUNNER_STATE = {
    "cudagraph_created": False,
    "fwd_graph_recorded": False,
    "bwd_graph_recorded": False,
    "fwd_graph": None,
    "bwd_graph": None,
}


def forget_graphs(runner: Any) -> None:
    """Make the runner record again. A manager with one runner per microbatch drops it, and later makes a new one."""
    for name, value in RUNNER_STATE.items():
        setattr(runner, name, value)
    for manager in list_managers(runner.base_module):
        if not manager.reuse_cudagraphs:
            manager.cudagraph_runners = [listed for listed in manager.cudagraph_runners if listed is not runner]


def make_deletion_patches() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    require_attributes(cuda_graphs, "_CudagraphGlobalRecord", "CudaGraphManager", "delete_cuda_graphs")
    require_attributes(cuda_graphs._CudagraphGlobalRecord, "record_fwd_graph", "cudagraph_created", "cudagraph_record")
    require_attributes(cuda_graphs.CudaGraphManager, "global_mempool")
    require_attributes(make_runner(), *RUNNER_STATE, "mempool", "base_module")
    require_names_in_code(cuda_graphs.CudaGraphManager.__init__, "cudagraph_runners", "reuse_cudagraphs")
    record = cuda_graphs._CudagraphGlobalRecord.record_fwd_graph.__func__
    delete = cuda_graphs.delete_cuda_graphs
    require_parameters(record, "cls", "runner", "args", "kwargs", "out")
    require_parameters(delete)
    recorded: WeakSet[Any] = WeakSet(find_runners())  # Megatron empties its own list when it creates the graphs

    @wraps(record)
    def record_fwd_graph(cls: Any, runner: Any, args: Any, kwargs: Any, out: Any) -> None:
        recorded.add(runner)
        if runner.mempool is None and torch.cuda.is_initialized():
            manager = cuda_graphs.CudaGraphManager
            if manager.global_mempool is None:  # deleted, and Megatron only renews it with a new manager
                manager.global_mempool = torch.cuda.graph_pool_handle()
            runner.mempool = manager.global_mempool
        record(cls, runner, args, kwargs, out)

    @wraps(delete)
    def delete_cuda_graphs() -> None:
        for runner in list(recorded):
            forget_graphs(runner)
            runner.mempool = None
        delete()

    return [
        Patch(cuda_graphs._CudagraphGlobalRecord, "record_fwd_graph", classmethod(record_fwd_graph)),
        Patch(cuda_graphs, "delete_cuda_graphs", delete_cuda_graphs, everywhere=True),
    ]


def probe_deletion() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    record = cuda_graphs._CudagraphGlobalRecord
    if record.cudagraph_created or record.cudagraph_record or record.cudagraph_inference_record:
        reason = "this process has CUDA graphs, which the probe would delete; run it before the first capture"
        return Verdict(RepairState.UNKNOWN, reason)
    names = ("cudagraph_created", "cudagraph_record", "cudagraph_inference_record")
    with (
        preserve_attributes(record, *names),
        preserve_attributes(cuda_graphs.CudaGraphManager, "global_mempool"),
        patch_attributes(cuda_graphs, gc=GcStandIn()),
        torch.no_grad(),
    ):
        record.cudagraph_record = []
        runner = make_runner()
        runner.record_graph_capture((torch.zeros(2),), {})
        # The state after create_cudagraphs.
        runner.cudagraph_created = record.cudagraph_created = True
        record.cudagraph_record = []
        cuda_graphs.delete_cuda_graphs()
        runner.record_graph_capture((torch.zeros(2),), {})
        if record.cudagraph_record:
            return Verdict(RepairState.CLEAR)
    return Verdict(RepairState.AFFECTED, "a runner whose graphs were deleted does not record again")


def find_runners() -> list[Any]:
    """The runners made before the repair. Megatron keeps no list of them."""
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), _CudaGraphRunner)]


GRAPH_DELETION = Repair(
    name="deleted-graphs",
    symptom="no error: after delete_cuda_graphs, or an inference engine's suspend(), training stays eager forever",
    reason=(
        "delete_cuda_graphs resets the runners in a list that create_cudagraphs has emptied. Runners with graphs keep "
        "them and count as recorded, so nothing is captured again."
    ),
    run_probe=probe_deletion,
    make_patches=make_deletion_patches,
)
