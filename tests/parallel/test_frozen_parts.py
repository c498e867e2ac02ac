"""Frozen tensors pass through the ring with the parameters, and copies of parameters in them are refreshed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.parallel.data.bucket_plan import specs_of
from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.fsdp.layout import FrozenParts, find_frozen, frozen_specs, names_in, plan_ring, plan_units
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from tests.parallel.lockstep import Room, RoomCollectives, run_ranks
from tests.parallel.small_net import RATE, same, values
from tests.parallel.test_ring import join, pieces, ring_of, storages

LAYERS = 5
STEPS = 3
WIDTH = 6


class Scale(nn.Module):
    """A layer without trained parameters."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Layer(nn.Module):
    """A frozen matrix with a copy of the trained one below it, and one matmul with both."""

    weight: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        trained = 2 + index % 3
        self.trained = nn.Parameter(torch.linspace(-1, 1, trained * WIDTH).view(trained, WIDTH) / (index + 1))
        self.both = torch.zeros(WIDTH + trained, WIDTH)
        self.both[:WIDTH] = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).roll(index)
        self.register_buffer("weight", self.both[:WIDTH], persistent=False)
        self.scale = Scale(torch.linspace(0.5, 1.5, WIDTH).roll(index))

    def forward(self, x: Tensor) -> Tensor:
        product = self.scale(x) @ self.both.t()  # reads the copy
        again = x @ self.trained.t()  # has the gradient
        return (x + product[:, :WIDTH] + (product[:, WIDTH:] * again).sum(1, keepdim=True)).tanh()


def tensors_of(layer: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    assert isinstance(layer, Layer)
    return {"both": (layer.both, layer.weight), "scale": (layer.scale.weight,)}


def make_refresh(layer: nn.Module) -> Callable[[], object]:
    assert isinstance(layer, Layer)
    copy, original = layer.both.data[WIDTH:], layer.trained.data
    return lambda: copy.copy_(original)


PARTS = FrozenParts(tensors_of, make_refresh)


def build() -> nn.Sequential:
    model = nn.Sequential(*(Layer(index) for index in range(LAYERS)))
    for layer in model:
        make_refresh(layer)()
    return model


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Rank:
    def __init__(self, world: World, room: Room, **options: Any) -> None:
        self.model = build()
        self.layers: list[Any] = list(self.model)
        settings = {"shard": "parameters", "units": self.layers, "frozen": PARTS, "reduction": "ordered", **options}
        self.sharded = ShardedModel(self.model, world, collectives=RoomCollectives(room, world.rank), **settings)
        self.optimizer = ShardedAdamW(self.sharded, RATE)

    def loss(self, step: int) -> Tensor:
        return self.model(inputs(step, self.sharded.world.rank)).square().mean()  # type: ignore[no-any-return]

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.sharded.gradients.finish()
        self.optimizer.step()

    def full_model(self) -> Any:
        full_model = self.sharded.make_full_model()
        self.sharded.gather()
        return full_model


def simulated(function: Callable[[Rank], Any], ranks: int = 2, **options: Any) -> list[Any]:
    return run_ranks(ranks, lambda rank, room: function(Rank(World(rank, ranks, "cpu"), room, **options)))


def reference(ranks: int, steps: int = STEPS) -> nn.Sequential:
    """One process that runs the samples of each rank, and sums in the order of ranks."""
    model = build()
    trained = list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(RATE), weight_decay=0.0, fused=True, capturable=True)
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in trained]
        for rank in range(ranks):
            gradients = torch.autograd.grad(model(inputs(step, rank)).square().mean(), trained)
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient)
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = total.div_(ranks)
        optimizer.step()
        for layer in model:
            make_refresh(layer)()
    return model


