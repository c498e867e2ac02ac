"""Workers that recompute activations learn, bit for bit, the same as workers that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph.errors import StaleGraph
from rollgraph.inference import SamplingParams
from rollgraph.model.lora import TARGETS, AdapterSpec, attach
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.types import Batch, Sample
from tests.parallel.worlds import run_world
from tests.policy.small_worker import (
    ALGORITHM,
    ALONE,
    DECAY,
    LIMITS,
    RATE,
    TINY,
    make_model,
    make_samples,
    parameters,
)

ONE_SIZE = replace(LIMITS, token_buckets=(64,))
SCOPES = [("step",), ("layer",), ("attn", "mlp"), ("attn",), ("mlp",)]
COUNTS = (0, 1, TINY.layers)
UPDATES = 2


def make(count: int, world: World = ALONE, *, targets: Sequence[str] = (), **options: Any) -> PolicyWorker:
    """A worker that trains and scores, but does not generate. The projections in `targets` get adapters."""
    model = make_model()
    model.checkpoint_layers(count)
    if targets:
        attach(model, AdapterSpec(rank=3, alpha=3.0, targets=tuple(targets)), seed=0)
    settings: dict[str, Any] = {"warmup": 1, "reduction": "ordered", "sampling": SamplingParams(max_tokens=12)}
    rates = {"lr": RATE, "weight_decay": DECAY}
    worker = PolicyWorker(model, None, world, ONE_SIZE, optimizer=rates, **settings | options)
    worker.capture_all({"policy": (ALGORITHM.loss, False)}, generates=False)
    return worker


def batch(seed: int) -> Batch:
    """Two groups of samples, each of which shares a prompt, in several microbatches."""
    samples: list[Sample] = []
    for group in range(2):
        members = make_samples(5, seed=10 * seed + group, lengths=[9] * 5)
        samples += [replace(sample, prompt=members[0].prompt, reference_logprobs=None) for sample in members]
    return Batch([samples])


def run_updates(
    count: int, world: World = ALONE, **options: Any
) -> tuple[list[dict[str, float]], Tensor, list[Tensor]]:
    """The metrics, the weights and the optimizer's moments of a few updates."""
    worker = make(count, world, **options)
    metrics = [worker.train(batch(number)) for number in range(UPDATES)]
    report = worker.pool.report()
    assert report.eager_runs == 0 or options.get("backend") == "eager"
    moments = [
        piece.state[name].clone() for piece in worker.optimizer.parameter_states for name in ("exp_avg", "exp_avg_sq")
    ]
    results = (metrics, parameters(worker), moments)
    worker.close()
    return results


def assert_same(actual: Any, expected: Any) -> None:
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    assert all(torch.equal(a, b) for a, b in zip(actual[2], expected[2], strict=True))


WAYS = [(scopes, backend) for scopes in SCOPES for backend in ("tape", "eager")]
SLOW = [pytest.param(*way, marks=pytest.mark.slow) for way in WAYS if way != (("layer",), "tape")]


@pytest.mark.parametrize(("scopes", "backend"), [(("layer",), "tape"), *SLOW])
def test_recomputing_changes_no_bit_of_training(scopes: tuple[str, ...], backend: str) -> None:
    kept, *recomputed = (run_updates(count, scopes=scopes, backend=backend) for count in COUNTS)
    assert not torch.equal(kept[1], torch.cat([p.detach().flatten() for p in make_model().parameters()]))
    for results in recomputed:
        assert_same(results, kept)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [TARGETS, ("down_proj",), ("v_proj",)])
@pytest.mark.parametrize(("scopes", "backend"), WAYS)
def test_recomputing_changes_no_bit_of_adapters(
    scopes: tuple[str, ...], backend: str, targets: tuple[str, ...]
) -> None:
    kept, *recomputed = (run_updates(count, targets=targets, scopes=scopes, backend=backend) for count in COUNTS)
    for results in recomputed:
        assert_same(results, kept)


def test_a_layer_that_trains_only_its_mlp_can_be_recomputed() -> None:
    """In the first layer, no gradient reaches the output of its attention."""
    kept, recomputed = (run_updates(count, targets=["down_proj"], scopes=("layer",)) for count in (0, TINY.layers))
    assert_same(recomputed, kept)


def all_scopes(world: World) -> str:
    """Train every combination on the same ranks, because starting ranks is slow."""
    for backend, targets in (("tape", ()), ("eager", ()), ("tape", TARGETS)):
        for scopes in SCOPES[1:]:
            options = {"scopes": scopes, "backend": backend, "targets": targets}
            kept, *recomputed = (run_updates(count, world, **options) for count in COUNTS)
            for results in recomputed:
                assert_same(results, kept)
    return "equal"


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_recomputing_changes_no_bit_with_several_ranks(ranks: int, tmp_path: Path) -> None:
    assert run_world(ranks, tmp_path, all_scopes) == ["equal"] * ranks


def test_graphs_of_layers_that_recompute_need_less_memory() -> None:
    """A recorded forward then keeps only its results, and the backward frees the activations that it recomputes."""
    sizes = {}
    for count in (0, TINY.layers):
        worker = make(count, scopes=("layer",))
        sizes[count] = sum(record.bytes_owned for record in worker.pool.report().graphs)
        worker.close()
    assert sizes[TINY.layers] < sizes[0] / 2


def test_a_weight_that_changed_since_a_recorded_forward_is_refused() -> None:
    worker = make(TINY.layers, scopes=("layer",))
    (layer, *_), (arguments, *_) = worker.train_graphs._list_modules(64)
    residual, update = layer(*arguments)
    with torch.no_grad():
        layer.get_parameter("mlp.down_proj.weight").mul_(2)
    with pytest.raises(StaleGraph, match=r"mlp\.down_proj\.weight"):
        (residual.sum() + update.sum()).backward()
    worker.close()
