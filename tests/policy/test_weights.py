"""Weight slots swap other weights into the same memory, and afterwards the former ones back, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.model import Decoder
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import SlotError, WeightSlots
from rollgraph.policy.weights import Location
from tests.policy.small_worker import make_model


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def sharded(request: pytest.FixtureRequest) -> Iterator[ShardedModel]:
    """Has several buckets, so that an exchange can fail between two of them."""
    device = request.param
    sharded = ShardedModel(make_model().to(device), World(0, 1, device), bucket_bytes=4096)
    assert len(sharded.flat.buckets) >= 4
    yield sharded
    sharded.close()


@pytest.fixture(params=["device", pytest.param("host", marks=pytest.mark.gpu)])
def location(request: pytest.FixtureRequest) -> Location:
    return request.param


@pytest.fixture
def slots(sharded: ShardedModel, location: Location) -> WeightSlots:
    """The reference has the initial weights; the policy has others."""
    slots = WeightSlots(sharded)
    slots.save("reference", location)
    change(sharded)
    return slots


def change(sharded: ShardedModel) -> None:
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.add_(torch.randn_like(parameter))


def bits(sharded: ShardedModel) -> list[Tensor]:
    return [bucket.parameters.clone().view(torch.int32) for bucket in sharded.flat.buckets]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # slots in host memory are written on a side stream
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True))


def addresses(sharded: ShardedModel) -> list[int]:
    return [parameter.data_ptr() for parameter in sharded.model.parameters()]


def hidden(model: Decoder) -> Tensor:
    device = model.embed_tokens.weight.device
    ids = torch.arange(10, device=device)
    with torch.no_grad():
        return model(ids, ids, torch.tensor([0, 10], dtype=torch.int32, device=device), 10)


def test_a_slot_is_exchanged_in_place_and_the_policy_is_restored(sharded: ShardedModel, location: Location) -> None:
    slots = WeightSlots(sharded)
    original, before = copy.deepcopy(sharded.model), bits(sharded)
    slots.save("reference", location)
    change(sharded)
    policy, addresses_before, trained = bits(sharded), addresses(sharded), hidden(sharded.model)
    for _ in range(3):
        with slots.use("reference"):
            assert slots.current == "reference"
            assert same(bits(sharded), before)
            assert torch.equal(hidden(sharded.model), hidden(original))
            assert addresses(sharded) == addresses_before
        assert slots.current == "policy"
        assert same(bits(sharded), policy)
    assert torch.equal(hidden(sharded.model), trained)
    assert not torch.equal(trained, hidden(original))
    sharded.flat.check()


def test_nan_and_negative_zero_are_restored_too(sharded: ShardedModel, slots: WeightSlots) -> None:
    with torch.no_grad():
        sharded.model.norm[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    policy = bits(sharded)
    with slots.use("reference"):
        assert sharded.model.norm.isfinite().all()
    assert same(bits(sharded), policy)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_policy_is_restored_after_an_exception(
    sharded: ShardedModel, slots: WeightSlots, error: type[BaseException]
) -> None:
    policy = bits(sharded)
    with pytest.raises(error), slots.use("reference"):
        raise error
    assert slots.current == "policy"
    assert same(bits(sharded), policy)
    with slots.use("reference"):
        assert not same(bits(sharded), policy)
    assert same(bits(sharded), policy)


@pytest.mark.parametrize("index", [0, 2, -1])
@pytest.mark.parametrize("elements", [1, 3], ids=["one element, which broadcasts", "three elements"])
def test_an_exchange_that_fails_halfway_is_undone(
    sharded: ShardedModel, slots: WeightSlots, index: int, elements: int
) -> None:
    """A slot of the wrong shape fails before the bucket is written; one with a single element fails after it."""
    policy = bits(sharded)
    slot = slots._slots["reference"]
    whole = slot[index]
    reference = [tensor.clone() for tensor in slot]
    slot[index] = torch.full((elements,), 5.0, device=whole.device, pin_memory=whole.is_pinned())
    with pytest.raises(RuntimeError, match=r"size|shape"), slots.use("reference"):
        pytest.fail("the body ran with half of the weights")
    assert slots.current == "policy"
    assert same(bits(sharded), policy)
    slot[index] = whole
    assert same(slot, reference)
    with slots.use("reference"):
        assert same(bits(sharded), [tensor.view(torch.int32) for tensor in reference])
    assert same(bits(sharded), policy)


def test_using_the_current_slot_changes_nothing(sharded: ShardedModel, slots: WeightSlots) -> None:
    policy = bits(sharded)
    with slots.use("policy"):
        assert same(bits(sharded), policy)
        with slots.use("reference"):  # allowed inside the use of the policy
            inside = bits(sharded)
            with pytest.raises(ValueError, match="inner"), slots.use("reference"):
                raise ValueError("inner")
            with slots.use("reference"):
                assert same(bits(sharded), inside)
            assert slots.current == "reference"
            assert same(bits(sharded), inside)
    assert same(bits(sharded), policy)


def test_only_one_slot_can_be_in_the_model(sharded: ShardedModel, slots: WeightSlots) -> None:
    slots.save("previous")
    policy = bits(sharded)
    with slots.use("reference"):
        inside = bits(sharded)
        for name in ("previous", "policy", "nothing"):
            with (
                pytest.raises(SlotError, match="'reference' is in the model: leave it before you use"),
                slots.use(name),
            ):
                pytest.fail("entered")
        for name in ("previous", "reference", "another"):
            with pytest.raises(SlotError, match="while 'reference' is in the model"):
                slots.save(name)
        with pytest.raises(SlotError, match="'reference' is in the model now"):
            slots.drop("reference")
        assert same(bits(sharded), inside)
    assert same(bits(sharded), policy)
    assert "another" not in slots


def test_saving_a_slot_again_reuses_its_memory(sharded: ShardedModel, slots: WeightSlots) -> None:
    addresses_before = [tensor.data_ptr() for tensor in slots._slots["reference"]]
    slots.save("reference")
    assert [tensor.data_ptr() for tensor in slots._slots["reference"]] == addresses_before
    policy = bits(sharded)
    change(sharded)
    with slots.use("reference"):
        assert same(bits(sharded), policy)


def test_unknown_and_reserved_slot_names(sharded: ShardedModel, slots: WeightSlots) -> None:
    slots.save("previous", location="host")
    assert slots.nbytes("device") + slots.nbytes("host") == 2 * sum(b.parameters.nbytes for b in sharded.flat.buckets)
    with pytest.raises(SlotError, match=r"no slot 'nothing'.*slots: reference, previous"), slots.use("nothing"):
        pytest.fail("entered")
    with pytest.raises(SlotError, match="'policy' is the model itself"):
        slots.save("policy")
    with pytest.raises(SlotError, match="'policy' is in the model now"):
        slots.drop("policy")
    assert "policy" in slots
    slots.drop("previous")
    slots.drop("previous")
    assert "previous" not in slots
    assert slots.nbytes("device") + slots.nbytes("host") == sum(b.parameters.nbytes for b in sharded.flat.buckets)
    slots.drop("reference")
    with pytest.raises(SlotError, match="slots: none"), slots.use("reference"):
        pytest.fail("entered")


def test_verify_detects_a_change_of_the_policy_while_it_is_swapped_out(
    sharded: ShardedModel, location: Location
) -> None:
    slots = WeightSlots(sharded, verify=True)
    slots.save("reference", location)
    change(sharded)
    with slots.use("reference"):
        change(sharded)  # changes the reference, not the policy
    changed = pytest.raises(SlotError, match="the policy is not what it was before 'reference' was used")
    with changed, slots.use("reference"):
        if slots._host_swap is not None:
            slots._host_swap.synchronize()
        slots._slots["reference"][1][0] += 1  # which holds the policy now
    assert slots.current == "policy"


@pytest.mark.gpu
def test_exchanges_with_host_memory_keep_their_order_with_other_work(sharded: ShardedModel) -> None:
    """The host does not wait: a long computation is still running when the exchange of its weights is queued."""
    if not sharded.flat.buckets[0].parameters.is_cuda:
        pytest.skip("only a GPU runs asynchronously")
    slots = WeightSlots(sharded)
    slots.save("reference", "host")
    busy = torch.randn(4096, 4096, device="cuda")
    norms, expected = [], []
    for turn in range(6):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        sharded.model.norm.data.fill_(turn)  # an update that is queued behind the computation
        with slots.use("reference"):
            norms.append(sharded.model.norm.clone())
        norms.append(sharded.model.norm.clone())
        expected += [None, float(turn)]
    reference = norms[0]
    for norm, value in zip(norms, expected, strict=True):
        assert torch.equal(norm, reference if value is None else torch.full_like(norm, value))


def test_a_checksum_depends_on_every_bit_of_every_bucket(sharded: ShardedModel) -> None:
    slots = WeightSlots(sharded)
    whole = slots.checksum()
    assert whole == slots.checksum()
    checksums = {whole}
    for bucket in sharded.flat.buckets:
        words = bucket.parameters.view(torch.int32)
        for index in (0, 1, len(words) // 2, len(words) - 1):
            for bit in range(32):
                mask = torch.tensor(1 << bit).to(torch.int32).to(words.device)
                words[index] ^= mask
                checksums.add(slots.checksum())
                words[index] ^= mask
    assert len(checksums) == 1 + len(sharded.flat.buckets) * 4 * 32
    assert slots.checksum() == whole


def test_a_checksum_depends_on_the_order_of_values(sharded: ShardedModel) -> None:
    """With round numbers at distances of powers of two, differences are in the highest bits only."""
    slots = WeightSlots(sharded)
    flat = next(bucket.parameters for bucket in sharded.flat.buckets if len(bucket.parameters) >= 1030)
    for distance in (1, 2, 512, 1024):
        for index in (0, 1):
            flat[index], flat[index + distance] = 1.0, 2.0
            before = slots.checksum()
            flat[index], flat[index + distance] = 2.0, 1.0
            assert slots.checksum() != before


def test_nothing_is_trained_or_saved_while_another_slot_is_in_the_model(
    sharded: ShardedModel, slots: WeightSlots, tmp_path: Path
) -> None:
    optimizer = ShardedAdamW(sharded, 0.1)
    calls = (
        optimizer.step,
        optimizer.read_shards,
        lambda: save(tmp_path / "checkpoint", sharded, optimizer),
        lambda: load(tmp_path / "checkpoint", sharded, optimizer),
    )
    policy, masters = bits(sharded), [master.detach().clone() for master in optimizer.masters]
    with slots.use("reference"):
        for call in calls:
            with pytest.raises(RuntimeError, match="the weights in the model are 'reference'"):
                call()
    assert same(bits(sharded), policy)
    assert same(optimizer.masters, masters)
    optimizer.step()


def test_a_parameter_that_left_its_memory_cannot_be_exchanged(sharded: ShardedModel, slots: WeightSlots) -> None:
    parameter = sharded.model.embed_tokens.weight
    data, reference = parameter.data, bits(sharded)
    parameter.data = data.clone()
    for call in (lambda: slots.save("other"), lambda: slots.use("reference").__enter__()):
        with pytest.raises(RuntimeError, match=r"embed_tokens.weight left its flat buffer"):
            call()
    parameter.data = data
    assert same(bits(sharded), reference)
