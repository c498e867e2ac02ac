"""Repairs of Megatron's graph capture: inputs freed while a graph still reads them, and flags that are never reset."""

from __future__ import annotations

import gc
import weakref
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.graph_switch import RUNNER_STATE, forget_graphs
from rollgraph.compat.megatron.repair import (
    CudaStandIn,
    GcStandIn,
    Patch,
    Repair,
    TorchStandIn,
    Verdict,
    make_runner,
    patch_attributes,
    preserve_attributes,
    require_attributes,
    require_names_in_code,
    require_parameters,
    verdict_from,
)

# -- inputs ----------------------------------------------------------------------------------------

HELD_INPUTS = "_rollgraph_held_inputs"


def find_unowned_inputs(surface: Any, pool: Any) -> tuple[Tensor, ...]:
    """The inputs whose memory the graph pool does not own.

    Megatron sets `can_skip_replay_copy` on inputs that it resolved: tensors of its reuse pool, which is ordinary
    memory, and outputs of an earlier graph, which the graph pool owns. Parameters do not have it.
    """
    unowned = []
    for tensor in surface:
        if not hasattr(tensor, "can_skip_replay_copy") or pool.owns(tensor):
            unowned.append(tensor.detach())  # keeps this memory alive, even if a parameter's `.data` is replaced later
    return tuple(unowned)


