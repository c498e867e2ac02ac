"""Generate, score with a reference and train in five rollouts, on megatron-core with graphs and overlap.

The model is a GPT with 4 layers in Megatron's DDP with both overlaps, the distributed optimizer and
`cuda_graph_impl="local"`. Graphs are off in generation and scoring, and on in training; train() is one-shot, as in
Megatron-LM and slime. The model learns to write even tokens. Needs a GPU and megatron-core, but not
Transformer Engine.

    python examples/megatron_repeated_rollouts.py                    # five rollouts
    python examples/megatron_repeated_rollouts.py --without-repair   # the AssertionError that users report
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import toggle_cuda_graphs
from torch import Tensor

from rollgraph.compat.megatron import reference_weights, repair, repeatable_train

LAYERS = 4
WIDTH = 128
HEADS = 4
VOCABULARY = 64
ROWS = 32
LENGTH = 16
MICROBATCHES = 2
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Five rollouts on megatron-core with graphs and overlap.")
    parser.add_argument("--without-repair", action="store_true", help="show the failure")
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--reset-graphs", action="store_true", help="capture again in every rollout")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this example needs a GPU: it captures CUDA graphs")
    if not arguments.without_repair:
        for finding in repair():
            print(f"{finding.name}: {finding.state}")
    start_world()
    try:
        run(arguments.rollouts, not arguments.without_repair, arguments.reset_graphs)
    finally:
        dist.destroy_process_group()


def run(rollouts: int, repaired: bool, reset_graphs: bool) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    hooks = len(model.remove_forward_pre_hook_handles)
    print(f"{count_managers(model)} graph managers in the module tree, {hooks} hook handles")
    reference = {name: clone(tensor) for name, tensor in model.state_dict().items()}
    for rollout in range(rollouts):
        toggle_cuda_graphs(model.module, "none", reset_graphs)
        ids = generate(model.eval())
        own = score(model, ids)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with reference_weights(model, reference) if repaired else swap_by_hand(model, reference):
            theirs = score(model, ids)
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

        toggle_cuda_graphs(model.module, "local", reset_graphs)
        with repeatable_train(model, model.config) if repaired else nullcontext():
            losses = train(model.train(), optimizer, ids, reward(ids))
        print(
            f"rollout {rollout}: reward {reward(ids).mean().item():.3f}, "
            f"distance from the reference {(theirs - own).mean().item():+.4f}, "
            f"loss {losses[0]:+.4f} to {losses[-1]:+.4f}, {count_graphs(model)} layers replay captured graphs",
            flush=True,
        )
        assert count_graphs(model) == LAYERS, "training is eager"
    print(f"{rollouts} rollouts with graphs and overlap: generated, scored with the reference, trained")


def start_world() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0, use_cudagraphable_rng=True)
    torch.manual_seed(0)


def make_model() -> Any:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        cuda_graph_impl="local",
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope")
    gpt = gpt.cuda().bfloat16()  # its norms are created in fp32
    overlap = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        bucket_size=100_000,
    )
    model = DistributedDataParallel(config, overlap, gpt)
    torch.cuda.synchronize()  # a graph manager has switched the current stream
    return model


def make_optimizer(model: Any) -> Any:
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    return get_megatron_optimizer(settings, [model])


@torch.no_grad()
def generate(model: Any) -> Tensor:
    ids = torch.zeros(ROWS, 1, dtype=torch.long, device=torch.cuda.current_device())  # [rows, tokens so far]
    while ids.shape[1] < LENGTH:
        logits = model(ids, positions_of(ids), None)[:, -1]  # [rows, vocabulary]
        ids = torch.cat([ids, torch.multinomial(logits.float().softmax(-1), 1)], 1)
    return ids


@torch.no_grad()
def score(model: Any, ids: Tensor) -> Tensor:
    """Return the negative log-probability of each next token, [rows, tokens]. The first follows the last."""
    return model(ids, positions_of(ids), None, labels=ids.roll(-1, 1))


def reward(ids: Tensor) -> Tensor:
    """Return the fraction of even tokens, [rows]."""
    return (ids[:, 1:] % 2 == 0).float().mean(1)


def train(model: Any, optimizer: Any, ids: Tensor, rewards: Tensor) -> list[float]:
    """One-shot, as in Megatron-LM: puts functions into the config, and disables hooks for the first step."""
    config = model.config
    assert config.no_sync_func is None, "When overlap_grad_reduce is True, config.no_sync_func must be None"
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    model.disable_forward_pre_hook(param_sync=False)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    losses = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(zip(ids.chunk(MICROBATCHES), advantages.chunk(MICROBATCHES), strict=True)),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=ROWS // MICROBATCHES,
            forward_only=False,
        )
        losses.append(sum(each["loss"].item() for each in found) / MICROBATCHES)
        optimizer.step()
        if step == 0:
            model.enable_forward_pre_hook()
    model.disable_forward_pre_hook()
    return losses


def forward_step(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    ids, advantages = next(data)
    output = model(ids, positions_of(ids), None, labels=ids.roll(-1, 1))  # [rows, tokens]

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (output[:, :-1] * advantages[:, None]).mean()
        return loss, {"loss": loss.detach()}

    return output, loss_of


@contextmanager
def swap_by_hand(model: Any, weights: dict[str, Any]) -> Iterator[None]:
    """Swap reference weights without a guard, as most training loops do."""
    model.disable_forward_pre_hook()
    policy = {name: clone(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    yield
    model.load_state_dict(policy)
    model.enable_forward_pre_hook()


def clone(tensor: Any) -> Any:
    return tensor.detach().clone() if isinstance(tensor, Tensor) else tensor


def positions_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)


def list_managers(model: Any) -> list[CudaGraphManager]:
    return [module for module in model.modules() if isinstance(module, CudaGraphManager)]


def count_managers(model: Any) -> int:
    return len(list_managers(model))


def count_graphs(model: Any) -> int:
    """Count the layers that have a forward and a backward graph."""
    runners = [runner for manager in list_managers(model) for runner in manager.cudagraph_runners]
    return sum(runner.cudagraph_created and runner.bwd_graph is not None for runner in runners)


if __name__ == "__main__":
    main()
