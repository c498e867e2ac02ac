"""Repairs freed graph inputs: holds those that the graph's pool does not own where Megatron makes weak references."""

from __future__ import annotations

import gc
import weakref
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.patch import Patch, kept, need, need_names, need_parameters, swapped
from rollgraph.compat.megatron.probe_objects import CudaStandIn, TorchStandIn, make_runner
from rollgraph.compat.megatron.repair import Repair, Verdict

HELD = "_rollgraph_held_inputs"


def find_borrowed(surface: Any, pool: Any) -> tuple[Tensor, ...]:
    """The tensors whose memory the graph pool does not own.

    Megatron marks inputs that it resolved with `can_skip_replay_copy`: they come from its reuse pool, which is ordinary
    memory, or are outputs of an earlier graph, which the graph pool owns. Parameters are not marked.
    """
    borrowed = []
    for tensor in surface:
        if not hasattr(tensor, "can_skip_replay_copy") or pool.owns(tensor):
            borrowed.append(tensor.detach())  # holds the memory, which a parameter may exchange for another later
    return tuple(borrowed)


def plan() -> list[Patch]:
    from megatron.core.transformer import cuda_graphs

    need(cuda_graphs, "_CudaGraphRunner", "_CudagraphGlobalRecord")
    need(cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool")
    need(cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool, "owns")
    need(cuda_graphs._CudaGraphRunner, "create_bwd_graph")
    original = cuda_graphs._CudaGraphRunner.create_bwd_graph
    need_parameters(original, "self")
    need_names(original, "fwd_graph_input_surface")
    need(make_runner(), "fwd_graph", "bwd_graph")

    @wraps(original)
    def create_bwd_graph(self: Any) -> Any:
        pool = cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool
        held = find_borrowed(self.fwd_graph_input_surface, pool)
        result = original(self)
        for graph in (self.fwd_graph, self.bwd_graph):  # not on the runner, which outlives deleted graphs
            setattr(graph, HELD, held)
        return result

    return [Patch(cuda_graphs._CudaGraphRunner, "create_bwd_graph", create_bwd_graph)]


def probe() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    if not cuda_graphs.HAVE_TE_GRAPHS:
        return Verdict(RepairState.CLEAR, "without Transformer Engine, Megatron makes no weak references")
    need(cuda_graphs, "make_weak_ref", "create_cudagraphs", "TensorReusePool")
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
        kept(cuda_graphs, "bwd_buffer_reuse_ref_count"),
        kept(cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool"),
        swapped(cuda_graphs, **stand_ins),
        torch.enable_grad(),
    ):
        cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool = pool
        runner.create_bwd_graph()
    runner.base_module.weight.data = torch.zeros(2)  # as when weights are offloaded and reloaded
    del runner.params_to_backprop
    gc.collect()
    if memory() is None:
        return Verdict(RepairState.AFFECTED, "the memory of a parameter is freed while a graph reads it")
    return Verdict(RepairState.CLEAR)


class RecordedInputs(np.ndarray):
    """Memory that can be weakly referenced, so that the probe sees when it is freed."""


def make_captured_forward() -> tuple[Any, weakref.ref[RecordedInputs]]:
    """A runner as create_fwd_graph leaves it, for `x * weight`: one input from the reuse pool and one parameter."""
    from megatron.core.transformer.cuda_graphs import ArgMetadata, CudagraphBufferMetadata

    memory = np.zeros(2, dtype=np.float32).view(RecordedInputs)
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
    try_it=probe,
    plan=plan,
)
