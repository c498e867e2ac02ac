"""Sharded parameters: layers take turns in a ring of slots, and the bits are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rollgraph.checkpoint.load import load, load_parameters
from rollgraph.checkpoint.write import save
from rollgraph.graph import GraphPool, StaleGraph, make_graphed_callables
from rollgraph.parallel.data.bucket_plan import plan_buckets, plan_memory, specs_of
from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.data.together import StepAborted
from rollgraph.parallel.fsdp.full_parameters import RingGathers
from rollgraph.parallel.fsdp.layout import names_in, plan_ring, plan_units
from rollgraph.parallel.fsdp.ring import Ring
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from tests.parallel.lockstep import Room, RoomCollectives, run_ranks
from tests.parallel.small_net import DECAY, RATE, loss, microbatch, same, values
from tests.parallel.worlds import one_thread, run_world

STEPS = 3
LAYERS = 5


def ring_of(sharded: ShardedModel) -> Ring:
    assert isinstance(sharded.gathers, RingGathers)
    return sharded.gathers.ring


class Deep(nn.Module):
    """Five layers of three widths; outside of them a frozen layer, tied weights and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.ModuleList()
        for index in range(LAYERS):
            wide = 8 * (1 + index % 3)
            self.layers.append(nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, 8)))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.frozen(x) * self.scale)  # type: ignore[no-any-return]


def build() -> Deep:
    model = Deep()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (index + 1))
    return model


class Rank:
    """One of several ranks, with sharded parameters; a simulated rank has a room.

    A process captures one graph at a time, so only ranks in processes of their own have graphs.
    """

    def __init__(self, world: World, room: Room | None = None, *, backend: Any = None, **options: Any) -> None:
        self.model = build()
        self.layers = list(self.model.layers)
        settings = {"shard": "parameters", "units": self.layers, "reduction": "ordered", **options}
        if room is not None:
            settings["collectives"] = RoomCollectives(room, world.rank)
        self.sharded = ShardedModel(self.model, world, **settings)
        self.optimizer = ShardedAdamW(self.sharded, RATE, weight_decay=DECAY)
        self.pool = GraphPool()
        if backend is not None:
            self.hooks = [self.sharded.graph_hooks(layer) for layer in self.layers]
            make_graphed_callables(
                tuple(self.layers),
                ((torch.zeros(2, 5, 8, requires_grad=True),),) * LAYERS,
                pool=self.pool,
                backend=backend,
                hooks=self.hooks,
                guards=[self.sharded.gathers.guards_of(layer) for layer in self.layers],
                grad_buffers=self.sharded.flat.grad_buffers,
            )

    @property
    def rank(self) -> int:
        return self.sharded.world.rank

    def loss(self, step: int, number: int = 0) -> Tensor:
        return loss(self.model, microbatch(step, self.rank, number))

    def step(self, step: int, accumulation: int = 1) -> None:
        for number in range(accumulation):
            self.loss(step, number).backward()
        self.sharded.gradients.finish()
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        """All parameters, from a full copy."""
        full_model = self.sharded.make_full_model()
        self.sharded.gather()
        return values(full_model)

    def close(self) -> None:
        self.pool.reset()
        self.sharded.close()
        assert not any(m._forward_pre_hooks or m._backward_pre_hooks for m in self.model.modules())


def simulated(function: Callable[[Rank], Any], ranks: int = 2, **options: Any) -> list[Any]:
    """The results of a function on several simulated ranks."""

    def run(rank: int, room: Room) -> Any:
        return function(Rank(World(rank, ranks, "cpu"), room, **options))

    return run_ranks(ranks, run)


def reference(ranks: int, accumulation: int, steps: int = STEPS) -> dict[str, Tensor]:
    """One process that runs the first microbatch of each rank, then the second of each, and sums in that order."""
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(RATE), fused=True, capturable=True)
    for step in range(steps):
        sums = [torch.zeros_like(p) for p in trained]
        for number in range(accumulation):
            for rank in range(ranks):
                gradients = torch.autograd.grad(loss(model, microbatch(step, rank, number)), trained)
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add_(gradient)
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = total.div_(ranks)
        optimizer.step()
    return values(model)


class Case(NamedTuple):
    accumulation: int
    slots: int
    overlap: bool
    backend: str | None


