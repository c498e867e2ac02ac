"""A small worker that captures its graphs in seconds, and batches that need no rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.policy.train_graphs import Loss
from rollgraph.policy.worker import CacheLayout
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.types import Batch, Prompt, Rollout, Sample

TINY = Architecture("llama", vocabulary=40, hidden=16, mlp=24, layers=2, heads=2, kv_heads=1, head_dim=8)
LIMITS = Limits(max_length=40, rows=4, token_buckets=(48, 96), cache_bytes=1 << 17, prefill_tokens=32)
ALONE = World(0, 1, "cpu")
ALGORITHM = GRPO(kl_coef=0.04)
RATE, DECAY = 0.01, 0.1


def make_model() -> Decoder:
    """A model whose weights are large enough that tokens differ in probability, with norms other than one."""
    torch.manual_seed(0)
    model = Decoder(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model


def make_worker(
    world: World = ALONE,
    *,
    loss: Loss = ALGORITHM.loss,
    needs_entropy: bool = False,
    limits: Limits = LIMITS,
    temperature: float = 1.0,
    reference: bool = True,
    adapter: AdapterSpec | None = None,
    entropies: bool = False,
    **options: Any,
) -> PolicyWorker:
    """A captured worker whose reference equals its policy. With an adapter, the reference is the base model."""
    sampling = SamplingParams(max_tokens=12, temperature=temperature)
    settings = {"optimizer": {"lr": RATE, "weight_decay": DECAY}, "warmup": 1, "verify_weights": True} | options
    model = make_model()
    if adapter is not None:
        attach(model, adapter, seed=0)
        assert model.adapters is not None
        generator = torch.Generator().manual_seed(0)
        for _, _, b in model.adapters.projections():
            b.copy_(torch.randn(b.shape, generator=generator))
    worker = PolicyWorker(model, None, world, limits, sampling=sampling, **settings)  # type: ignore[arg-type]
    if reference and adapter is not None:
        worker.adapted.name_base("reference")
    elif reference:
        worker.weights.save("reference")
    worker.capture_all({"policy": (loss, needs_entropy)}, entropies=entropies)
    return worker


def share_nothing(patch: pytest.MonkeyPatch) -> None:
    """Give the cache of each worker separate memory."""
    patch.setattr(CacheLayout, "layers_over_gradients", 0)
    patch.setattr(CacheLayout, "pool_nbytes", 0)
    patch.setattr(CacheLayout, "make_pages", lambda layout, pool: layout.plan.allocate(layout.gradients.device))


def parameters(worker: PolicyWorker) -> Tensor:
    """A copy of all parameters in one tensor."""
    worker.sharded.require_full_parameters("gather")
    return torch.cat([parameter.detach().flatten() for parameter in worker.full_model.parameters()])


def gradient_pieces(worker: PolicyWorker) -> dict[tuple[str, int], Tensor]:
    """The gradient of the first step, taken from Adam's first moment: this rank's pieces, by name and start."""
    pieces = worker.optimizer.parameter_states
    return {(piece.parameter.name, piece.start): piece.state["exp_avg"].flatten() / 0.1 for piece in pieces}


def join(*pieces: dict[tuple[str, int], Tensor]) -> Tensor:
    """One gradient from the pieces of all ranks."""
    by_start = {start: piece for of_rank in pieces for start, piece in of_rank.items()}
    return torch.cat([by_start[start] for start in sorted(by_start)])


def gradient(worker: PolicyWorker) -> Tensor:
    return join(gradient_pieces(worker))


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    """For gradients of norm 1 in fp32: summing in another order changes them by much less than 1e-6.

    Compare gradients, not weights: Adam divides a gradient by its own magnitude, so where the gradient is only
    rounding error, weights may differ by up to the learning rate.
    """
    assert actual.abs().max() > 0.01
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def make_samples(count: int, seed: int = 0, lengths: Sequence[int] | None = None) -> list[Sample]:
    """Samples of random tokens that all have the same weight."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(number: int) -> list[int]:
        return torch.randint(40, (number,), generator=generator).tolist()

    def numbers(number: int, mean: float, spread: float) -> list[float]:
        return (mean + spread * torch.randn(number, generator=generator)).tolist()

    samples = []
    for index in range(count):
        length = lengths[index] if lengths is not None else int(torch.randint(1, 16, (), generator=generator))
        old = numbers(length, -3.7, 0.3)
        prompt = tokens(int(torch.randint(1, 8, (), generator=generator)) if lengths is None else 4)
        samples.append(
            Sample(
                prompt, tokens(length), numbers(length, 0, 1), [0.02] * length, old, None, numbers(length, -3.7, 0.3)
            )
        )
    return samples


def make_batch(minibatches: int, each: int, seed: int = 0) -> Batch:
    return Batch([make_samples(each, seed * 100 + index) for index in range(minibatches)])


def sample_rollouts(
    worker: PolicyWorker,
    count: int,
    seed: str,
    max_tokens: int = 12,
    prompts: Sequence[tuple[int, ...]] = ((1, 2, 3), (2, 2, 3)),
) -> list[Rollout]:
    """Sample the prompts in turn, one group per prompt. The reward is an arbitrary function of the tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=worker.sampling.temperature)
    groups = [index % len(prompts) for index in range(count)]
    turns = worker.generate([(list(prompts[g]), i) for i, g in enumerate(groups)], seed=seed, params=params)
    return [
        Rollout(
            Prompt(group, prompts[group], ""),
            list(turn.tokens),
            [True] * len(turn.tokens),
            list(turn.logprobs),
            reward=float(sum(turn.tokens) % 7),
            group=group,
        )
        for group, turn in zip(groups, turns, strict=True)
    ]


def captured_again(worker: PolicyWorker) -> list[str]:
    """The graphs that were captured more than once."""
    return [graph.name for graph in worker.pool.report().graphs if graph.captures > 1]


def reset(worker: PolicyWorker, rate: float = RATE) -> None:
    """Restore the initial weights, optimizer and reference policy in place."""
    worker.sharded.flat.load(make_model().state_dict())
    worker.optimizer.read_shards()
    worker.optimizer.restart(rate, None)
    worker.weights.save("reference")
