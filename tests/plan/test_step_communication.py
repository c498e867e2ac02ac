"""What ranks send each other in a step: how much, in which phase, and how much of it computing hides."""

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
from tests.plan.test_layouts import LAYER, PARAMETERS, REST, SETTLED, TINY, configured, folder, planned

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
    gathers = 64 + (2 * microbatches - 1) * 62  # each pass but the first one finds two layers in their slots
    trained = found["train", "layers, gathered and reduced"]
    assert trained.seconds == pytest.approx(gathers * gather + microbatches * 64 * reduce)
    for whole in (found["generate", "gathered parameters"], found["score", "gathered reference"]):
        assert whole.seconds == whole.exposed == pytest.approx(group.all_gather(2 * PARAMETERS), rel=1e-3)
    # What cannot be hidden is the first gather of the update, and the last reduction of each backward.
    assert trained.exposed == pytest.approx(gather + microbatches * reduce)
    outside = found["train", "embedding and head"]
    expected = group.all_gather(2 * REST) + microbatches * group.reduce_scatter(4 * REST)
    assert outside.seconds == outside.exposed == pytest.approx(expected, rel=1e-6)


def test_pairs_are_scored_with_gathered_parameters(folder: Path) -> None:
    pairs = exchanges(folder, "shard=parameters", "algorithm={name: dpo}", "reward.functions=[]", ranks=8)
    assert {name for phase, name in pairs if phase == "score"} == {"gathered parameters", "gathered reference"}
    written = exchanges(folder, "shard=parameters", "algorithm={name: sft}", "reward.functions=[]", ranks=8)
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
    """Layers are gathered with their base. The base outside of layers is whole and does not change."""
    whole = exchanges(folder, "shard=parameters", ranks=8)
    found = exchanges(folder, "shard=parameters", "adapter.rank=32", ranks=8)
    assert found.keys() == {("train", "layers, gathered and reduced"), ("generate", "gathered parameters")}
    group = RankGroup(8, 1, CALM)
    microbatches = -(-8 * (16 * 2048 + 512) // 8192)
    gathers = (64 + (2 * microbatches - 1) * 62) * group.all_gather(LAYER * 2)
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
