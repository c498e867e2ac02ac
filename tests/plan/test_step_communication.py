"""The communication of a step: its phases, its time, and how much of it overlaps with computation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.config import parse_config
from rollgraph.inputs.inputs import make_tokenizer
from rollgraph.parallel.data.collectives import PendingCollective
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.choose import MemorySettings
from rollgraph.plan.layout import Link, Network, RankGroup
from rollgraph.plan.memory import PHASES
from rollgraph.plan.run_shape import make_run_shape
from rollgraph.plan.time import Communication, Speed, step_communication
from rollgraph.policy import WeightSlots
from rollgraph.run.setup import make_model
from tests.parallel.lockstep import Room, RoomCollectives, run_ranks
from tests.plan.test_layouts import LAYER, PARAMETERS, REST, SETTLED, TINY, folder, make_config, make_settled_plan

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
    gathers = 64 + (2 * microbatches - 1) * 62  # each pass but the first one finds two layers in their slots
    trained = communication["train", "layers, gathered and reduced"]
    assert trained.seconds == pytest.approx(gathers * gather + microbatches * 64 * reduce)
    for whole in (communication["generate", "gathered parameters"], communication["score", "gathered reference"]):
        assert whole.seconds == whole.exposed == pytest.approx(group.all_gather(2 * PARAMETERS), rel=1e-3)
    # What cannot be hidden is the first gather of the update, and the last reduction of each backward.
    assert trained.exposed == pytest.approx(gather + microbatches * reduce)
    outside = communication["train", "embedding and head"]
    expected = group.all_gather(2 * REST) + microbatches * group.reduce_scatter(4 * REST)
    assert outside.seconds == outside.exposed == pytest.approx(expected, rel=1e-6)


def test_pairs_are_scored_with_gathered_parameters(folder: Path) -> None:
    pairs = communication_of(folder, "shard=parameters", "algorithm={name: dpo}", "reward.functions=[]", ranks=8)
    assert {name for phase, name in pairs if phase == "score"} == {"gathered parameters", "gathered reference"}
    written = communication_of(folder, "shard=parameters", "algorithm={name: sft}", "reward.functions=[]", ranks=8)
    assert {phase for phase, _ in written} == {"train"}


class CountedCollectives(RoomCollectives):
    """Counts the gathers and reductions of layers, and those of the parameters outside of layers."""

    def __init__(self, room: Room, rank: int) -> None:
        super().__init__(room, rank)
        self.counts: Counter[str] = Counter()

    def _count(self, what: str) -> None:
        self.counts["embedding and head" if "outside of layers" in what else "layers, gathered and reduced"] += 1

    def gather(self, full: Tensor, shard: Tensor, what: str) -> PendingCollective:
        self._count(what)
        return super().gather(full, shard, what)

    def reduce(self, gradients: Tensor, shard: Tensor, what: str, *, accumulate: bool = False) -> PendingCollective:
        self._count(what)
        return super().reduce(gradients, shard, what, accumulate=accumulate)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize(("minibatches", "microbatches"), [(1, 3), (2, 2)])  # of 144 tokens, or of 72 each
def test_training_starts_as_many_collectives_as_are_planned(
    tmp_path: Path, minibatches: int, microbatches: int, kl_coef: float
) -> None:
    """If a collective of two ranks takes a second, whatever its size, the planned seconds are their number."""
    overrides = [f"algorithm={{kl_coef: {kl_coef}, minibatches: {minibatches}}}", "train.microbatch_tokens=64"]
    config = parse_config(TINY.format(output=tmp_path), overrides)
    link = Link(1e30, 1.0)
    shape = make_run_shape(config, ranks=2, device="cpu", network=Network(link, link))
    communication = step_communication(config, shape, Speed(), rows=1, score_passes=0)
    planned_counts = {kind.name: kind.seconds for kind in communication if kind.phase == "train"}

    def run(rank: int, room: Room) -> Counter[str]:
        model = make_model(config, make_tokenizer(config), "cpu")
        collectives = CountedCollectives(room, rank)
        sharded = ShardedModel(
            model, World(rank, 2, "cpu"), collectives=collectives, shard="parameters", units=list(model.layers)
        )
        optimizer = ShardedAdamW(sharded, 0.1)
        slots = WeightSlots(sharded)
        sharded.make_full_model()
        sharded.gather()  # for generation
        if shape.stores_reference:
            slots.save("reference")
            with slots.use("reference"):
                pass
        collectives.counts.clear()
        ids = torch.arange(6)
        for _ in range(minibatches):
            for _ in range(microbatches):
                model.logits(model(ids, ids, torch.tensor([0, 6], dtype=torch.int32), 6)).sum().backward()
            sharded.gradients.finish()
            optimizer.step()
        return collectives.counts

    for counts in run_ranks(2, run):
        assert counts == pytest.approx(planned_counts)


def test_only_the_gradients_of_adapters_are_reduced(folder: Path) -> None:
    """Layers are gathered with their base. The base outside of layers is whole and frozen."""
    full_training = communication_of(folder, "shard=parameters", ranks=8)
    communication = communication_of(folder, "shard=parameters", "adapter.rank=32", ranks=8)
    assert communication.keys() == {("train", "layers, gathered and reduced"), ("generate", "gathered parameters")}
    group = RankGroup(8, 1, NO_LATENCY)
    microbatches = -(-8 * (16 * 2048 + 512) // 8192)
    gathers = (64 + (2 * microbatches - 1) * 62) * group.all_gather(LAYER * 2)
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
