"""A graph's inputs stay in memory: what its pool does not own is held strongly where weak references are made."""

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
    """The tensors whose memory is not the graph pool's.

    An input that Megatron resolved is marked `can_skip_replay_copy`: it comes from its reuse pool, which is ordinary
    memory, or is the output of an earlier graph, which the graph pool owns. Parameters are not marked.
    """
    borrowed = (tensor for tensor in surface if not hasattr(tensor, "can_skip_replay_copy") or pool.owns(tensor))
    return tuple(tensor.detach() for tensor in borrowed)  # the memory: a parameter may get another later


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
        for graph in (self.fwd_graph, self.bwd_graph):  # not by the runner, which outlives graphs that are deleted
            setattr(graph, HELD, held)
        return result

    return [Patch(cuda_graphs._CudaGraphRunner, "create_bwd_graph", create_bwd_graph)]


def probe() -> Verdict:
    from megatron.core.transformer import cuda_graphs

    if not cuda_graphs.HAVE_TE_GRAPHS:
        return Verdict(RepairState.CLEAR, "without Transformer Engine no weak references are made")
    need(cuda_graphs, "make_weak_ref", "create_cudagraphs", "TensorReusePool")
    runner, memory = make_captured_forward()
    pool = cuda_graphs.TensorReusePool()
    pool.pool, pool.tensor_strong_refs, pool.tensor_strong_refs_dataptrs = [], [], set()
    with (
        kept(cuda_graphs, "bwd_buffer_reuse_ref_count"),
        kept(cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool"),
        swapped(
            cuda_graphs, torch=TorchStandIn(), get_all_rng_states=dict, make_weak_ref=lambda tensor: tensor.new_zeros(1)
        ),
        torch.enable_grad(),
    ):
        cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool = pool
        runner.create_bwd_graph()
    runner.base_module.weight.data = torch.zeros(2)  # as when weights are moved away and back
    del runner.params_to_backprop
    gc.collect()
    if memory() is None:
        return Verdict(RepairState.AFFECTED, "the memory of a parameter is freed while a graph reads it")
    return Verdict(RepairState.CLEAR)


class RecordedInputs(np.ndarray):
    """RecordedInputs whose end can be seen."""


def make_captured_forward() -> tuple[Any, weakref.ref[RecordedInputs]]:
    """A runner as create_fwd_graph leaves it: `x * weight` with one input from the reuse pool, one parameter."""
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
    runner.args, runner.kwargs, runner.outputs = (ArgMetadata(x),), {}, (ArgMetadata(out),)
    runner.fwd_graph_input_args, runner.fwd_graph_input_kwargs = (x,), {}
    runner.fwd_graph_input_surface, runner.fwd_graph_output_surface = (x, weight), (out,)
    runner.params_to_backprop, runner.num_dgrads, runner.num_wgrads = (weight,), 1, 1
    runner.fwd_graph = CudaStandIn.CUDAGraph()
    return runner, weakref.ref(memory)


INPUT_SURFACE = Repair(
    name="input-surfaces",
    symptom="CUDA error: an illegal memory access was encountered, or wrong values, when a captured graph is replayed",
    reason=(
        "With Transformer Engine, create_bwd_graph replaces all inputs of the graph by weak references, also those "
        "whose memory the graph's pool does not own and somebody else may free."
    ),
    try_it=probe,
    plan=plan,
)
