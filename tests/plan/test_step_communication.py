"""The communication of a step: its phases, its time, and how much of it overlaps with computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgraph.plan.choose import MemorySettings
from rollgraph.plan.layout import Link, Network, RankGroup
from rollgraph.plan.memory import PHASES
from rollgraph.plan.run_shape import make_run_shape
from rollgraph.plan.time import Communication, Speed
from tests.plan.test_layouts import LAYER, PARAMETERS, SETTLED, folder, make_config, make_settled_plan

__all__ = ["folder"]  # a fixture
NO_LATENCY = Network(Link(1e11, 0.0), Link(1e10, 0.0))  # without latency


def communication_of(
    folder: Path, *overrides: str, tflops: float = 785.0, **options: Any
) -> dict[tuple[str, str], Communication]:
    config = make_config(folder, *SETTLED, *overrides)
    shape = make_run_shape(config, **{"network": NO_LATENCY, **options})
    communication = MemorySettings(config, shape, Speed(tflops)).time.communication
    return {(exchange.phase, exchange.name): exchange for exchange in communication}


def test_one_rank_sends_nothing(folder: Path) -> None:
    assert communication_of(folder) == {}


def test_sharding_the_optimizer_reduces_gradients_and_gathers_parameters(folder: Path) -> None:
    fast = Network(Link(1e12, 0.0), Link(1e12, 0.0))
    communication = communication_of(folder, "algorithm.minibatches=2", ranks=16, nodes=2, network=fast)
    group = RankGroup(16, 2, fast)
    reduced, gathered = communication["train", "reduced gradients"], communication["generate", "gathered parameters"]
    assert reduced.seconds == pytest.approx(2 * group.reduce_scatter(4 * PARAMETERS), rel=1e-3)
    assert gathered.seconds == gathered.exposed == pytest.approx(group.all_gather(2 * PARAMETERS), rel=1e-3)
    # After the first update, a forward hides the gather; backward passes hide the reductions.
    assert communication["train", "gathered parameters"].seconds == gathered.seconds
    assert 0 < communication["train", "gathered parameters"].exposed < 0.1 * gathered.seconds
    assert 0 < reduced.exposed < 0.1 * reduced.seconds


def test_nothing_overlaps_with_instant_computation(folder: Path) -> None:
    for overrides in ([], ["shard=parameters"], ["tensor_parallel=4"]):
        for exchange in communication_of(folder, *overrides, tflops=1e12, ranks=8).values():
            assert exchange.exposed == pytest.approx(exchange.seconds, rel=1e-6)


def test_sharding_parameters_gathers_layers_in_each_pass(folder: Path) -> None:
    communication = communication_of(folder, "shard=parameters", ranks=8)
    group = RankGroup(8, 1, NO_LATENCY)
    tokens = 8 * (16 * 2048 + 512)
    microbatches = -(-tokens // 8192)
    gather, reduce = group.all_gather(LAYER * 2), group.reduce_scatter(LAYER * 4)
    trained = communication["train", "layers, gathered and reduced"]
    assert trained.seconds == pytest.approx(microbatches * 64 * (2 * gather + reduce))
    for gathered in (communication["generate", "gathered parameters"], communication["score", "gathered reference"]):
        assert gathered.seconds == gathered.exposed == pytest.approx(group.all_gather(2 * PARAMETERS), rel=1e-3)
    # Only the gather of the first layer, in each pass, and the last reduction are exposed.
    assert trained.exposed == pytest.approx(microbatches * (gather + gather + reduce))


def test_only_the_gradients_of_adapters_are_reduced(folder: Path) -> None:
    """Layers are gathered with their base. The base outside of layers is whole and frozen."""
    full_training = communication_of(folder, "shard=parameters", ranks=8)
    communication = communication_of(folder, "shard=parameters", "adapter.rank=32", ranks=8)
    assert communication.keys() == {("train", "layers, gathered and reduced"), ("generate", "gathered parameters")}
    group = RankGroup(8, 1, NO_LATENCY)
    microbatches = -(-8 * (16 * 2048 + 512) // 8192)
    gathers = microbatches * 64 * 2 * group.all_gather(LAYER * 2)
    trained = communication["train", "layers, gathered and reduced"]
    assert gathers < trained.seconds < 1.03 * gathers
    assert trained.seconds < full_training["train", "layers, gathered and reduced"].seconds / 1.9
    layers = group.all_gather(64 * LAYER * 2)
    assert layers < communication["generate", "gathered parameters"].seconds < 1.03 * layers


def test_tensor_parallel_all_reduces_twice_per_layer_and_pass(folder: Path) -> None:
    communication = communication_of(folder, "tensor_parallel=8", ranks=8)
    group = RankGroup(8, 1, NO_LATENCY)
    microbatches = -(-64 * (16 * 2048 + 512) // 8192)
    microbatch_seconds = 2 * 64 * group.all_reduce(8192 * 5120 * 2, "ring")
    scored, trained = communication["score", "sums of tensor groups"], communication["train", "sums of tensor groups"]
    assert scored.seconds == scored.exposed == pytest.approx(microbatches * microbatch_seconds)
    # Forward, backward, and half of the layers recomputed.
    assert trained.exposed == pytest.approx(2.5 * scored.exposed)
    assert {phase for phase, _ in communication} == set(PHASES)


def test_phases_add_up_to_the_step(folder: Path) -> None:
    for overrides in (["shard=optimizer"], ["shard=parameters"], ["tensor_parallel=2"]):
        time = make_settled_plan(folder, *overrides, ranks=16, nodes=2).choice.settings.time
        assert sum(time.of_phase(phase) for phase in PHASES) == pytest.approx(time.total)
        assert time.total > sum(time.floor.values()) + sum(time.added.values()) > 0
