"""Repairs the flags that a failed capture leaves set: while they are, DDP's hooks return early and do nothing."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any

import torch

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.graph_deletion import RUNNER_STATE, forget_graphs
from rollgraph.compat.megatron.patch import Patch, kept, need, need_names, need_parameters, swapped
from rollgraph.compat.megatron.probe_objects import GcStandIn, TorchStandIn, make_runner
from rollgraph.compat.megatron.repair import Repair, Verdict, verdict_on

FLAGS = ("_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP")
COUNTERS = ("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count")  # the next capture asserts that they are 0


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
    need(cuda_graphs._CudagraphGlobalRecord, "create_cudagraphs", "cudagraph_record")
    need(cuda_graphs._CudaGraphRunner, "create_fwd_graph")
    need(cuda_graphs.TECudaGraphHelper, "create_cudagraphs")
    need(make_runner(), *RUNNER_STATE, "base_module")
    need_names(cuda_graphs.CudaGraphManager.__init__, "cudagraph_runners", "reuse_cudagraphs")
    if cuda_graphs.HAVE_TE_GRAPHS:
        need(cuda_graphs, "te_set_capture_end")
    return [plan_record(cuda_graphs), plan_runner(cuda_graphs), plan_te_helper(cuda_graphs)]


def plan_record(cuda_graphs: Any) -> Patch:
    record = cuda_graphs._CudagraphGlobalRecord
    original = record.create_cudagraphs.__func__
    need_parameters(original, "cls")

    @wraps(original)
    def create_cudagraphs(cls: Any) -> Any:
        counts = {name: getattr(cuda_graphs, name) for name in COUNTERS}
        try:
            return original(cls)
        except BaseException:
            if cuda_graphs.is_graph_capturing():
                end_capture(cuda_graphs)
                vars(cuda_graphs).update(counts)
                for entry in cls.cudagraph_record:  # only some were captured, so the next step records all again
                    forget_graphs(entry[0])
                cls.cudagraph_record = []
            raise

    return Patch(record, "create_cudagraphs", classmethod(create_cudagraphs))


def plan_runner(cuda_graphs: Any) -> Patch:
    runner = cuda_graphs._CudaGraphRunner
    original = runner.create_fwd_graph

    @wraps(original)
    def create_fwd_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            # In 0.16.1, _set_warmup_end never resets the flag, not even after a success. Resetting it already there
            # would be too early: a captured layer that recomputes its norms would get no gradients for them, because
            # they are in none of the graph's outputs.
            cuda_graphs._IS_GRAPH_WARMUP = False

    return Patch(runner, "create_fwd_graph", create_fwd_graph)


def plan_te_helper(cuda_graphs: Any) -> Patch:
    helper = cuda_graphs.TECudaGraphHelper
    original = helper.create_cudagraphs
    need_parameters(original, "self")

    @wraps(original)
    def create_cudagraphs(self: Any) -> Any:
        try:
            return original(self)
        except BaseException:
            if cuda_graphs.is_graph_capturing():
                end_capture(cuda_graphs)
            raise

    return Patch(helper, "create_cudagraphs", create_cudagraphs)


class CaptureFailed(Exception):
    """Raised by the probe's own graph, and by nothing else."""


def fail(*args: Any, **kwargs: Any) -> None:
    raise CaptureFailed


def probe() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        return Verdict(RepairState.UNKNOWN, "a capture is running, or has failed before")
    with kept(cuda_graphs, *FLAGS, *COUNTERS), swapped(cuda_graphs, torch=TorchStandIn(), gc=GcStandIn()):
        failures = [*try_failing(cuda_graphs), *try_succeeding(cuda_graphs)]
    return verdict_on(failures)


def try_failing(cuda_graphs: Any) -> list[str]:
    """Run the real create_cudagraphs with a first graph that raises."""
    record = cuda_graphs._CudagraphGlobalRecord
    runner = make_runner()
    runner.create_fwd_graph = fail
    with kept(record, "cudagraph_created", "cudagraph_record"):
        record.cudagraph_created = False
        record.cudagraph_record = [(runner, "fwd", (), {}, None)]
        try:
            cuda_graphs.create_cudagraphs()
        except CaptureFailed:
            return ["is_graph_capturing() stays True"] if cuda_graphs.is_graph_capturing() else []
    raise RuntimeError("create_cudagraphs did not reach the failing graph")


def try_succeeding(cuda_graphs: Any) -> list[str]:
    """Run the real create_fwd_graph for one graph."""
    cuda_graphs._IS_GRAPH_WARMUP = False
    with swapped(cuda_graphs, get_all_rng_states=dict, FREEZE_GC=False), torch.no_grad():
        runner = make_runner()
        runner.create_fwd_graph((torch.zeros(2),), {}, ())
    return ["is_graph_warmup() stays True"] if cuda_graphs.is_graph_warmup() else []


CAPTURE_FAILURE = Repair(
    name="capture-failure",
    symptom=(
        "after a capture that raised: gradients are not reduced and parameters are not gathered, without an error, or "
        "`AssertionError: Communication call has not been issued for this bucket`"
    ),
    reason=(
        "create_cudagraphs sets _IS_GRAPH_CAPTURING and resets it only if nothing raises; while it is set, DDP's hooks "
        "return at once. _IS_GRAPH_WARMUP is not even reset by a capture that succeeds, and turns off activation "
        "recomputation."
    ),
    try_it=probe,
    plan=plan,
)