def train(mine: Rank, case: Case) -> dict[str, Tensor]:
    for step in range(STEPS):
        mine.step(step, case.accumulation)
    weights = mine.values()
    mine.sharded.flat.check()
    if case.backend == "tape":
        report = mine.pool.report()
        assert report.eager_runs == 0
        assert report.replays == LAYERS * STEPS * case.accumulation
    mine.close()
    return weights


@pytest.mark.parametrize(
    ("ranks", "accumulation", "slots", "overlap"), [(2, 1, 2, True), (3, 2, 2, True), (2, 3, 1, True), (2, 2, 3, False)]
)
def test_sharded_ranks_have_the_bits_of_one_process(ranks: int, accumulation: int, slots: int, overlap: bool) -> None:
    case = Case(accumulation, slots, overlap, None)
    expected = reference(ranks, accumulation)
    for weights in simulated(
        lambda mine: train(mine, case), ranks, slots=slots, overlap_gather=overlap, overlap_reduce=overlap
    ):
        assert same(weights, expected)


CASES = [
    Case(2, 2, True, "tape"),
    Case(1, 1, True, "tape"),
    Case(2, 3, False, "tape"),
    Case(2, 2, True, "eager"),
    Case(2, 2, True, None),
]


def run_cases(world: World) -> tuple[list[dict[str, Tensor]], list[str]]:
    results = []
    for case in CASES:
        mine = Rank(
            world, slots=case.slots, overlap_gather=case.overlap, overlap_reduce=case.overlap, backend=case.backend
        )
        results.append(train(mine, case))
    return results, find_refusals(Rank(world, backend="tape"))


def find_refusals(mine: Rank) -> list[str]:
    """Why graphs refuse to run without their hooks.

    `forward` is called directly, so no hook of a module runs, only the hooks of the graphs.
    """
    x = torch.ones(2, 5, 8, requires_grad=True)
    total = mine.layers[0].forward(x).sum()
    mine.sharded.ensure_gathered(list(mine.layers[2].parameters()))

    def reason(call: Callable[[], Any]) -> str:
        with pytest.raises(StaleGraph) as refused:
            call()
        return str(refused.value)

    with ExitStack() as paused:
        for hooks in mine.hooks:
            paused.enter_context(hooks.paused())
        reasons = [reason(lambda: mine.layers[4].forward(x)), reason(partial(total.backward, retain_graph=True))]
        mine.sharded.ensure_gathered(list(mine.layers[0].parameters()))
        reasons.append(reason(partial(total.backward, retain_graph=True)))
    total.backward()
    assert x.grad is not None
    mine.sharded.gradients.drop()
    return reasons


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_graphs_have_the_bits_of_one_process_and_refuse_other_layers(ranks: int, tmp_path: Path) -> None:
    """Layers 0, 2 and 4 share a slot: without a gather, a graph would read another layer, silently."""
    for result in run_world(ranks, tmp_path, run_cases):
        assert not isinstance(result, str), result
        weights_of_cases, (forward, backward, gradients) = result
        for case, weights in zip(CASES, weights_of_cases, strict=True):
            with one_thread():
                expected = reference(ranks, case.accumulation)
            assert same(weights, expected), case
        assert "slot 0 holds layer 2, not layer 4" in forward
        assert "slot 0 holds layer 2, not layer 0" in backward
        assert "the gradients in slot 0 are none, and cannot be those of layer 0 yet" in gradients


@pytest.mark.parametrize(
    ("slots", "ahead", "order"),
    [
        (2, True, "g0 g1 g2 g3 g4 r4 g2 r3 g1 r2 g0 r1 r0 r5"),
        (2, False, "g0 g1 g2 g3 g4 r4 r3 g2 r2 g1 r1 g0 r0 r5"),
        (1, True, "g0 g1 g2 g3 g4 r4 g3 r3 g2 r2 g1 r1 g0 r0 r5"),
        (3, True, "g0 g1 g2 g3 g4 r4 g1 r3 g0 r2 r1 r0 r5"),
    ],
)
def test_each_layer_is_gathered_ahead_and_only_if_it_left_its_slot(slots: int, ahead: bool, order: str) -> None:
    """With 2 slots, layer 2 is gathered while layer 1 runs, and again while the backward of layer 3 does."""

    def run(mine: Rank) -> str:
        mine.loss(0).backward()
        started = [entry.split() for entry in ring_of(mine.sharded).started]
        mine.sharded.gradients.drop()
        return " ".join(f"{kind[0]}{unit}" for kind, unit, bucket in started)

    assert simulated(run, slots=slots, overlap_gather=ahead) == [order, order]