@pytest.mark.parametrize(("ranks", "slots", "overlap"), [(2, 2, True), (3, 2, True), (2, 1, True), (3, 3, False)])
def test_the_ring_and_the_full_model_have_the_bits_of_one_process(ranks: int, slots: int, overlap: bool) -> None:
    def run(mine: Rank) -> tuple[dict[str, Tensor], list[Tensor], Tensor, Tensor]:
        for step in range(STEPS):
            mine.step(step)
        full_model = mine.full_model()
        x = inputs(9, 0)
        with torch.no_grad():
            return values(full_model), [layer.both.clone() for layer in full_model], mine.model(x), full_model(x)

    expected = reference(ranks)
    options = {"slots": slots, "overlap_gather": overlap, "overlap_reduce": overlap}
    for parameters, both, output, full_output in simulated(run, ranks, **options):
        assert same(parameters, values(expected))
        assert all(torch.equal(ours, layer.both) for ours, layer in zip(both, expected, strict=True))
        with torch.no_grad():
            assert torch.equal(output, expected(inputs(9, 0)))
        assert torch.equal(full_output, output)


def test_frozen_tensors_have_no_gradients_and_no_state_in_checkpoints(tmp_path: Path) -> None:
    """Three ranks save. Two ranks load it, and one rank, whose frozen tensors are not sharded."""

    def begin(mine: Rank) -> Any:
        mine.step(0)
        assert len(mine.sharded.flat.snapshot()) == len(mine.optimizer.state.shards) == LAYERS
        save(tmp_path / "0", mine.sharded, mine.optimizer)
        mine.loss(5).backward()
        started = [entry.split() for entry in ring_of(mine.sharded).started]
        assert {bucket for kind, _, bucket in started if kind == "gather"} == {"0", "1"}
        assert {bucket for kind, _, bucket in started if kind == "reduce"} == {"0"}
        mine.sharded.gradients.drop()
        return pieces(mine.optimizer), values(mine.full_model())

    def go_on(mine: Rank) -> Any:
        load(tmp_path / "0", mine.sharded, mine.optimizer)
        return pieces(mine.optimizer), values(mine.full_model())

    begun = simulated(begin, ranks=3)
    state, weights = join(of_rank for of_rank, _ in begun), begun[0][1]
    assert {name.partition(".")[2] for name, _ in state} == {"trained"}
    for ranks, options in ((2, {}), (2, {"shard": "optimizer"}), (1, {})):
        results = simulated(go_on, ranks=ranks, **options)
        assert same(join(of_rank for of_rank, _ in results), state)  # type: ignore[arg-type]
        assert all(same(loaded, weights) for _, loaded in results)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_the_planned_memory(ranks: int) -> None:
    def run(mine: Rank) -> tuple[int, int]:
        mine.step(0)
        flat = mine.sharded.flat
        tensors = [*mine.model.parameters(), *mine.model.buffers(), *(layer.both for layer in mine.layers)]
        tensors += [bucket.resident for bucket in (*flat.buckets, *flat.frozen_buckets)]
        tensors += [flat.gradient_memory, *(t for shard in mine.optimizer.state.shards for t in shard.values())]
        held = storages(tensors)
        full_model: Any = mine.sharded.make_full_model()
        copied = [*full_model.parameters(), *full_model.buffers(), *(layer.both for layer in full_model)]
        return held, storages([*tensors, *copied]) - held

    with torch.device("meta"):
        shape = nn.Sequential(*(Layer(index) for index in range(LAYERS)))
    layers = list(shape)
    frozen = [frozen_specs(tensors) for tensors in find_frozen(PARTS, layers)]
    plan = plan_units(specs_of(shape), names_in(shape, layers), ranks=ranks, frozen=frozen)
    trained = plan_units(specs_of(shape), names_in(shape, layers), ranks=ranks)
    planned = plan_ring(plan, torch.float32)
    assert plan.frozen_shard_nbytes > 0
    assert (planned.gradients, planned.optimizer) == (
        plan_ring(trained, torch.float32).gradients,
        plan_ring(trained, torch.float32).optimizer,
    )
    for held, copied in simulated(run, ranks=ranks):
        assert held == planned.total
        assert copied == plan.full_nbytes


