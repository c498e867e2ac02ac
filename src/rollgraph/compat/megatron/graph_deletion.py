"""Repairs delete_cuda_graphs: runners whose graphs it deletes record and capture again instead of staying eager."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.graph_switch import list_managers
from rollgraph.compat.megatron.patch import Patch, kept, need, need_names, need_parameters, swapped
from rollgraph.compat.megatron.probe_objects import GcStandIn, make_runner
from rollgraph.compat.megatron.repair import Repair, Verdict

RUNNER_STATE = {
    "cudagraph_created": False,
    "fwd_graph_recorded": False,
    "bwd_graph_recorded": False,
    "fwd_graph": None,
    "bwd_graph": None,
}


def forget_graphs(runner: Any) -> None:
    """Make the runner record again. A manager with one runner per microbatch drops it and makes a new one."""
    for name, value in RUNNER_STATE.items():
        setattr(runner, name, value)
    for manager in list_managers(runner.base_module):
        if not manager.reuse_cudagraphs:
            manager.cudagraph_runners = [kept for kept in manager.cudagraph_runners if kept is not runner]


def plan() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    need(cuda_graphs, "_CudagraphGlobalRecord", "CudaGraphManager", "delete_cuda_graphs")
    need(cuda_graphs._CudagraphGlobalRecord, "record_fwd_graph", "cudagraph_created", "cudagraph_record")
    need(cuda_graphs.CudaGraphManager, "global_mempool")
    need(make_runner(), *RUNNER_STATE, "mempool", "base_module")
    need_names(cuda_graphs.CudaGraphManager.__init__, "cudagraph_runners", "reuse_cudagraphs")
    record = cuda_graphs._CudagraphGlobalRecord.record_fwd_graph.__func__
    delete = cuda_graphs.delete_cuda_graphs
    need_parameters(record, "cls", "runner", "args", "kwargs", "out")
    need_parameters(delete)
    recorded: WeakSet[Any] = WeakSet(find_runners())  # Megatron empties its own list when it creates the graphs

    @wraps(record)
    def record_fwd_graph(cls: Any, runner: Any, args: Any, kwargs: Any, out: Any) -> None:
        recorded.add(runner)
        if runner.mempool is None and torch.cuda.is_initialized():
            manager = cuda_graphs.CudaGraphManager
            if manager.global_mempool is None:  # deleted, and otherwise renewed only with a new manager
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


def probe() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    record = cuda_graphs._CudagraphGlobalRecord
    if record.cudagraph_created or record.cudagraph_record or record.cudagraph_inference_record:
        reason = "this process has CUDA graphs, which the probe would delete; run it before the first capture"
        return Verdict(RepairState.UNKNOWN, reason)
    names = ("cudagraph_created", "cudagraph_record", "cudagraph_inference_record")
    with (
        kept(record, *names),
        kept(cuda_graphs.CudaGraphManager, "global_mempool"),
        swapped(cuda_graphs, gc=GcStandIn()),
        torch.no_grad(),
    ):
        record.cudagraph_record = []
        runner = make_runner()
        runner.record_graph_capture((torch.zeros(2),), {})
        # The state that create_cudagraphs leaves after a capture.
        runner.cudagraph_created = record.cudagraph_created = True
        record.cudagraph_record = []
        cuda_graphs.delete_cuda_graphs()
        runner.record_graph_capture((torch.zeros(2),), {})
        if record.cudagraph_record:
            return Verdict(RepairState.CLEAR)
    return Verdict(RepairState.AFFECTED, "a runner whose graphs were deleted does not record again")


def find_runners() -> list[Any]:
    """The runners made before the repair, which Megatron lists nowhere."""
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    return [thing for thing in gc.get_objects() if issubclass(type(thing), _CudaGraphRunner)]


GRAPH_DELETION = Repair(
    name="deleted-graphs",
    symptom="no error: after delete_cuda_graphs, or an inference engine's suspend(), training stays eager forever",
    reason=(
        "delete_cuda_graphs resets the runners in a list that create_cudagraphs has emptied. Runners whose graphs "
        "exist keep them and count as recorded, so nothing is captured again."
    ),
    try_it=probe,
    plan=plan,
)
