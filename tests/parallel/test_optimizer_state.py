"""Optimizer state in every format and place: the same bits on the host, bounded errors, exact checkpoints."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rollgraph.checkpoint.keep import Checkpoints
from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save, take_snapshot
from rollgraph.graph import capture
from rollgraph.parallel.data import bucket_plan
from rollgraph.parallel.data.bucket_plan import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES, Offload, StateFormat
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim import state as optimizer_state
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.optim.codecs import MomentCodec
from rollgraph.parallel.ranks.world import World
from tests.parallel.lockstep import Room, RoomCollectives, run_ranks
from tests.parallel.small_net import ALONE

FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "int8")
OFFLOADS: tuple[Offload, ...] = ("none", "host")
RATE = 0.01
DECAY = 0.1
ALL_STATES = pytest.mark.parametrize(("state", "offload"), list(itertools.product(FORMATS, OFFLOADS)))

Training = tuple[ShardedModel, ShardedAdamW]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the shards of a small model many chunks, which begin and end inside parameters."""
    for module in (bucket_plan, optimizer_state):
        monkeypatch.setattr(module, "CHUNK", 2 * BLOCK)


def make(
    state: StateFormat = "fp32",
    offload: Offload = "none",
    *,
    world: World = ALONE,
    room: Room | None = None,
    bucket_bytes: int = 3000,
    dtype: torch.dtype = torch.float32,
) -> Training:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 41), nn.LayerNorm(41), nn.Linear(41, 7, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    collectives = RoomCollectives(room, world.rank) if room is not None else None
    sharded = ShardedModel(
        model.to(dtype), world, bucket_bytes=bucket_bytes, collectives=collectives, reduction="ordered"
    )
    return sharded, ShardedAdamW(sharded, RATE, weight_decay=DECAY, state=state, offload=offload)


def set_gradients(sharded: ShardedModel, step: int) -> None:
    """Gradients of very different sizes, the same on all ranks."""
    names = {parameter: name for name, parameter in sharded.model.named_parameters()}
    for parameter, gradient in sharded.flat.grad_buffers.items():
        generator = torch.Generator().manual_seed(1000 * step + len(names[parameter]) + parameter.numel())
        sizes = 10 ** (6 * torch.rand(gradient.shape, generator=generator) - 5)
        gradient.copy_(torch.randn(gradient.shape, generator=generator) * sizes)


def train(training: Training, steps: int) -> None:
    sharded, optimizer = training
    for _ in range(steps):
        set_gradients(sharded, optimizer.steps)
        sharded.gradients.finish()
        optimizer.step()


def everything(training: Training) -> dict[str, Tensor]:
    """Parameters, master weights and moments, as bytes."""
    sharded, optimizer = training
    sharded.gather()
    tensors = {name: parameter.detach() for name, parameter in sharded.model.named_parameters()}
    for piece in optimizer.parameter_states:
        tensors |= {f"{piece.parameter.name} {piece.start} {name}": tensor for name, tensor in piece.fields.items()}
    tensors |= {"updates": optimizer.updates, "skipped": optimizer.skipped}
    return {name: tensor.flatten().view(torch.uint8).clone() for name, tensor in tensors.items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


# -- updates ---------------------------------------------------------------------------------------


def test_fp32_state_has_the_bits_of_adamw() -> None:
    training = make()
    twin = make()[0].model
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=torch.tensor(RATE), fused=True, capturable=True)
    for step in range(3):
        set_gradients(training[0], step)
        for parameter, sharded_parameter in zip(twin.parameters(), training[0].model.parameters(), strict=True):
            parameter.grad = training[0].flat.grad_buffers[sharded_parameter].clone()
        training[0].gradients.finish()
        training[1].step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), training[0].model.parameters(), strict=True))


@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_host_has_the_same_bits(state: StateFormat, dtype: torch.dtype) -> None:
    states = []
    for offload in OFFLOADS:
        training = make(state, offload, dtype=dtype)
        train(training, 5)
        states.append(everything(training))
    assert len(training[1].state.chunks) > 2 * bucket_plan.STREAM_BUFFERS
    assert_same(*states)


