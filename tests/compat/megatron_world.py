"""A small megatron-core model on one CPU rank, for the tests of its repairs. Imports megatron lazily.

Replaces two things that CPU builds of PyTorch lack: the current device, and capture. `CaptureStandIn` runs the
function and records nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollgraph.compat.megatron import repair, undo
from rollgraph.compat.megatron.repair import CudaStandIn, TorchStandIn

LAYERS, WIDTH, TOKENS, VOCABULARY = 4, 32, 8, 64
REASON = "needs megatron-core: pip install 'rollgraph[megatron]'"


class CaptureStandIn(TorchStandIn):
    def __init__(self) -> None:
        super().__init__()
        self.cuda = QuietCuda()


class QuietCuda(CudaStandIn):
    """A CUDA device whose calls around a capture do nothing."""

    def __init__(self) -> None:
        stats = dict.fromkeys(("allocated_bytes.all.current", "reserved_bytes.all.current"), 0)
        self.memory_stats = lambda: stats
        self.device_count = lambda: 0
        for name in ("empty_cache", "synchronize", "set_stream", "default_stream", "Stream", "graph_pool_handle"):
            setattr(self, name, lambda *arguments: None)
        self.get_device_capability = lambda: (9, 0)


@pytest.fixture
def unrepaired() -> Iterator[None]:
    undo()
    yield
    undo()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, Megatron's parallel state, and graph managers that need no GPU."""
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    with megatron_world(monkeypatch):
        yield
    dist.destroy_process_group()


@contextmanager
def megatron_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import cuda_graphs, utils

    parallel_state.initialize_model_parallel()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(cuda_graphs, "torch", CaptureStandIn())
    monkeypatch.setattr(utils, "cuda_graph_attr_cache", None)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # graph-safe, and needs no GPU
    reset_graphs(monkeypatch)
    try:
        yield
    finally:
        monkeypatch.undo()
        initialize_rng_tracker(force_reset=True)
        parallel_state.destroy_model_parallel()


def reset_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty Megatron's process-wide graph state for one test."""
    from megatron.core.transformer import cuda_graphs

    record, pool = cuda_graphs._CudagraphGlobalRecord, cuda_graphs.TensorReusePool
    monkeypatch.setattr(record, "cudagraph_created", False)
    monkeypatch.setattr(record, "cudagraph_record", [])
    monkeypatch.setattr(record, "cudagraph_inference_record", [])
    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "global_mempool", None)
    monkeypatch.setattr(pool, "pool", [])
    monkeypatch.setattr(pool, "tensor_strong_refs", [])
    monkeypatch.setattr(pool, "tensor_strong_refs_dataptrs", set())
    for name in ("_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP"):
        monkeypatch.setattr(cuda_graphs, name, False)
    for name in ("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count"):
        monkeypatch.setattr(cuda_graphs, name, 0)


def make_gpt(cuda_graph_impl: str = "local", **settings: Any) -> nn.Module:
    """The model of the bug report: a GPT with 4 layers, in fp32 on the CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        cuda_graph_impl=cuda_graph_impl,
        **settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=settings.get("num_moe_experts"))
    if "num_moe_experts" in settings:
        spec.module = MoETransformerLayer  # as in Megatron's other specs
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=TOKENS)


def wrap_ddp(model: Any, kind: Any = None, **settings: Any) -> Any:
    """Megatron's DDP, or a subclass, with both overlaps and several buckets."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    ddp_config = DistributedDataParallelConfig(bucket_size=5000, **{**overlaps, **settings})
    return (kind or DistributedDataParallel)(model.config, ddp_config, model)


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS).expand(2, -1),
        "attention_mask": torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5,
        "labels": ids.roll(-1, 1),
    }


def compute_gradients(ddp: Any, seed: int = 0) -> float:
    """Run forward and backward, and reduce gradients."""
    ddp.zero_grad_buffer()
    loss = ddp(**make_batch(seed)).mean()
    loss.backward()
    ddp.finish_grad_sync()
    return loss.item()


def update_shard(ddp: Any, lr: float = 0.1) -> None:
    """Update the shard of this rank without gathering, as a distributed optimizer does."""
    rank, size = ddp.dp_group.rank(), ddp.dp_group.size()
    for group in ddp.bucket_groups:
        for bucket in group.buckets:
            shard = slice(rank * bucket.param_data.numel() // size, (rank + 1) * bucket.param_data.numel() // size)
            bucket.param_data[shard] -= lr * bucket.grad_data[shard]


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def list_managers(model: nn.Module) -> list[nn.Module]:
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    return [module for module in model.modules() if isinstance(module, CudaGraphManager)]


def toggle(model: torch.nn.Module, to: str) -> None:
    from megatron.core.transformer.utils import toggle_cuda_graphs

    toggle_cuda_graphs(model, to)


def make_reference(seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=random) if isinstance(tensor, Tensor) else tensor
        for name, tensor in make_gpt("none").state_dict().items()
    }


@torch.no_grad()
def score(model: Any) -> Tensor:
    return model(**make_batch())


def train_healthily() -> dict[str, torch.Tensor]:
    """Losses, gradients and weights of a run that switches hooks and graphs in the order that Megatron expects."""
    ddp = wrap_ddp(make_gpt())
    results = {}
    ddp.disable_forward_pre_hook(param_sync=False)
    for step in range(4):
        results[f"loss {step}"] = torch.tensor(compute_gradients(ddp, seed=step + 10 * ddp.dp_group.rank()))
        results.update({f"{name} {step}": tensor.main_grad.clone() for name, tensor in ddp.named_parameters()})
        update_shard(ddp)
        if step == 0:
            ddp.enable_forward_pre_hook()
        if step == 2:
            ddp.disable_forward_pre_hook()
            toggle(ddp.module, "none")
            toggle(ddp.module, "local")
    return {**results, **copy_weights(ddp.module)}


def repair_changes_no_bit() -> bool:
    expected = train_healthily()
    repair()
    repaired = train_healthily()
    assert not torch.equal(expected["decoder.final_layernorm.weight"], torch.ones(32))
    return all(torch.equal(expected[name], repaired[name]) for name in expected)
