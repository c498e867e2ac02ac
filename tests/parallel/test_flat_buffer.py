"""Flat buffers: the layout by itself, and models whose parameters live in it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollgraph.graph import capture, make_graphed_callables
from rollgraph.parallel.data.bucket_plan import ALIGNMENT, ParameterSpec, plan_buckets, specs_of
from rollgraph.parallel.data.flat_buffer import FlatBuckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
shapes = st.lists(st.integers(0, 40), max_size=3).map(torch.Size)
parameters = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [ParameterSpec((f"p{i}",), *one) for i, one in enumerate(drawn)]
)


@given(parameters, st.integers(1, 5), st.integers(1, 20_000))
def test_the_layout_of_any_parameters(specs: list[ParameterSpec], ranks: int, bucket_bytes: int) -> None:
    plan = plan_buckets(specs, ranks=ranks, bucket_bytes=bucket_bytes)
    placed = [slot.parameter for bucket in plan for slot in bucket.slots]
    assert sorted(p.name for p in placed) == sorted(p.name for p in specs)
    order = {spec.name: index for index, spec in enumerate(specs)}
    for bucket in plan:
        size = bucket.dtype.itemsize
        assert {(s.parameter.dtype, s.parameter.trainable) for s in bucket.slots} == {(bucket.dtype, bucket.trainable)}
        assert bucket.numel == bucket.shard_numel * ranks
        assert bucket.shard_numel * size % ALIGNMENT == 0
        assert all(slot.start * size % ALIGNMENT == 0 for slot in bucket.slots)
        for left, right in itertools.pairwise(bucket.slots):
            assert left.start + left.numel <= right.start  # no overlap
            assert order[left.parameter.name] > order[right.parameter.name]  # backward reaches the last one first
        assert bucket.slots[-1].start + bucket.slots[-1].numel <= bucket.numel
        before_last = sum(_round(s.numel * size) for s in bucket.slots[:-1])
        assert before_last < bucket_bytes + ALIGNMENT * len(bucket.slots)  # closed once it is full


def _round(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


class Tied(nn.Module):
    """Has tied and frozen parameters, several dtypes, a scalar, and a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 6, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.hidden(self.embedding(ids)).tanh()) * self.scale
        return self.head(self.wide(x.double()).float())  # type: ignore[no-any-return]


def build(bucket_bytes: int, ranks: int = 2) -> tuple[Tied, Tied, FlatBuckets]:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    return model, twin, FlatBuckets(model, plan_buckets(specs_of(model), ranks=ranks, bucket_bytes=bucket_bytes))


IDS = torch.arange(11).view(1, 11)


def loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**9])
def test_a_model_in_flat_buffers_trains_as_before(bucket_bytes: int) -> None:
    model, twin, flat = build(bucket_bytes)
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]) for m in (model, twin)]
    for _ in range(3):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss(one).backward()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert model.head.weight is model.embedding.weight
    flat.check()
    held = sum(b.parameters.nbytes + (b.gradients.nbytes if b.gradients is not None else 0) for b in flat.buckets)
    assert held == sum(b.plan.nbytes(torch.float32) for b in flat.buckets)


def test_the_shards_make_up_the_bucket() -> None:
    _, _, flat = build(300, ranks=3)
    for bucket in flat.buckets:
        assert torch.equal(torch.cat([bucket.shard(rank) for rank in range(3)]), bucket.parameters)
        bucket.shard(1).fill_(7)
        assert (bucket.parameters == 7).sum() >= bucket.plan.shard_numel


def test_graphs_accumulate_into_the_flat_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    flat = FlatBuckets(layer, plan_buckets(specs_of(layer), ranks=2, bucket_bytes=10**6))
    sample = torch.randn(3, 4, dtype=torch.bfloat16)
    make_graphed_callables(layer, (sample.clone().requires_grad_(),), grad_buffers=flat.grad_buffers)
    sums = [torch.zeros(p.shape) for p in twin.parameters()]
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.bfloat16)
        layer(x).sum().backward()
        gradients = torch.autograd.grad(twin(x).sum(), list(twin.parameters()))
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient
    assert all(torch.equal(flat.grad_buffers[p], s) for p, s in zip(layer.parameters(), sums, strict=True))
    assert all(p.grad is None for p in layer.parameters())
    flat.zero_gradients()
    assert not any(buffer.any() for buffer in flat.grad_buffers.values())


def test_graphs_survive_loading_and_swapping() -> None:
    model, _, flat = build(300)
    second = Tied()
    with torch.no_grad():
        graph = capture(lambda ids: model(ids), (IDS,))
        before, snapshot = graph(IDS).clone(), flat.snapshot()
        flat.load(second.state_dict())
        assert torch.equal(graph(IDS), second(IDS))
        flat.restore(snapshot)
        assert torch.equal(graph(IDS), before)
        model.load_state_dict(second.state_dict())
        assert torch.equal(graph(IDS), second(IDS))
    flat.check()


def test_loading_weights_that_do_not_fit_changes_nothing() -> None:
    model, twin, flat = build(300)
    weights = dict(Tied().state_dict())
    weights["unknown"] = weights.pop("scale")
    weights["hidden.bias"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"missing: scale; unexpected: unknown; wrong shape: hidden.bias \(7,\)"):
        flat.load(weights)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(ValueError, match="another model"):
        flat.restore(flat.snapshot()[:-1])


def test_a_moved_or_replaced_parameter_is_named() -> None:
    model, _, flat = build(300)
    model.hidden.weight.data = torch.zeros(6, 6)
    with pytest.raises(RuntimeError, match=r"hidden.weight left its flat buffer"):
        flat.check()
    model, _, flat = build(300)
    model.scale = nn.Parameter(torch.zeros(()))
    with pytest.raises(RuntimeError, match="scale was replaced by another parameter"):
        flat.check()
    model, _, flat = build(300)
    model.head.weight = nn.Parameter(torch.zeros(11, 6))  # no longer tied
    with pytest.raises(RuntimeError, match=r"head.weight was replaced"):
        flat.check()


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"belongs to another model; they differ in .*bias"):
        FlatBuckets(nn.Linear(3, 3), plan_buckets(specs_of(nn.Linear(3, 3, bias=False)), ranks=1, bucket_bytes=1))
    with pytest.raises(ValueError, match="ranks=0"):
        plan_buckets([], ranks=0, bucket_bytes=1)
