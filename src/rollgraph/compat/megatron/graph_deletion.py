"""delete_cuda_graphs for runners whose graphs exist: they record and capture again instead of staying eager."""

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
    """The runner records again. Where every microbatch has its own, new ones are made, and it is not asked any more."""
    for name, value in RUNNER_STATE.items():
        setattr(runner, name, value)
    for manager in list_managers(runner.base_module):
        if not manager.reuse_cudagraphs:
            manager.cudagraph_runners = [other for other in manager.cudagraph_runners if other is not runner]


def plan() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    need(cuda_graphs, "_CudagraphGlobalRecord", "CudaGraphManager", "delete_cuda_graphs")
    need(cuda_graphs._CudagraphGlobalRecord, "record_fwd_graph", "cudagraph_created", "cudagraph_record")
    need(cuda_graphs.CudaGraphManager, "global_mempool")
    need(make_runner(), *RUNNER_STATE, "mempool", "base_module")
    need_names(cuda_graphs.CudaGraphManager.__init__, "cudagraph_runners", "reuse_cudagraphs")
    record, delete = cuda_graphs._CudagraphGlobalRecord.record_fwd_graph.__func__, cuda_graphs.delete_cuda_graphs
    need_parameters(record, "cls", "runner", "args", "kwargs", "out")
    need_parameters(delete)
    recorded: WeakSet[Any] = WeakSet(find_runners())  # their own list is emptied when the graphs are created

    @wraps(record)
    def record_fwd_graph(cls: Any, runner: Any, args: Any, kwargs: Any, out: Any) -> None:
        recorded.add(runner)
        if runner.mempool is None and torch.cuda.is_initialized():
            manager = cuda_graphs.CudaGraphManager
            if manager.global_mempool is None:  # deleted; only the making of a manager would renew it
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
        return Verdict(
            RepairState.UNKNOWN, "this process has CUDA graphs, which trying would delete; ask before the first"
        )
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
        # What create_cudagraphs leaves after a capture.
        runner.cudagraph_created = record.cudagraph_created = True
        record.cudagraph_record = []
        cuda_graphs.delete_cuda_graphs()
        runner.record_graph_capture((torch.zeros(2),), {})
        if record.cudagraph_record:
            return Verdict(RepairState.CLEAR)
    return Verdict(RepairState.AFFECTED, "a runner whose graphs were deleted does not record again")


def find_runners() -> list[Any]:
    """Those made before the repair: nothing of theirs lists them."""
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    return [thing for thing in gc.get_objects() if issubclass(type(thing), _CudaGraphRunner)]


GRAPH_DELETION = Repair(
    name="deleted-graphs",
    symptom="no error: after delete_cuda_graphs, or an inference engine's suspend(), training stays eager for ever",
    reason=(
        "delete_cuda_graphs resets the runners in a list that create_cudagraphs has emptied. Those whose graphs "
        "exist keep them, and count as recorded, so that nothing is captured again."
    ),
    try_it=probe,
    plan=plan,
)