# -- refusals ---------------------------------------------------------------------------------------


def test_a_backward_without_a_second_gather_is_refused() -> None:
    """Layers 0, 2 and 4 share a slot, so without the hook the backward of layer 2 would read layer 4, silently."""

    def run(mine: Rank) -> str:
        hidden = torch.ones(2, 5, 8, requires_grad=True)
        for layer in mine.layers:
            hidden = layer(hidden)
            if layer is mine.layers[2]:
                after_layer_2 = hidden
        with mine.sharded.paused(gather=False), pytest.raises(StaleWeights) as refused:
            after_layer_2.sum().backward()
        mine.sharded.gradients.drop()
        return str(refused.value)

    for reason in simulated(run):
        assert "slot 0 holds layer 4, not layer 2" in reason


def test_a_backward_across_an_optimizer_step_raises() -> None:
    def run(mine: Rank) -> None:
        early = mine.loss(7)
        mine.step(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        mine.sharded.gradients.drop()

    simulated(run)


def test_a_layer_outside_its_slot_does_not_run_during_a_pause() -> None:
    def run(mine: Rank) -> None:
        with torch.no_grad():
            mine.loss(0)
            with mine.sharded.paused(gather=False), pytest.raises(StaleWeights, match="slot 0 holds layer 4, not lay"):
                mine.loss(0)
            mine.loss(0)

    simulated(run)


def test_gradients_computed_during_a_pause_are_refused() -> None:
    def run(mine: Rank) -> None:
        with torch.no_grad():
            mine.loss(0)
        with mine.sharded.paused(gather=False):
            with pytest.raises(StaleWeights, match="cannot be those of layer 4 yet"):
                mine.layers[4](torch.ones(2, 5, 8)).sum().backward()
            mine.model.head(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="outside of layers was computed while hooks were paused"):
            mine.sharded.gradients.finish()
        mine.sharded.gradients.drop()
        mine.step(0)

    simulated(run)


def test_sharded_parameters_are_not_read_or_written_as_a_full_model() -> None:
    def run(mine: Rank) -> None:
        with pytest.raises(StaleWeights, match="make_full_model"):
            mine.model.state_dict()
        with pytest.raises(StaleWeights, match=r"flat\.load"):
            mine.model.load_state_dict(build().state_dict())
        with pytest.raises(StaleWeights, match="make_full_model"):
            mine.sharded.require_full_parameters("raise")

    simulated(run)


def test_a_write_to_a_layer_in_its_slot_is_not_lost_silently() -> None:
    def run(mine: Rank) -> None:
        before = mine.values()
        with torch.no_grad():
            mine.loss(0)
            mine.layers[4][0].weight.mul_(2)
            with pytest.raises(RuntimeError, match="a parameter of layer 4 was written, and the write is lost"):
                mine.loss(0)
            output = mine.loss(0)
            full_model = mine.sharded.make_full_model()
            assert torch.equal(output, loss(full_model, microbatch(0, mine.rank, 0)))
        mine.loss(1).backward()
        mine.sharded.gradients.finish()
        with torch.no_grad():
            mine.layers[0][0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="a parameter of layer 0 was written"):
            mine.optimizer.step()
        assert same(before, values(build()))

    simulated(run)


# -- aborted steps ----------------------------------------------------------------------------------


def fail(*_: Any) -> None:
    raise ArithmeticError("made to fail")


@pytest.mark.parametrize("failing_ranks", [(1,), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("moment", ["forward", "backward", "second backward", "end"])
def test_an_aborted_step_leaves_nothing_for_the_next_one(moment: str, failing_ranks: tuple[int, ...]) -> None:
    """Ranks fail at different layers, or not at all, so that they have started different collectives."""

    def run(mine: Rank) -> tuple[str, dict[str, Tensor]]:
        mine.step(0)
        failing = mine.rank in failing_ranks
        layer, handle = mine.layers[mine.rank + 1], None
        try:
            if moment == "second backward":
                mine.loss(9).backward()
            if failing and moment == "forward":
                handle = layer.register_forward_hook(fail)
            value = mine.loss(9, 1)
            if failing and moment.endswith("backward"):
                handle = layer[0].weight.register_hook(fail)
            value.backward()
            if failing and moment == "end":
                fail()
            mine.sharded.gradients.finish()
            raised = ""
        except (ArithmeticError, StepAborted) as error:
            raised = type(error).__name__
            mine.sharded.gradients.drop()
        if handle is not None:
            handle.remove()
        mine.step(1)
        return raised, mine.values()

    expected = reference(3, 1, steps=2)
    for rank, (raised, weights) in enumerate(simulated(run, ranks=3)):
        assert raised == "StepAborted" or (raised == "ArithmeticError" and rank in failing_ranks)
        assert same(weights, expected)


def test_ranks_continue_after_a_rank_was_lost(tmp_path: Path) -> None:
    """All memory stays where it is. Collectives in flight and half a step are forgotten."""
    second = Room(2)

    def run(mine: Rank) -> dict[str, Tensor]:
        ring, collectives = ring_of(mine.sharded), mine.sharded.collectives
        assert isinstance(collectives, RoomCollectives)
        mine.values()
        mine.step(0)
        save(tmp_path / "step", mine.sharded, mine.optimizer)
        mine.loss(5).backward()
        addresses = [parameter.data_ptr() for parameter in mine.model.parameters()]
        ring.after_writing()
        ring._start_gather(ring.units[mine.rank])  # each rank starts a different one, and none waits for it
        collectives.enter(second)
        mine.sharded.rejoin(World(mine.rank, 2, "cpu"))
        load(tmp_path / "step", mine.sharded, mine.optimizer)
        mine.step(1)
        assert [parameter.data_ptr() for parameter in mine.model.parameters()] == addresses
        return mine.values()

    expected = reference(2, 1, steps=2)
    for weights in simulated(run):
        assert same(weights, expected)


# -- contents ---------------------------------------------------------------------------------------


def test_weights_are_loaded_saved_and_restored_by_shards() -> None:
    def run(mine: Rank) -> tuple[dict[str, Tensor], ...]:
        first = mine.values()
        snapshot = mine.sharded.flat.snapshot()
        mine.step(0)
        second = mine.values()
        mine.sharded.flat.restore(snapshot)
        third = mine.values()
        mine.sharded.flat.load(second)
        return first, second, third, mine.values()

    for first, second, third, fourth in simulated(run, ranks=3):
        assert same(first, values(build()))
        assert same(first, third)
        assert same(second, fourth)
        assert not same(first, second)


def test_a_full_model_is_stale_after_a_step_until_the_next_gather() -> None:
    def run(mine: Rank) -> None:
        full_model = mine.sharded.make_full_model()
        ids = microbatch(0, 0, 0)
        reasons = [mine.sharded.gathers.stale()]
        mine.sharded.gather()
        reasons.append(mine.sharded.gathers.stale())
        with torch.no_grad():
            assert torch.equal(full_model(ids), mine.model(ids))
        addresses = [parameter.data_ptr() for parameter in full_model.parameters()]
        mine.step(0)
        reasons.append(mine.sharded.gathers.stale())
        mine.sharded.gather()
        with torch.no_grad():
            assert torch.equal(full_model(ids), mine.model(ids))
        mine.sharded.gathers.invalidate_full_parameters()
        reasons.append(mine.sharded.gathers.stale())
        assert [parameter.data_ptr() for parameter in full_model.parameters()] == addresses
        assert "the full parameters do not hold layer 0" in str(reasons[0])
        assert reasons[1] is None
        assert "holds the parameters outside of layers of version 0" in str(reasons[2])
        assert "the full parameters do not hold layer 0" in str(reasons[3])

    simulated(run)


def pieces(optimizer: ShardedAdamW) -> dict[tuple[str, str, int], Tensor]:
    """A copy of the optimizer's state, by parameter, field and start."""
    tensors = {}
    for piece in optimizer.parameter_states:
        for name, tensor in piece.fields.items():
            tensors[piece.parameter.name, name, piece.start] = tensor.clone()
    return tensors


def join(ranks: Iterable[dict[tuple[str, str, int], Tensor]]) -> dict[tuple[str, str], Tensor]:
    """The optimizer's state of all ranks, by parameter and field."""
    together = {key: tensor for of_rank in ranks for key, tensor in of_rank.items()}
    joined: dict[tuple[str, str], list[Tensor]] = {}
    for name, field_name, start in sorted(together):
        joined.setdefault((name, field_name), []).append(together[name, field_name, start])
    return {key: torch.cat(parts) for key, parts in joined.items()}


def test_checkpoints_load_in_every_layout_with_any_number_of_ranks(tmp_path: Path) -> None:
    """From three ranks with shards to two with whole parameters, to two with shards, to one, and to three again."""

    def begin(mine: Rank) -> tuple[Any, Any]:
        mine.step(0)
        with torch.no_grad():
            mine.model.frozen.weight.fill_(0.5)
        save(tmp_path / "0", mine.sharded, mine.optimizer)
        return mine.values(), pieces(mine.optimizer)

    def go_on(mine: Rank, source: str, target: str) -> tuple[Any, Any]:
        mine.loss(5).backward()
        mine.sharded.gradients.drop()
        load(tmp_path / source, mine.sharded, mine.optimizer)
        save(tmp_path / target, mine.sharded, mine.optimizer)
        return mine.values(), pieces(mine.optimizer)

    first = simulated(begin, ranks=3)
    weights, state = first[0][0], join(of_rank for _, of_rank in first)
    layouts = [(2, "optimizer"), (2, "parameters"), (1, "parameters"), (3, "parameters")]
    for number, (ranks, shard) in enumerate(layouts):
        move = partial(go_on, source=str(number), target=str(number + 1))
        results = simulated(move, ranks=ranks, shard=shard)
        assert join(of_rank for _, of_rank in results).keys() == state.keys()
        assert same(join(of_rank for _, of_rank in results), state)  # type: ignore[arg-type]
        for loaded, _ in results:
            assert same(loaded, weights)
    mine = build()
    load_parameters(tmp_path / "4", mine)
    assert same(values(mine), weights)


def storages(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages behind tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_the_planned_memory(ranks: int) -> None:
    def run(mine: Rank) -> tuple[int, int]:
        mine.step(0)
        flat, optimizer = mine.sharded.flat, mine.optimizer
        tensors = [*mine.model.parameters(), *(bucket.resident for bucket in flat.buckets), flat.gradient_memory]
        tensors += [tensor for shard in optimizer.state.shards for tensor in shard.values()]
        held = storages(tensors)
        full_model = mine.sharded.make_full_model()
        plan = plan_units(specs_of(mine.model), names_in(mine.model, mine.layers), ranks=ranks)
        assert storages([*tensors, *full_model.parameters()]) - held == plan.full_nbytes
        assert held == mine.sharded.plan().total == plan_ring(plan, torch.float32).total
        return held, plan.num_slots

    with torch.device("meta"):
        shape = Deep()
    planned = plan_units(specs_of(shape), names_in(shape, list(shape.layers)), ranks=ranks)
    for held, slots in simulated(run, ranks=ranks):
        assert slots == 3
        assert held == plan_ring(planned, torch.float32).total


def test_with_more_ranks_each_rank_holds_less() -> None:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(32))
    model = nn.Sequential(*layers)
    size = 512 * 512
    for ranks in (2, 4, 8):
        plan = plan_units(specs_of(model), names_in(model, list(layers)), ranks=ranks)
        memory = plan_ring(plan, torch.float32)
        whole = plan_memory(plan_buckets(specs_of(model), ranks=ranks, bucket_bytes=1 << 20), torch.float32)
        assert memory.parameters == memory.gradients == (2 + 32 // ranks) * size * 4
        assert whole.parameters == whole.gradients == plan.full_nbytes == 32 * size * 4
        assert memory.optimizer == whole.optimizer


def test_one_rank_has_nothing_to_shard() -> None:
    model = build()
    sharded = ShardedModel(model, World(0, 1, "cpu"), shard="parameters", units=list(model.layers))
    assert sharded.make_full_model() is model
    assert sharded.gathers.guards_of(model.layers[0]) == []
    assert sharded.gathers.stale() is None


def test_layers_that_cannot_be_sharded_are_refused() -> None:
    model = build()
    model.layers[1][0].weight = model.layers[3][0].weight = nn.Parameter(torch.ones(16, 8))
    with pytest.raises(ValueError, match="in layers 1 and 3"):
        plan_units(specs_of(model), names_in(model, list(model.layers)), ranks=2)
    model = build()
    model.layers[2].requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers\.2.*is frozen"):
        plan_units(specs_of(model), names_in(model, list(model.layers)), ranks=2)
    with pytest.raises(ValueError, match="need layers"):
        plan_units(specs_of(model), [], ranks=2)
    with pytest.raises(ValueError, match="at least one slot"):
        plan_units(specs_of(model), names_in(model, list(model.layers)), ranks=2, slots=0)
