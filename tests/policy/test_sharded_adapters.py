"""Workers with adapters whose base is sharded do what one worker does, bit for bit, and hold what is planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.graph import GraphError
from rollgraph.model.adapter_files import load_adapter
from rollgraph.model.adapters import AdapterSpec, attach
from rollgraph.model.hf_weights import parameter_views
from rollgraph.policy import PolicyWorker
from rollgraph.sharding import StaleWeights, StepAborted, load, save
from rollgraph.types import Batch, Sample
from tests.policy import small_worker
from tests.policy.small_worker import LIMITS, make_samples, make_worker, parameters, sample_rollouts
from tests.policy.test_sharded_worker import DEEP, fail_on_one_rank, paired, refusals, same
from tests.sharding.worlds import run_world

pytestmark = [pytest.mark.multi, pytest.mark.slow]

SPEC = AdapterSpec(rank=3, alpha=3.0)
MLP_ONLY = replace(SPEC, targets=("down_proj",))
QWEN = replace(DEEP, family="qwen2")  # with biases
ONE_SIZE = replace(LIMITS, token_buckets=(48,))
STEPS = 3
SCORED = make_samples(4, seed=9)
make_whole_model = small_worker.make_model


def make(
    world: World, *, spec: AdapterSpec = SPEC, qwen: bool = False, recomputed: int = 0, **options: Any
) -> PolicyWorker:
    """In a process of its own: the model is changed for all of it."""
    small_worker.TINY = QWEN if qwen else DEEP

    def make_model() -> Any:
        model = make_whole_model()
        model.checkpoint_layers(recomputed)
        return model

    small_worker.make_model = make_model
    settings = {"scopes": ("layer",), "reduction": "ordered", "shard": "parameters", **options}
    return make_worker(world, limits=ONE_SIZE, adapter=spec, **settings)


def batch(step: int, ranks: int) -> Batch:
    """Two samples for each rank, which fill a microbatch: one rank alone runs those of one rank after another."""
    return Batch(
        [(paired(step) + paired(step + 20))[: 2 * ranks], (paired(step + 10) + paired(step + 30))[: 2 * ranks]]
    )


def run_phases(worker: PolicyWorker, ranks: int) -> list[Any]:
    """What comes out of every phase, step by step."""
    found: list[Any] = []
    for step in range(STEPS):
        rollouts = sample_rollouts(worker, 3, f"step {step}")
        worker.score(rollouts, "reference")
        found.append([(r.tokens, r.logprobs, r.reference_logprobs) for r in rollouts])
        found.append(worker.logprobs(SCORED))
        worker.train(batch(step, ranks), score_old=step > 0)
        found.append(parameters(worker))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "layers": {},
    "recomputed": {"recomputed": 3},
    "biases": {"qwen": True},
    "eager": {"backend": "eager"},
    "attn, mlp": {"scopes": ("attn", "mlp")},
    "nothing to train in attentions": {"scopes": ("attn", "mlp"), "spec": MLP_ONLY},
    "nothing to train in attentions, eager": {"backend": "eager", "spec": MLP_ONLY},
    "recomputed parts": {"scopes": ("attn", "mlp"), "recomputed": 5},
}


def all_settings(world: World, ranks: int) -> dict[str, Any]:
    found = {}
    for name, options in SETTINGS.items():
        worker = make(world, **options)
        assert worker.sharded.has_copies == (world.size > 1)
        found[name] = run_phases(worker, ranks)
        report = worker.pool.report()
        assert report.eager_runs == 0 or options.get("backend") == "eager"
        worker.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_a_sharded_base_do_what_one_rank_does(ranks: int, tmp_path: Path) -> None:
    (alone,) = run_world(1, tmp_path, all_settings, ranks)
    assert isinstance(alone, dict), alone
    for found in run_world(ranks, tmp_path, all_settings, ranks):
        assert isinstance(found, dict), found
        for name, expected in alone.items():
            for number, (theirs, ours) in enumerate(zip(found[name], expected, strict=True)):
                assert same(theirs, ours), (name, number)
