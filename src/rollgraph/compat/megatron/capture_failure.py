"""A capture that raises leaves no flag behind: DDP's hooks return early while one says that a capture is under way."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any

import torch

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.graph_deletion import RUNNER_STATE, forget_graphs
from rollgraph.compat.megatron.patch import Patch, kept, need, need_names, need_parameters, swapped
from rollgraph.compat.megatron.probe_objects import GcStandIn, TorchStandIn, make_runner
from rollgraph.compat.megatron.repair import Repair, Verdict

FLAGS = ("_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP")
COUNTERS = ("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count")  # a later capture asserts that they are 0


def end_capture(cuda_graphs: Any) -> None:
    cuda_graphs._set_capture_end()
    cuda_graphs._IS_GRAPH_WARMUP = False
    if cuda_graphs.HAVE_TE_GRAPHS:
        cuda_graphs.te_set_capture_end()
    if cuda_graphs.FREEZE_GC:
        gc.unfreeze()


def plan() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    need(cuda_graphs, *FLAGS, *COUNTERS, "_set_capture_end", "is_graph_capturing", "HAVE_TE_GRAPHS", "FREEZE_GC")
    need(cuda_graphs, "_CudagraphGlobalRecord", "_CudaGraphRunner", "CudaGraphManager", "TECudaGraphHelper")
    record, runner, helper = (
        cuda_graphs._CudagraphGlobalRecord,
        cuda_graphs._CudaGraphRunner,
        cuda_graphs.TECudaGraphHelper,
    )
    need(record, "create_cudagraphs", "cudagraph_record")
    need(runner, "create_fwd_graph")
    need(helper, "create_cudagraphs")
    need(make_runner(), *RUNNER_STATE, "base_module")
    need_names(cuda_graphs.CudaGraphManager.__init__, "cudagraph_runners", "reuse_cudagraphs")
    if cuda_graphs.HAVE_TE_GRAPHS:
        need(cuda_graphs, "te_set_capture_end")
    create_all, create_forward, create_with_te = (
        record.create_cudagraphs.__func__,
        runner.create_fwd_graph,
        helper.create_cudagraphs,
    )
    need_parameters(create_all, "cls")
    need_parameters(create_with_te, "self")

    @wraps(create_all)
    def create_cudagraphs(cls: Any) -> Any:
        counts = {name: getattr(cuda_graphs, name) for name in COUNTERS}
        try:
            return create_all(cls)
        except BaseException:
            if cuda_graphs.is_graph_capturing():
                end_capture(cuda_graphs)
                vars(cuda_graphs).update(counts)
                for entry in cls.cudagraph_record:  # half of them captured: the next step records all anew
                    forget_graphs(entry[0])
                cls.cudagraph_record = []
            raise

    @wraps(create_forward)
    def create_fwd_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return create_forward(self, *args, **kwargs)
        finally:
            # _set_warmup_end of 0.16.1 forgets to, also without a failure. Not as early as that is called: a captured
            # layer that recomputes its norms gets no gradients for them, which are in none of the graph's outputs.
            cuda_graphs._IS_GRAPH_WARMUP = False

    @wraps(create_with_te)
    def create_cudagraphs_with_te(self: Any) -> Any:
        try:
            return create_with_te(self)
        except BaseException:
            if cuda_graphs.is_graph_capturing():
                end_capture(cuda_graphs)
            raise

    return [
        Patch(record, "create_cudagraphs", classmethod(create_cudagraphs)),
        Patch(runner, "create_fwd_graph", create_fwd_graph),
        Patch(helper, "create_cudagraphs", create_cudagraphs_with_te),
    ]


class CaptureFailed(Exception):
    pass


def fail(*args: Any, **kwargs: Any) -> None:
    raise CaptureFailed


def probe() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        return Verdict(RepairState.UNKNOWN, "a capture is under way, or has failed before")
    with kept(cuda_graphs, *FLAGS, *COUNTERS), swapped(cuda_graphs, torch=TorchStandIn(), gc=GcStandIn()):
        failures = [*try_failing(cuda_graphs), *try_succeeding(cuda_graphs)]
    return Verdict(RepairState.AFFECTED, "; ".join(failures)) if failures else Verdict(RepairState.CLEAR)


def try_failing(cuda_graphs: Any) -> list[str]:
    """A capture in which the first graph raises, by way of the real create_cudagraphs."""
    record, runner = cuda_graphs._CudagraphGlobalRecord, make_runner()
    runner.create_fwd_graph = fail
    with kept(record, "cudagraph_created", "cudagraph_record"):
        record.cudagraph_created, record.cudagraph_record = False, [(runner, "fwd", (), {}, None)]
        try:
            cuda_graphs.create_cudagraphs()
        except CaptureFailed:
            return ["is_graph_capturing() stays True"] if cuda_graphs.is_graph_capturing() else []
    raise RuntimeError("create_cudagraphs did not come to the failing graph")


def try_succeeding(cuda_graphs: Any) -> list[str]:
    """One graph, by way of the real create_fwd_graph."""
    cuda_graphs._IS_GRAPH_WARMUP = False
    with swapped(cuda_graphs, get_all_rng_states=dict, FREEZE_GC=False), torch.no_grad():
        runner = make_runner()
        runner.create_fwd_graph((torch.zeros(2),), {}, ())
    return ["is_graph_warmup() stays True"] if cuda_graphs.is_graph_warmup() else []


CAPTURE_FAILURE = Repair(
    name="capture-failure",
    symptom=(
        "after a capture that raised: gradients are not reduced and parameters not gathered, without an error, or "
        "`AssertionError: Communication call has not been issued for this bucket`"
    ),
    reason=(
        "create_cudagraphs sets _IS_GRAPH_CAPTURING and resets it only when nothing raises; DDP's hooks return at "
        "once while it is set. _IS_GRAPH_WARMUP is not even reset by a capture that succeeds, and turns activation "
        "recomputation off."
    ),
    try_it=probe,
    plan=plan,
)
