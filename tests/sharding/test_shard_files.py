"""Checkpoints: any number of ranks loads what any other saved, and nothing that is broken is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.sharding import CheckpointError, ShardedAdamW, ShardedModel, load, save
from rollgraph.sharding.shard_files import take_snapshot
from rollgraph.world import World
from tests.sharding.test_sharded_model import ALONE, Net, build, loss, microbatch
from tests.sharding.worlds import run_world


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)  # type: ignore[no-any-return]


def make(world: World, bucket_bytes: int = 400) -> tuple[WithBuffer, ShardedModel, ShardedAdamW]:
    model = WithBuffer()
    sharded = ShardedModel(model, world, bucket_bytes=bucket_bytes, reduction="ordered")
    return model, sharded, ShardedAdamW(sharded, 0.05)


def steps(world: World, model: nn.Module, sharded: ShardedModel, optimizer: ShardedAdamW, count: int) -> None:
    """Every rank the same batch, so that the number of ranks makes no difference."""
    for _ in range(count):
        loss(model, microbatch(optimizer.steps, 0, 0)).backward()
        sharded.finish_gradients()
        optimizer.step()


def state(model: nn.Module, sharded: ShardedModel) -> dict[str, Tensor]:
    sharded.gather()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_and_save(world: World, folder: Path) -> Any:
    model, sharded, optimizer = make(world)
    model.seen.fill_(7)
    steps(world, model, sharded, optimizer, 2)
    save(folder, sharded, optimizer)
    saved = state(model, sharded)
    steps(world, model, sharded, optimizer, 2)
    return saved, state(model, sharded)


def load_and_train(world: World, folder: Path) -> Any:
    model, sharded, optimizer = make(world, bucket_bytes=10**6)  # other buckets than it was saved from
    addresses = [p.data_ptr() for p in model.parameters()]
    load(folder, sharded, optimizer)
    loaded = state(model, sharded)
    steps(world, model, sharded, optimizer, 2)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    return loaded, state(model, sharded)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.multi
def test_saved_by_four_and_loaded_by_any(tmp_path: Path) -> None:
    """Training goes on as if it had not stopped: equal gradients of 2^n ranks average to themselves, bit for bit."""
    folder = tmp_path / "checkpoint"
    (tmp_path / "first").mkdir()
    saved, after = run_world(4, tmp_path / "first", train_and_save, folder)[0]
    assert not list(tmp_path.glob("*.incomplete"))
    for size in (1, 2, 3):
        (tmp_path / str(size)).mkdir()
        alone = [load_and_train(ALONE, folder)] if size == 1 else []
        for found in alone or run_world(size, tmp_path / str(size), load_and_train, folder):
            assert not isinstance(found, str), found
            assert same(found[0], saved)
            if size != 3:
                assert same(found[1], after)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    _, sharded, optimizer = make(ALONE)
    save(tmp_path / "c", sharded, optimizer)
    return tmp_path / "c"


def refused(folder: Path, match: str, model: nn.Module | None = None) -> None:
    """Nothing is changed by a load that fails."""
    sharded = ShardedModel(model or WithBuffer(), ALONE)
    optimizer = ShardedAdamW(sharded, 0.05)
    before = state(sharded.model, sharded)
    with pytest.raises(CheckpointError, match=match):
        load(folder, sharded, optimizer)
    assert same(state(sharded.model, sharded), before)


def test_what_is_broken_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    refused(tmp_path, "no checkpoint")
    refused(checkpoint, "another model: .* and 17 more", Net())
    file = checkpoint / "rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused(checkpoint, "rank0.safetensors is not what was written")
    file.write_bytes(content[:-1])
    refused(checkpoint, "rank0.safetensors is not what was written: .* bytes instead of")
    file.unlink()
    refused(checkpoint, "not whole: rank0.safetensors missing")
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "steps": 9}))
    refused(checkpoint, "manifest.json is not what was written")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    refused(checkpoint, "format 9, expected 1")
    manifest.write_text("{")
    refused(checkpoint, "not JSON")


def test_a_checkpoint_is_not_written_over(checkpoint: Path) -> None:
    _, sharded, optimizer = make(ALONE)
    with pytest.raises(CheckpointError, match="exists already"):
        save(checkpoint, sharded, optimizer)


def test_a_snapshot_has_memory_of_its_own() -> None:
    """And the next one uses it again."""
    model, sharded, optimizer = make(ALONE)
    first = take_snapshot(sharded, optimizer)
    before = {name: tensor.clone() for name, tensor in first.shard.items()}
    steps(ALONE, model, sharded, optimizer, 1)
    model.seen.fill_(7)
    assert same(first.shard, before)
    assert first.rest["seen"] == 0
    second = take_snapshot(sharded, optimizer, first)
    assert not same(second.shard, before)
    assert second.rest["seen"] == 7
    for name, tensor in second.shard.items():
        assert tensor.data_ptr() == first.shard[name].data_ptr()


def test_files_can_be_read_by_whom_the_system_lets(checkpoint: Path) -> None:
    (checkpoint.parent / "any").touch()
    assert {path.stat().st_mode for path in checkpoint.iterdir()} == {(checkpoint.parent / "any").stat().st_mode}


def test_there_is_no_pickle(checkpoint: Path) -> None:
    assert sorted(path.suffix for path in checkpoint.iterdir()) == [".json", ".safetensors", ".safetensors"]