@ALL_STATES
def test_a_skipped_step_changes_nothing(state: StateFormat, offload: Offload) -> None:
    """The first step, and one after others: the decision is a tensor that the host never reads."""
    training = make(state, offload)
    sharded, optimizer = training
    for steps in (0, 2):
        train(training, steps)
        before = everything(training)
        set_gradients(sharded, 9)
        next(iter(sharded.flat.grad_buffers.values())).flatten()[0] = float("nan")
        sharded.gradients.finish()
        optimizer.step()
        after = everything(training)
        assert not torch.equal(before.pop("skipped"), after.pop("skipped"))
        assert_same(before, after)


@ALL_STATES
def test_a_restart_forgets_all_moments(state: StateFormat, offload: Offload) -> None:
    training = make(state, offload)
    train(training, 2)
    sharded, optimizer = training
    sharded.flat.load(make()[0].model.state_dict())
    optimizer.read_shards()
    optimizer.restart(RATE, None)
    fresh = make(state, offload)
    assert_same(everything(training), everything(fresh))
    train(training, 2)
    train(fresh, 2)
    assert_same(everything(training), everything(fresh))


@pytest.mark.parametrize(("state", "offload"), [("fp32", "host"), ("int8", "none")])
def test_a_captured_update_has_the_bits_of_an_eager_one(state: StateFormat, offload: Offload) -> None:
    eager, captured = make(state, offload), make(state, offload)
    captured[1].update = capture(captured[1].update)  # type: ignore[method-assign]
    train(eager, 3)
    train(captured, 3)
    assert_same(everything(eager), everything(captured))


