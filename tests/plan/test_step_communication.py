"""What ranks send each other in a step: how much, in which phase, and how much of it computing hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgraph.plan.choose import MemorySettings
from rollgraph.plan.layout import Link, Network, RankGroup
from rollgraph.plan.memory import PHASES
from rollgraph.plan.run_shape import make_run_shape
from rollgraph.plan.time import Communication, Speed
from tests.plan.test_layouts import LAYER, PARAMETERS, SETTLED, configured, folder, planned

__all__ = ["folder"]  # a fixture
CALM = Network(Link(1e11, 0.0), Link(1e10, 0.0))  # without latency


def exchanges(
    folder: Path, *overrides: str, tflops: float = 785.0, **options: Any
) -> dict[tuple[str, str], Communication]:
    config = configured(folder, *SETTLED, *overrides)
    shape = make_run_shape(config, **{"network": CALM, **options})
    found = MemorySettings(config, shape, Speed(tflops)).time.communication
    return {(exchange.phase, exchange.name): exchange for exchange in found}


def test_one_rank_sends_nothing(folder: Path) -> None:
    assert exchanges(folder) == {}


def test_ranks_that_shard_the_optimizer_reduce_gradients_and_gather_parameters(folder: Path) -> None:
    fast = Network(Link(1e12, 0.0), Link(1e12, 0.0))
    found = exchanges(folder, "algorithm.minibatches=2", ranks=16, nodes=2, network=fast)
    group = RankGroup(16, 2, fast)
    reduced, gathered = found["train", "reduced gradients"], found["generate", "gathered parameters"]
    assert reduced.seconds == pytest.approx(2 * group.reduce_scatter(4 * PARAMETERS), rel=1e-3)
    assert gathered.seconds == gathered.exposed == pytest.approx(group.all_gather(2 * PARAMETERS), rel=1e-3)
    # The other update is followed by a forward, which hides the gather, and a backward hides the reductions.
    assert found["train", "gathered parameters"].seconds == gathered.seconds
    assert 0 < found["train", "gathered parameters"].exposed < 0.1 * gathered.seconds
    assert 0 < reduced.exposed < 0.1 * reduced.seconds


def test_a_device_that_computes_in_no_time_hides_nothing(folder: Path) -> None:
    for overrides in ([], ["shard=parameters"], ["tensor_parallel=4"]):
        for exchange in exchanges(folder, *overrides, tflops=1e12, ranks=8).values():
            assert exchange.exposed == pytest.approx(exchange.seconds, rel=1e-6)


def test_ranks_that_shard_parameters_gather_layers_in_each_pass(folder: Path) -> None:
    found = exchanges(folder, "shard=parameters", ranks=8)
    group = RankGroup(8, 1, CALM)
    tokens = 8 * (16 * 2048 + 512)
    microbatches = -(-tokens // 8192)
    gather, reduce = group.all_gather(LAYER * 2), group.reduce_scatter(LAYER * 4)
    trained = found["train", "layers, gathered and reduced"]
    assert trained.seconds == pytest.approx(microbatches * 64 * (2 * gather + reduce))
    for whole in (found["generate", "gathered parameters"], found["score", "gathered reference"]):
        assert whole.seconds == whole.exposed == pytest.approx(group.all_gather(2 * PARAMETERS), rel=1e-3)
    # What cannot be hidden is the first layer, in each pass, and the last reduction.
    assert trained.exposed == pytest.approx(microbatches * (gather + gather + reduce))


def test_only_the_gradients_of_adapters_are_reduced(folder: Path) -> None:
    """Layers are gathered with their base. The base outside of layers is whole and does not change."""
    whole = exchanges(folder, "shard=parameters", ranks=8)
    found = exchanges(folder, "shard=parameters", "adapter.rank=32", ranks=8)
    assert found.keys() == {("train", "layers, gathered and reduced"), ("generate", "gathered parameters")}
    group = RankGroup(8, 1, CALM)
    microbatches = -(-8 * (16 * 2048 + 512) // 8192)
    gathers = microbatches * 64 * 2 * group.all_gather(LAYER * 2)
    trained = found["train", "layers, gathered and reduced"]
    assert gathers < trained.seconds < 1.03 * gathers
    assert trained.seconds < whole["train", "layers, gathered and reduced"].seconds / 1.9
    layers = group.all_gather(64 * LAYER * 2)
    assert layers < found["generate", "gathered parameters"].seconds < 1.03 * layers


def test_tensor_groups_sum_twice_in_each_layer_and_pass(folder: Path) -> None:
    found = exchanges(folder, "tensor_parallel=8", ranks=8)
    group = RankGroup(8, 1, CALM)
    microbatches = -(-64 * (16 * 2048 + 512) // 8192)
    of_microbatch = 2 * 64 * group.all_reduce(8192 * 5120 * 2, "ring")
    scored, trained = found["score", "sums of tensor groups"], found["train", "sums of tensor groups"]
    assert scored.seconds == scored.exposed == pytest.approx(microbatches * of_microbatch)
    assert trained.exposed == pytest.approx(2.5 * scored.exposed)  # forward, backward, and half of the layers again
    assert {phase for phase, _ in found} == set(PHASES)


def test_phases_and_parts_add_up_to_the_step(folder: Path) -> None:
    for overrides in (["shard=optimizer"], ["shard=parameters"], ["tensor_parallel=2"]):
        time = planned(folder, *overrides, ranks=16, nodes=2).choice.settings.time
        assert sum(time.of_phase(phase) for phase in PHASES) == pytest.approx(time.total)
        assert time.total > sum(time.floor.values()) + sum(time.added.values()) > 0