def make_input_patches() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    require_attributes(cuda_graphs, "_CudaGraphRunner", "_CudagraphGlobalRecord")
    require_attributes(cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool")
    require_attributes(cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool, "owns")
    require_attributes(cuda_graphs._CudaGraphRunner, "create_bwd_graph")
    original = cuda_graphs._CudaGraphRunner.create_bwd_graph
    require_parameters(original, "self")
    require_names_in_code(original, "fwd_graph_input_surface")
    require_attributes(make_runner(), "fwd_graph", "bwd_graph")

    @wraps(original)
    def create_bwd_graph(self: Any) -> Any:
        pool = cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool
        unowned = find_unowned_inputs(self.fwd_graph_input_surface, pool)
        result = original(self)
        for graph in (self.fwd_graph, self.bwd_graph):  # not on the runner, which outlives deleted graphs
            setattr(graph, HELD_INPUTS, unowned)
        return result

    return [Patch(cuda_graphs._CudaGraphRunner, "create_bwd_graph", create_bwd_graph)]


def probe_inputs() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    if not cuda_graphs.HAVE_TE_GRAPHS:
        return Verdict(RepairState.CLEAR, "without Transformer Engine, Megatron makes no weak references")
    require_attributes(cuda_graphs, "make_weak_ref", "create_cudagraphs", "TensorReusePool")
    runner, memory = make_captured_forward()
    pool = cuda_graphs.TensorReusePool()
    pool.pool = []
    pool.tensor_strong_refs = []
    pool.tensor_strong_refs_dataptrs = set()
    stand_ins = {
        "torch": TorchStandIn(),
        "get_all_rng_states": dict,
        "make_weak_ref": lambda tensor: tensor.new_zeros(1),
    }
    with (
        preserve_attributes(cuda_graphs, "bwd_buffer_reuse_ref_count"),
        preserve_attributes(cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool"),
        patch_attributes(cuda_graphs, **stand_ins),
        torch.enable_grad(),
    ):
        cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool = pool
        runner.create_bwd_graph()
    runner.base_module.weight.data = torch.zeros(2)  # as offloading and reloading weights does
    del runner.params_to_backprop
    gc.collect()
    if memory() is None:
        return Verdict(RepairState.AFFECTED, "the memory of a parameter is freed while a graph reads it")
    return Verdict(RepairState.CLEAR)


class TrackedMemory(np.ndarray):
    """An array that can be weakly referenced, so that the probe can tell when its memory is freed."""


def make_captured_forward() -> tuple[Any, weakref.ref[TrackedMemory]]:
    """A runner in the state after create_fwd_graph, for `x * weight` with x from the reuse pool, and its memory."""
    from megatron.core.transformer.cuda_graphs import ArgMetadata, CudagraphBufferMetadata

    memory = np.zeros(2, dtype=np.float32).view(TrackedMemory)
    with torch.enable_grad():
        runner = make_runner(need_backward=True)
        runner.base_module.weight = weight = nn.Parameter(torch.from_numpy(memory))
        x = torch.zeros(2, requires_grad=True)
        x.cg_buffer_metadata = CudagraphBufferMetadata(is_cudagraph_input=True)  # type: ignore[attr-defined]
        x.can_skip_replay_copy = False  # type: ignore[attr-defined]
        out = x * weight
        out.cg_buffer_metadata = CudagraphBufferMetadata(is_cudagraph_output=True)  # type: ignore[attr-defined]
    runner.args = (ArgMetadata(x),)
    runner.kwargs = {}
    runner.outputs = (ArgMetadata(out),)
    runner.fwd_graph_input_args = (x,)
    runner.fwd_graph_input_kwargs = {}
    runner.fwd_graph_input_surface = (x, weight)
    runner.fwd_graph_output_surface = (out,)
    runner.params_to_backprop = (weight,)
    runner.num_dgrads = 1
    runner.num_wgrads = 1
    runner.fwd_graph = CudaStandIn.CUDAGraph()
    return runner, weakref.ref(memory)


INPUT_SURFACE = Repair(
    name="input-surfaces",
    symptom="CUDA error: an illegal memory access was encountered, or wrong values, when a captured graph is replayed",
    reason=(
        "With Transformer Engine, create_bwd_graph replaces all inputs of the graph by weak references, even those "
        "whose memory the graph's pool does not own and other code may free."
    ),
    run_probe=probe_inputs,
    make_patches=make_input_patches,
)


# -- flags -----------------------------------------------------------------------------------------

FLAGS = ("_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP")
COUNTERS = ("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count")  # the next capture asserts that they are 0


def reset_capture_flags(cuda_graphs: Any) -> None:
    cuda_graphs._set_capture_end()
    cuda_graphs._IS_GRAPH_WARMUP = False
    if cuda_graphs.HAVE_TE_GRAPHS:
        cuda_graphs.te_set_capture_end()
    if cuda_graphs.FREEZE_GC:
        gc.unfreeze()


def make_flag_patches() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    require_attributes(
        cuda_graphs, *FLAGS, *COUNTERS, "_set_capture_end", "is_graph_capturing", "HAVE_TE_GRAPHS", "FREEZE_GC"
    )
    require_attributes(
        cuda_graphs, "_CudagraphGlobalRecord", "_CudaGraphRunner", "CudaGraphManager", "TECudaGraphHelper"
    )
    require_attributes(cuda_graphs._CudagraphGlobalRecord, "create_cudagraphs", "cudagraph_record")
    require_attributes(cuda_graphs._CudaGraphRunner, "create_fwd_graph")
    require_attributes(cuda_graphs.TECudaGraphHelper, "create_cudagraphs")
    require_attributes(make_runner(), *RUNNER_STATE, "base_module")
    require_names_in_code(cuda_graphs.CudaGraphManager.__init__, "cudagraph_runners", "reuse_cudagraphs")
    if cuda_graphs.HAVE_TE_GRAPHS:
        require_attributes(cuda_graphs, "te_set_capture_end")
    return [make_record_patch(cuda_graphs), make_runner_patch(cuda_graphs), make_te_helper_patch(cuda_graphs)]


def make_record_patch(cuda_graphs: Any) -> Patch:
    record = cuda_graphs._CudagraphGlobalRecord
    original = record.create_cudagraphs.__func__
    require_parameters(original, "cls")

    @wraps(original)
    def create_cudagraphs(cls: Any) -> Any:
        counters_before = {name: getattr(cuda_graphs, name) for name in COUNTERS}
        try:
            return original(cls)
        except BaseException:
            if cuda_graphs.is_graph_capturing():
                reset_capture_flags(cuda_graphs)
                vars(cuda_graphs).update(counters_before)
                for entry in cls.cudagraph_record:  # only some were captured: the next step records all of them again
                    forget_graphs(entry[0])
                cls.cudagraph_record = []
            raise

    return Patch(record, "create_cudagraphs", classmethod(create_cudagraphs))


def make_runner_patch(cuda_graphs: Any) -> Patch:
    runner = cuda_graphs._CudaGraphRunner
    original = runner.create_fwd_graph

    @wraps(original)
    def create_fwd_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            # In 0.16.1, _set_warmup_end never resets the flag, not even after a success. Resetting it there would be
            # too early: a captured layer that recomputes its norms would get no gradients for them, because they are
            # not among the graph's outputs.
            cuda_graphs._IS_GRAPH_WARMUP = False

    return Patch(runner, "create_fwd_graph", create_fwd_graph)


def make_te_helper_patch(cuda_graphs: Any) -> Patch:
    helper = cuda_graphs.TECudaGraphHelper
    original = helper.create_cudagraphs
    require_parameters(original, "self")

    @wraps(original)
    def create_cudagraphs(self: Any) -> Any:
        try:
            return original(self)
        except BaseException:
            if cuda_graphs.is_graph_capturing():
                reset_capture_flags(cuda_graphs)
            raise

    return Patch(helper, "create_cudagraphs", create_cudagraphs)


class CaptureFailed(Exception):
    """Raised by the probe's graph, and nowhere else."""


def raise_capture_failed(*args: Any, **kwargs: Any) -> None:
    raise CaptureFailed


def probe_flags() -> Verdict:
    """Run a capture that raises and one that succeeds, without CUDA, and report the flags that stay set."""
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        return Verdict(RepairState.UNKNOWN, "a capture is running, or an earlier one failed")
    with (
        preserve_attributes(cuda_graphs, *FLAGS, *COUNTERS),
        patch_attributes(cuda_graphs, torch=TorchStandIn(), gc=GcStandIn()),
    ):
        stuck_flags = [*probe_failing_capture(cuda_graphs), *probe_successful_capture(cuda_graphs)]
    return verdict_from(stuck_flags)


def probe_failing_capture(cuda_graphs: Any) -> list[str]:
    """Run the real create_cudagraphs with a graph whose capture raises."""
    record = cuda_graphs._CudagraphGlobalRecord
    runner = make_runner()
    runner.create_fwd_graph = raise_capture_failed
    with preserve_attributes(record, "cudagraph_created", "cudagraph_record"):
        record.cudagraph_created = False
        record.cudagraph_record = [(runner, "fwd", (), {}, None)]
        try:
            cuda_graphs.create_cudagraphs()
        except CaptureFailed:
            return ["is_graph_capturing() stays True"] if cuda_graphs.is_graph_capturing() else []
    raise RuntimeError("create_cudagraphs did not reach the failing graph")


def probe_successful_capture(cuda_graphs: Any) -> list[str]:
    """Run the real create_fwd_graph for one graph."""
    cuda_graphs._IS_GRAPH_WARMUP = False
    with patch_attributes(cuda_graphs, get_all_rng_states=dict, FREEZE_GC=False), torch.no_grad():
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
    run_probe=probe_flags,
    make_patches=make_flag_patches,
)