def bounds_after(steps: int, mantissa: int, blocks: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The least and greatest weights that AdamW can reach in float64 if each moment is rounded after each step.

    A rounded moment is off by less than 2^-mantissa of itself and, in blocks, by the smallest code if it lies below it.
    """
    sharded, _ = make()
    lows, highs = {}, {}
    for name, parameter in sharded.model.named_parameters():
        low = high = parameter.detach().double().flatten()
        m_low = m_high = v_low = v_high = torch.zeros_like(low)
        decay = DECAY if parameter.dim() > 1 else 0.0
        for step in range(steps):
            set_gradients(sharded, step)
            gradient = sharded.flat.grad_buffers[parameter].double().flatten()
            m_low, m_high = 0.9 * m_low + 0.1 * gradient, 0.9 * m_high + 0.1 * gradient
            v_low, v_high = 0.999 * v_low + 0.001 * gradient**2, 0.999 * v_high + 0.001 * gradient**2
            corners = []
            for m, v in itertools.product((m_low, m_high), (v_low, v_high)):
                root = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                corners.append(m / (1 - 0.9 ** (step + 1)) / root)
            least, most = torch.stack(corners).amin(0), torch.stack(corners).amax(0)
            slack = 2**-20 * (low.abs() + high.abs() + RATE * (least.abs() + most.abs()))  # of fp32 arithmetic
            low = low * (1 - RATE * decay) - RATE * most - slack
            high = high * (1 - RATE * decay) - RATE * least + slack
            size = torch.maximum(m_low.abs(), m_high.abs()) * (1 + 2**-mantissa)
            error = size * 2**-mantissa + blocks * _largest_in_block(size) * 2.25 * 2**-SIGNED_OCTAVES
            m_low, m_high = m_low - error, m_high + error
            unit = blocks * _largest_in_block(v_high) * 2.25 * 2**-UNSIGNED_OCTAVES
            v_low, v_high = v_low * (1 - 2**-mantissa), v_high * (1 + 2**-mantissa) + unit
        lows[name], highs[name] = low, high
    return lows, highs


def _largest_in_block(values: Tensor) -> Tensor:
    padded = nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return padded.amax(1, keepdim=True).expand(-1, BLOCK).flatten()[: values.numel()]


@pytest.mark.parametrize(("state", "mantissa"), [("bf16", 7), ("int8", 3)])
def test_weights_stay_within_rounding_bounds(state: StateFormat, mantissa: int) -> None:
    training = make(state)
    train(training, 4)
    exact = make()
    train(exact, 4)
    lows, highs = bounds_after(4, mantissa, blocks=state == "int8")
    full = dict(exact[0].model.named_parameters())
    for name, parameter in training[0].model.named_parameters():
        assert not torch.equal(parameter, full[name])
        for trained in (parameter, full[name]):
            weights = trained.detach().double().flatten()
            assert torch.all((lows[name] <= weights) & (weights <= highs[name])), name


# -- checkpoints -----------------------------------------------------------------------------------


@ALL_STATES
def test_a_checkpoint_resumes_exactly(state: StateFormat, offload: Offload, tmp_path: Path) -> None:
    """With other buckets, from the host to the device and back, and saved in the background."""
    first = make(state, offload)
    train(first, 2)
    checkpoints = Checkpoints(tmp_path / "run", *first)
    checkpoints.save(2, {})
    train(first, 2)  # waits for the writer if the state is lent to it
    checkpoints.close()
    for new_offload in OFFLOADS:
        second = make(state, new_offload, bucket_bytes=10**6)
        reader = Checkpoints(tmp_path / "run", *second, writes=False)
        latest = reader.latest()
        assert latest is not None
        reader.load(latest)
        train(second, 2)
        if state == "fp32":  # random bits depend on the place of an element in the buckets
            assert_same(everything(first), everything(second))
        third = make(state, new_offload)
        Checkpoints(tmp_path / "run", *third, writes=False).load(latest)
        train(third, 2)
        assert_same(everything(first), everything(third))


@pytest.mark.parametrize("state", FORMATS)
def test_a_checkpoint_of_three_ranks_has_the_same_codes_on_one(state: StateFormat, tmp_path: Path) -> None:
    def work(rank: int, room: Room) -> dict[str, Tensor]:
        training = make(state, world=World(rank, 3, "cpu"), room=room)
        train(training, 2)
        save(tmp_path / "c", *training)
        load(tmp_path / "c", *training)
        return everything(training)

    saved = run_ranks(3, work)
    alone = make(state)
    load(tmp_path / "c", *alone)
    for piece in alone[1].parameter_states:
        for field in bucket_plan.state_fields(state):
            parts = []
            for tensors in saved:
                for name, tensor in tensors.items():
                    if name.startswith(f"{piece.parameter.name} ") and name.endswith(f" {field.name}"):
                        parts.append((int(name.split()[1]), tensor))
            together = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
            assert torch.equal(together, piece.fields[field.name].view(torch.uint8)), (piece.parameter.name, field)


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_state_of_another_format_is_converted(state: StateFormat, tmp_path: Path) -> None:
    """The conversion to fp32 is exact, so converting back restores the same codes."""
    short = make(state)
    train(short, 3)
    save(tmp_path / "short", *short)
    full = make("fp32", "host", bucket_bytes=10**6)
    load(tmp_path / "short", *full)
    for piece, stored in zip(full[1].parameter_states, _in_order(short, full), strict=True):
        padded = -(-piece.elements // BLOCK) * BLOCK
        moments = torch.empty(padded), torch.empty(padded)
        fields = {
            field.name: nn.functional.pad(stored[field.name], (0, field.entries(padded) - len(stored[field.name])))
            for field in bucket_plan.state_fields(state)
        }
        MomentCodec(state, "cpu").decode(fields, *moments)
        assert torch.equal(piece.state["exp_avg"], moments[0][: piece.elements])
        assert torch.equal(piece.state["exp_avg_sq"], moments[1][: piece.elements])
    save(tmp_path / "full", *full)
    again = make(state)
    load(tmp_path / "full", *again)
    assert_same(everything(short), everything(again))


def _in_order(training: Training, target: Training) -> list[dict[str, Tensor]]:
    """The fields of each piece, in the order of another optimizer's pieces."""
    by_name = {piece.parameter.name: piece.fields for piece in training[1].parameter_states}
    return [by_name[piece.parameter.name] for piece in target[1].parameter_states]


def test_an_update_waits_until_lent_state_is_written() -> None:
    """A snapshot lends state on the host to the writer instead of copying it."""
    training = make("fp32", "host")
    train(training, 1)
    snapshot = take_snapshot(*training)
    state = {tensor.untyped_storage().data_ptr() for shard in training[1].state.shards for tensor in shard.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in snapshot.shard.values()} <= state
    before = {name: tensor.clone() for name, tensor in snapshot.shard.items()}
    update = threading.Thread(target=train, args=(training, 1), daemon=True)
    update.start()
    update.join(0.1)
    assert update.is_alive()
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.shard.items())
    snapshot.release()
    update.join(60)
    assert not update.is_alive()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in snapshot.shard.items())