# -- refusals ---------------------------------------------------------------------------------------


def test_a_module_without_parameters_does_not_read_another_layer() -> None:
    """The hook of a layer gathers it. While hooks are paused, the module refuses to run."""

    def run(mine: Rank) -> None:
        x = inputs(0, 0)
        expected = [layer.scale(x) for layer in build()]
        with torch.no_grad():
            for layer, output in zip(mine.layers, expected, strict=True):
                assert torch.equal(layer.scale(x), output)
            with (
                mine.sharded.paused(gather=False),
                pytest.raises(StaleWeights, match="slot 0 holds layer 4, not layer 2"),
            ):
                mine.layers[2].scale(x)
        (guard,) = mine.sharded.gathers.guards_of(mine.layers[2].scale)
        assert "slot 0 holds layer 4, not layer 2" in str(guard())

    simulated(run)


def test_a_layer_whose_refresh_failed_does_not_run() -> None:
    """The refresh is part of a gather: if it fails, the slot does not hold the layer."""

    def run(mine: Rank) -> None:
        ring = ring_of(mine.sharded)
        refresh = ring.units[2].refresh

        def fail() -> None:
            raise ArithmeticError("made to fail")

        with torch.no_grad():
            expected = mine.loss(0)
            ring.units[2].refresh = fail
            with pytest.raises(ArithmeticError):
                mine.loss(0)
            assert "slot 0 holds nothing, not layer 2" in str(ring.unready_reason(ring.units[2]))
            ring.units[2].refresh = refresh
            assert torch.equal(mine.loss(0), expected)

    simulated(run)


def test_a_write_in_a_slot_is_not_lost_silently() -> None:
    def run(mine: Rank) -> None:
        with torch.no_grad():
            mine.loss(0)
            mine.layers[4].weight.mul_(2)
            with pytest.raises(RuntimeError, match="layer 4 was written, and the write is lost"):
                mine.loss(0)

    simulated(run)


def test_a_tensor_that_left_its_slot_is_noticed() -> None:
    def run(mine: Rank) -> None:
        mine.layers[1].weight.data = mine.layers[1].weight.data.clone()
        with pytest.raises(RuntimeError, match=r"layer 1: both .* left its flat buffer"):
            mine.sharded.flat.check_memory()

    simulated(run)


def test_frozen_tensors_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 0: it is not contiguous"):
        frozen_specs({"layer 0: it": [torch.zeros(4, 4).t()]})


# -- loading ----------------------------------------------------------------------------------------


@torch.no_grad()
def write_and_fail(sharded: ShardedModel, tensor: Tensor) -> None:
    with sharded.writing_full_model():
        tensor.mul_(2)
        raise ArithmeticError


def test_writes_to_the_full_model_reach_the_shards() -> None:
    def run(mine: Rank) -> None:
        full_model = mine.full_model()
        before = values(full_model)
        mine.sharded.gathers.invalidate_full_parameters()  # something else used its memory
        full_model[3].both.fill_(7.0)
        full_model[3].trained.fill_(7.0)
        with mine.sharded.writing_full_model(), torch.no_grad():
            full_model[2].weight.mul_(2)
        assert mine.sharded.gathers.stale() is None
        assert same(values(full_model), before)
        x = inputs(0, 0)
        expected = build()
        with torch.no_grad():
            expected[2].weight.mul_(2)
            assert torch.equal(mine.model(x), expected(x))
            assert torch.equal(full_model(x), expected(x))
        with pytest.raises(ArithmeticError):
            write_and_fail(mine.sharded, full_model[2].weight)
        assert "do not hold" in str(mine.sharded.gathers.stale())
        mine.sharded.gather()
        with torch.no_grad():
            assert torch.equal(full_model(x), expected(x))

    simulated(run)
