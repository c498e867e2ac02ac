"""Tensor parallel ranks compute the same as one rank, and replicated values have the same bits on all of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollgraph.graph import capture
from rollgraph.model import Architecture, Decoder, load_model, load_weights, save_model, tensor_parallel, token_logprobs
from rollgraph.model.field_kinds import ArchitectureError
from rollgraph.model.lora import TARGETS, AdapterSpec, attach
from rollgraph.model.tensor_parallel import TensorParallelGroup
from rollgraph.model.tensor_shards import model_shards, parameter_shards, shard_model, slice_shard
from rollgraph.model.weights.adapter_files import ADAPTER_WEIGHTS, load_adapter, save_adapter
from tests.model.simulated_group import mirrored_group, run_group

LLAMA = Architecture("llama", 23, hidden=16, mlp=24, layers=2, heads=4, kv_heads=2, head_dim=4, max_length=64)
BIASED = replace(LLAMA, attention_bias=True, mlp_bias=True)
MODELS = {
    "llama": (LLAMA, 2),
    "biases": (BIASED, 2),
    "qwen2, tied": (replace(LLAMA, family="qwen2", tied=True), 2),
    "qwen3": (replace(LLAMA, family="qwen3"), 2),
    "one key/value head": (replace(LLAMA, family="qwen3", kv_heads=1), 2),
    "shared key/value heads": (replace(LLAMA, family="qwen2", kv_heads=2), 4),
    "four ranks": (replace(BIASED, kv_heads=4), 4),
}
every_model = pytest.mark.parametrize(("architecture", "ranks"), MODELS.values(), ids=MODELS)


def make_model(architecture: Architecture, checkpointing: int = 0) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(architecture, checkpointing=checkpointing).double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + noise * 0.3)
    return model


def learn(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of two packed sequences, and the gradients of a loss."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(23, (2, 20), generator=generator)
    weights = torch.randn(20, generator=generator, dtype=torch.float64)
    positions = torch.cat((torch.arange(13), torch.arange(7)))
    hidden = model(ids, positions, torch.tensor([0, 13, 20], dtype=torch.int32), 13)
    logprobs = token_logprobs(hidden, model.head_weight, targets)
    assert isinstance(logprobs, Tensor)
    gradients = torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return logprobs.detach(), dict(zip(names, gradients, strict=True))


def generate(model: Decoder) -> Tensor:
    """Hidden states of the last tokens of a sequence, decoded after a prefill of the others."""
    a = model.architecture
    ids = torch.randint(23, (14,), generator=torch.Generator().manual_seed(2))
    pages = [torch.zeros(5, 4, 2, a.kv_heads, a.head_dim, dtype=torch.float64) for _ in range(a.layers)]
    table = torch.tensor([[1, 3, 2, 4]], dtype=torch.int32)

    def slots(positions: Tensor) -> Tensor:
        return table[0, positions // 4] * 4 + (positions % 4).int()

    positions = torch.arange(9)
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    hidden = []
    with torch.no_grad():
        model.prefill(ids[:9], positions, slots(positions), pages, table, bounds, bounds[1:])
        for position in range(9, 14):
            index = torch.tensor([position])
            hidden.append(model.decode(ids[index], index, slots(index), pages, table, (index + 1).int()))
    return torch.cat(hidden)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """In float64, sums of a few dozen terms in another order differ by much less than this."""
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@every_model
def test_tensor_parallel_ranks_compute_the_same_as_one_rank(architecture: Architecture, ranks: int) -> None:
    whole = make_model(architecture)
    logprobs, gradients = learn(whole)
    hidden = generate(whole)

    def run(group: TensorParallelGroup) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        model = shard_model(whole, group)
        return *learn(model), generate(model)

    results = run_group(ranks, run)
    for rank, (rank_logprobs, rank_gradients, rank_hidden) in enumerate(results):
        assert torch.equal(rank_logprobs, results[0][0])
        assert torch.equal(rank_hidden, results[0][2])
        assert_same(rank_logprobs, logprobs)
        assert_same(rank_hidden, hidden)
        pieces = parameter_shards(architecture, rank, ranks)
        assert pieces.keys() == rank_gradients.keys() == gradients.keys()
        for name, gradient in rank_gradients.items():
            assert_same(gradient, slice_shard(gradients[name], pieces[name]))
            if pieces[name].is_full:
                assert torch.equal(gradient, results[0][1][name]), name


def test_ranks_that_share_keys_have_the_same_gradient() -> None:
    architecture, ranks = MODELS["shared key/value heads"]
    whole = make_model(architecture)
    gradients = run_group(
        ranks, lambda group: learn(shard_model(whole, group))[1]["layers.0.self_attn.qkv_proj.weight"]
    )
    queries = 4
    assert torch.equal(gradients[0][queries:], gradients[1][queries:])
    assert torch.equal(gradients[2][queries:], gradients[3][queries:])
    assert not torch.equal(gradients[0][queries:], gradients[2][queries:])


@every_model
def test_each_element_is_counted_once(architecture: Architecture, ranks: int) -> None:
    counted: dict[str, int] = {}
    for rank in range(ranks):
        for name, piece in parameter_shards(architecture, rank, ranks).items():
            counted[name] = counted.get(name, 0) + sum(stop - start for start, stop in piece.counted_spans())
    assert counted == {name: parameter.numel() for name, parameter in make_model(architecture).named_parameters()}


@pytest.mark.parametrize("checkpointing", [1, 2])
def test_recomputed_layers_have_the_same_bits(checkpointing: int) -> None:
    kept, recomputing = make_model(LLAMA), make_model(LLAMA, checkpointing)

    def run(group: TensorParallelGroup) -> tuple[Any, Any]:
        return learn(shard_model(kept, group)), learn(shard_model(recomputing, group))

    for (logprobs, gradients), (recomputed_logprobs, recomputed_gradients) in run_group(2, run):
        assert torch.equal(logprobs, recomputed_logprobs)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, recomputed_gradients[name]), name


ADAPTED = {
    "all": TARGETS,
    "some": ("q_proj", "v_proj", "down_proj"),
    "outputs": ("k_proj", "up_proj", "o_proj"),
}


def attach_adapter(model: Decoder, targets: tuple[str, ...], dropout: float = 0.0) -> Decoder:
    attach(model, AdapterSpec(rank=3, alpha=5.0, targets=targets, dropout=dropout), seed=4)
    return model


def draw_b(whole: Decoder) -> dict[str, Tensor]:
    """Make B random, because a B of zeros changes nothing. Returns the parameters of all adapters."""
    assert whole.adapters is not None
    generator = torch.Generator().manual_seed(5)
    for _, _, b in whole.adapters.projections():
        b.copy_(torch.randn(b.shape, generator=generator, dtype=b.dtype))
    return dict(whole.named_parameters())


@pytest.mark.parametrize("targets", ADAPTED.values(), ids=ADAPTED)
def test_adapters_are_sharded_like_their_layers(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Weights and gradients are pieces of those of a single rank. Files hold whole ones."""
    whole = attach_adapter(make_model(BIASED), targets)
    initial = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    parameters = draw_b(whole)
    logprobs, gradients = learn(whole)
    hidden = generate(whole)
    save_adapter(whole, tmp_path / "whole", base=None)
    save_model(whole, tmp_path / "merged", merge=True)
    base = make_model(BIASED)

    def run(group: TensorParallelGroup) -> None:
        model = attach_adapter(shard_model(base, group), targets)
        pieces = model_shards(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, slice_shard(initial[name], pieces[name])), name
        load_adapter(model, tmp_path / "whole")
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, slice_shard(parameters[name], pieces[name])), name
        rank_logprobs, rank_gradients = learn(model)
        assert_same(rank_logprobs, logprobs)
        assert_same(generate(model), hidden)
        for name, gradient in rank_gradients.items():
            assert_same(gradient, slice_shard(gradients[name], pieces[name]))
            if pieces[name].is_full:
                assert torch.equal(gradient, group.from_first_rank(gradient)), name
        save_adapter(model, tmp_path / "again", base=None)
        save_model(model, tmp_path / "merged again", merge=True)

    run_group(2, run)
    assert_same_files(tmp_path / "whole" / ADAPTER_WEIGHTS, tmp_path / "again" / ADAPTER_WEIGHTS)
    merged, again = load_model(tmp_path / "merged"), load_model(tmp_path / "merged again")
    for one, other in zip(merged.parameters(), again.parameters(), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("targets", ADAPTED.values(), ids=ADAPTED)
def test_dropout_masks_equal_those_of_one_rank(
    targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are threads here, so each draws from a separate generator, seeded with the seed of the step."""
    generators = threading.local()

    def drop(x: Tensor, rate: float) -> Tensor:
        kept = torch.rand(x.shape, generator=generators.of_thread, dtype=x.dtype) >= rate
        return x * kept / (1 - rate)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)

    def learn_from_seed(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
        generators.of_thread = torch.Generator().manual_seed(6)
        return learn(model)

    whole = attach_adapter(make_model(BIASED), targets, dropout=0.4)
    draw_b(whole)
    logprobs, gradients = learn_from_seed(whole)
    save_adapter(whole, tmp_path, base=None)
    base = make_model(BIASED)

    def run(group: TensorParallelGroup) -> None:
        model = attach_adapter(shard_model(base, group), targets, dropout=0.4)
        load_adapter(model, tmp_path)
        rank_logprobs, rank_gradients = learn_from_seed(model)
        assert_same(rank_logprobs, logprobs)
        pieces = model_shards(model)
        for name, gradient in rank_gradients.items():
            assert_same(gradient, slice_shard(gradients[name], pieces[name]))
            if pieces[name].is_full:
                assert torch.equal(gradient, group.from_first_rank(gradient)), name

    run_group(2, run)


def assert_same_files(actual: Path, expected: Path) -> None:
    ours, theirs = load_file(actual), load_file(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 7), (4, 6), (1,)], ids=str)
def test_a_large_all_reduce_has_the_bits_of_a_small_one(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def total(group: TensorParallelGroup) -> Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
        return group.all_reduce_no_grad(x.to(dtype))

    small = run_group(4, total)
    monkeypatch.setattr(tensor_parallel, "LARGE_ALL_REDUCE", 0)
    monkeypatch.setattr(TensorParallelGroup, "all_gather", refuse_full_gathers(small[0].numel()))
    for large in run_group(4, total):
        assert torch.equal(large, small[0])


def refuse_full_gathers(elements: int) -> Any:
    gather = TensorParallelGroup.all_gather

    def gather_a_part(group: TensorParallelGroup, x: Tensor) -> Tensor:
        assert x.numel() == -(-elements // group.size), "everything is gathered"
        return gather(group, x)

    return gather_a_part


def test_a_model_with_large_all_reduces_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_model(replace(BIASED, kv_heads=4))

    def run(group: TensorParallelGroup) -> tuple[Tensor, dict[str, Tensor]]:
        return learn(shard_model(whole, group))

    expected = run_group(4, run)
    monkeypatch.setattr(tensor_parallel, "LARGE_ALL_REDUCE", 0)
    for (logprobs, gradients), (large_logprobs, large_gradients) in zip(expected, run_group(4, run), strict=True):
        assert torch.equal(large_logprobs, logprobs)
        assert all(torch.equal(large_gradients[name], gradient) for name, gradient in gradients.items())


def test_an_all_reduce_sums_in_fp32_in_the_order_of_ranks() -> None:
    values = (256.0, 1.0, 1.0)  # in bfloat16, 256 + 1 is 256
    totals = run_group(3, lambda group: group.all_reduce(torch.tensor([values[group.rank]], dtype=torch.bfloat16)))
    assert [total.item() for total in totals] == [258.0] * 3


@pytest.mark.parametrize("checkpointing", [0, 2])
def test_a_tape_runs_its_collectives_at_every_replay(checkpointing: int) -> None:
    """Captured forward and backward give the bits of eager ones, for weights and tokens of a later call, too."""
    group = mirrored_group()
    model = shard_model(make_model(replace(LLAMA, family="qwen3"), checkpointing), group)
    parameters = list(model.parameters())
    positions = torch.arange(12)
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    exchange = group.collectives["all_gather"]
    calls = 0

    def counting(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return exchange(x)

    group.collectives["all_gather"] = counting

    def step(ids: Tensor) -> tuple[Tensor, ...]:
        hidden = model(ids, positions, bounds, 12)
        logprobs = token_logprobs(hidden, model.head_weight, ids.roll(-1))
        assert isinstance(logprobs, Tensor)
        return (logprobs.detach(), *torch.autograd.grad(logprobs.sum(), parameters))

    captured = capture(step, (torch.zeros(12, dtype=torch.long),), backend="tape")
    for seed in range(3):
        ids = torch.randint(23, (12,), generator=torch.Generator().manual_seed(seed))
        calls = 0
        expected = step(ids)
        eager_calls, calls = calls, 0
        replayed = captured(ids)
        assert calls == eager_calls > 0
        assert all(map(torch.equal, replayed, expected))
        with torch.no_grad():
            parameters[0].mul_(1.1)


@every_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["as stored", "converted"])
def test_a_folder_is_read_in_pieces_and_written_whole(
    architecture: Architecture, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = make_model(architecture)
    save_model(whole, tmp_path / "whole", shard_bytes=4096)
    read: list[int] = []

    def run(group: TensorParallelGroup) -> dict[str, Tensor]:
        on_bytes = (lambda done, total: read.append(total)) if group.rank == 0 else None
        model = load_model(tmp_path / "whole", dtype=dtype, group=group, on_bytes=on_bytes)
        save_model(model, tmp_path / "again", shard_bytes=4096)
        group.all_gather(torch.zeros(1))  # the first rank has written it
        for parameter in model.parameters():
            parameter.detach().zero_()
        load_weights(model, tmp_path / "again")
        return dict(model.named_parameters())

    for rank, parameters in enumerate(run_group(ranks, run)):
        pieces = parameter_shards(architecture, rank, ranks)
        for name, parameter in whole.named_parameters():
            assert torch.equal(parameters[name], slice_shard(parameter, pieces[name]).to(dtype)), name
    stored = sum(parameter.numel() for parameter in whole.parameters()) * 8
    assert read[0] == sum(parameter.numel() for parameter in parameters.values()) * 8 < stored
    reloaded = load_model(tmp_path / "again")
    assert reloaded.architecture == architecture
    for (name, parameter), expected in zip(reloaded.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, expected.to(dtype)), name


def test_a_tape_runs_a_collective_whose_result_is_unused() -> None:
    """Other ranks wait for it. Whether the result is still referenced when the tape is made differs between ranks."""
    group = mirrored_group()
    exchange = group.collectives["all_gather"]
    calls: list[int] = []

    def counting(tensor: Tensor) -> Tensor:
        calls.append(1)
        return exchange(tensor)

    def step(x: Tensor) -> Tensor:
        group.all_reduce(x * 3)
        return x * 2

    captured = capture(step, (torch.ones(3),), backend="tape")
    group.collectives["all_gather"] = counting
    assert torch.equal(captured(torch.full((3,), 4.0)), torch.full((3,), 8.0))
    assert len(calls) == 1


def test_sizes_that_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="3 must divide the 4 heads"):
        LLAMA.sharded(3)
    with pytest.raises(ArchitectureError, match="4 must divide the 6 key/value heads"):
        replace(LLAMA, heads=12, kv_heads=6).sharded(4)
