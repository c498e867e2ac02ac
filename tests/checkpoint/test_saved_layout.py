"""Shards of a parameter: where their elements are in the full one, and whether the files hold all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.checkpoint.format import CheckpointError
from rollgraph.checkpoint.load import find_saved_ranges, flat_indices
from rollgraph.checkpoint.write import describe_parameters
from rollgraph.model import Architecture, Decoder
from rollgraph.parallel.tensor.pieces import TensorParallelShard

SHARDS = {
    "rows": TensorParallelShard((6, 4), 0, ((1, 3), (5, 6)), (True, True)),
    "columns": TensorParallelShard((3, 8), 1, ((4, 6), (0, 1)), (True, True)),
    "in the middle": TensorParallelShard((2, 6, 3), 1, ((2, 4),), (True,)),
    "elements": TensorParallelShard((9,), 0, ((3, 8),), (True,)),
    "all": TensorParallelShard.full((3, 5)),
}


def cut(full: Tensor, shard: TensorParallelShard) -> Tensor:
    return torch.cat([full.narrow(shard.axis, low, high - low) for low, high in shard.ranges], shard.axis)


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_elements_of_a_shard_are_located_in_the_full_parameter(shard: TensorParallelShard) -> None:
    numbers = torch.arange(torch.Size(shard.full_shape).numel()).view(shard.full_shape)
    expected = cut(numbers, shard)
    assert tuple(expected.shape) == shard.shape
    for start in range(expected.numel()):
        for stop in range(start + 1, expected.numel() + 1):
            assert torch.equal(flat_indices(shard, start, stop), expected.flatten()[start:stop])
    again = TensorParallelShard.from_json(json.loads(json.dumps(shard.to_json())))
    assert again.holds_same(shard)


def test_a_shard_lists_the_spans_that_it_counts() -> None:
    shared = TensorParallelShard((8, 3), 0, ((0, 2), (4, 5), (6, 7)), (True, False, True))
    assert shared.counted_spans() == [(0, 6), (9, 12)]
    assert TensorParallelShard.full((2, 3), counted=False).counted_spans() == []
    assert TensorParallelShard.full(()).counted_spans() == [(0, 1)]
    with pytest.raises(ValueError, match="only along its first axis"):
        TensorParallelShard((3, 8), 1, ((0, 1), (2, 3)), (True, False)).counted_spans()


def manifest_of(*shards: tuple[TensorParallelShard | None, int, int]) -> dict[str, Any]:
    """A manifest whose files each hold one range of a parameter `w`: its shard, start and length."""
    records = []
    for number, (shard, start, count) in enumerate(shards):
        record: dict[str, Any] = {"file": f"rank{number}.safetensors", "parts": [["w", start, count]]}
        if shard is not None:
            record["pieces"] = {"w": shard.to_json()}
        records.append(record)
    return {"shards": records}


UPPER = TensorParallelShard((4, 2), 0, ((0, 2),), (True,))
LOWER = TensorParallelShard((4, 2), 0, ((2, 4),), (True,))


def test_saved_ranges_of_a_parameter_are_found() -> None:
    ranges = find_saved_ranges(Path("saved"), manifest_of((UPPER, 0, 3), (UPPER, 3, 1), (LOWER, 0, 4)), "w", (4, 2))
    assert [(saved_range.file.name, saved_range.start, saved_range.elements) for saved_range in ranges] == [
        ("rank0.safetensors", 0, 3),
        ("rank1.safetensors", 3, 1),
        ("rank2.safetensors", 0, 4),
    ]
    assert [saved_range.shard.holds_same(UPPER) for saved_range in ranges] == [True, True, False]
    (scalar,) = find_saved_ranges(Path("saved"), manifest_of((None, 0, 1)), "w", ())
    assert scalar.shard.is_full


@pytest.mark.parametrize(
    ("shards", "missing"),
    [
        ([(None, 0, 5)], 3),
        ([(UPPER, 0, 4), (LOWER, 0, 3)], 1),
        ([(LOWER, 0, 4)], 4),
        ([], 8),
    ],
)
def test_elements_in_no_file_are_an_error(shards: list[Any], missing: int) -> None:
    with pytest.raises(CheckpointError, match=f"saved: {missing} elements of w are in no file"):
        find_saved_ranges(Path("saved"), manifest_of(*shards), "w", (4, 2))


def test_the_decoder_keeps_its_checkpoint_keys() -> None:
    """Existing checkpoints have these keys, so the keys stay even if parts of the decoder are renamed."""
    qwen = Architecture("qwen3", vocabulary=11, hidden=8, mlp=16, layers=1, heads=2, kv_heads=1, head_dim=4)
    assert set(describe_parameters(Decoder(qwen))) == {
        "embed.weight",
        "layers.0.attention_norm",
        "layers.0.mlp_norm",
        "layers.0.attention.q_norm",
        "layers.0.attention.k_norm",
        "layers.0.attention.qkv.weight",
        "layers.0.attention.out.weight",
        "layers.0.mlp.gate_up.weight",
        "layers.0.mlp.down.weight",
        "norm",
        "head.weight",
    }


def test_two_parameters_with_one_key_are_refused() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"two parameters of the model have the same key"):
        describe_parameters(model)
