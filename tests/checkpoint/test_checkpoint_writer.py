"""A checkpoint loads on any number of ranks, and a broken one never loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.checkpoint import write as checkpoint_writer
from rollgraph.checkpoint.format import CheckpointError
from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import ShardSnapshot, save, take_snapshot
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.parallel.ranks.world import World
from tests.parallel.small_net import ALONE, Net, build, loss, microbatch
from tests.parallel.test_liveness import FOREVER, connected, vanish, wait_until
from tests.parallel.worlds import run_world


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
    """All ranks train on the same batch, so the number of ranks makes no difference."""
    for _ in range(count):
        loss(model, microbatch(optimizer.steps, 0, 0)).backward()
        sharded.gradients.finish()
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
    model, sharded, optimizer = make(world, bucket_bytes=10**6)  # the checkpoint has other buckets
    addresses = [p.data_ptr() for p in model.parameters()]
    load(folder, sharded, optimizer)
    loaded = state(model, sharded)
    steps(world, model, sharded, optimizer, 2)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    return loaded, state(model, sharded)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.multi
def test_a_checkpoint_of_four_ranks_loads_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Training continues as if it had not stopped: equal gradients of 2^n ranks have the same bits as their average."""
    folder = tmp_path / "checkpoint"
    (tmp_path / "first").mkdir()
    saved, after = run_world(4, tmp_path / "first", train_and_save, folder)[0]
    assert not list(tmp_path.glob("*.incomplete"))
    for size in (1, 2, 3):
        (tmp_path / str(size)).mkdir()
        alone = [load_and_train(ALONE, folder)] if size == 1 else []
        for result in alone or run_world(size, tmp_path / str(size), load_and_train, folder):
            assert not isinstance(result, str), result
            assert same(result[0], saved)
            if size != 3:
                assert same(result[1], after)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    _, sharded, optimizer = make(ALONE)
    save(tmp_path / "c", sharded, optimizer)
    return tmp_path / "c"


def assert_refused(folder: Path, match: str, model: nn.Module | None = None) -> None:
    """A load that fails changes nothing."""
    sharded = ShardedModel(model or WithBuffer(), ALONE)
    optimizer = ShardedAdamW(sharded, 0.05)
    before = state(sharded.model, sharded)
    with pytest.raises(CheckpointError, match=match):
        load(folder, sharded, optimizer)
    assert same(state(sharded.model, sharded), before)


def test_a_broken_checkpoint_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path, "no checkpoint")
    assert_refused(checkpoint, "another model: .* and 17 more", Net())
    file = checkpoint / "rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert_refused(checkpoint, "rank0.safetensors is not what was written")
    file.write_bytes(content[:-1])
    assert_refused(checkpoint, "rank0.safetensors is not what was written: .* bytes instead of")
    file.unlink()
    assert_refused(checkpoint, "incomplete: rank0.safetensors missing")
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "steps": 9}))
    assert_refused(checkpoint, "manifest.json is not what was written")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    assert_refused(checkpoint, "format 9, expected 2")
    manifest.write_text("{")
    assert_refused(checkpoint, "not JSON")


def test_a_checkpoint_is_not_overwritten(checkpoint: Path) -> None:
    _, sharded, optimizer = make(ALONE)
    with pytest.raises(CheckpointError, match="exists already"):
        save(checkpoint, sharded, optimizer)


def test_a_snapshot_has_its_own_memory_and_the_next_one_reuses_it() -> None:
    model, sharded, optimizer = make(ALONE)
    first = take_snapshot(sharded, optimizer)
    before = {name: tensor.clone() for name, tensor in first.shard.items()}
    steps(ALONE, model, sharded, optimizer, 1)
    model.seen.fill_(7)
    assert same(first.shard, before)
    assert first.unsharded["seen"] == 0
    second = take_snapshot(sharded, optimizer, first)
    assert not same(second.shard, before)
    assert second.unsharded["seen"] == 7
    for name, tensor in second.shard.items():
        assert tensor.data_ptr() == first.shard[name].data_ptr()


def test_files_have_the_usual_permissions(checkpoint: Path) -> None:
    (checkpoint.parent / "any").touch()
    assert {path.stat().st_mode for path in checkpoint.iterdir()} == {(checkpoint.parent / "any").stat().st_mode}


def test_a_checkpoint_contains_no_pickle(checkpoint: Path) -> None:
    assert sorted(path.suffix for path in checkpoint.iterdir()) == [".json", ".safetensors", ".safetensors"]


# -- ranks that are lost, or cannot write ----------------------------------------------------------


class Writers:
    """Three ranks in one process; each writes its part of a checkpoint when asked to."""

    def __init__(self, folder: Path, ranks: list[Liveness], threads: ThreadPoolExecutor) -> None:
        self.temporary, self.target = folder / "step.incomplete", folder / "step"
        self._ranks, self._threads = ranks, threads

    def write(self, rank: int) -> Future[None]:
        snapshot = ShardSnapshot(rank, 3, {"master/w": torch.ones(4)}, [("w", 4 * rank, 4)], {}, {"format": 2})
        return self._threads.submit(
            checkpoint_writer.write,
            snapshot,
            self.temporary,
            self.target,
            timeout=FOREVER,
            liveness=self._ranks[rank],
        )


def error_of(writing: Future[None], kind: type[Exception] = CheckpointError) -> str:
    error = writing.exception(60)
    assert isinstance(error, kind)
    return str(error)


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    with connected() as ranks, ThreadPoolExecutor(3) as threads:
        yield Writers(tmp_path, ranks, threads)
        for rank in ranks:  # otherwise the executor would wait for a thread that waits
            vanish(rank)


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_write_raises_on_all_ranks_even_a_late_one(
    writers: Writers, failing: int, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late == failing:
        late = 0
    write = checkpoint_writer._write_tensors

    def full(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        if path.name == f"rank{failing}.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(checkpoint_writer, "_write_tensors", full)
    on_time = [writers.write(rank) for rank in range(3) if rank != late]
    messages = {error_of(writing) for writing in on_time}  # they have failed by now
    messages.add(error_of(writers.write(late)))
    assert messages == {f"{writers.target} was not written: rank{failing}: [Errno 28] No space left on device"}
    assert not list(writers.target.parent.iterdir())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_lost_during_a_save_is_named_at_once(writers: Writers, lost: int) -> None:
    writing = [writers.write(rank) for rank in range(3) if rank != lost]
    wait_until(lambda: len(list(writers.temporary.glob("rank*.json"))) == 2)
    vanish(writers._ranks[lost])
    for one in writing:
        named = f"rank {lost} on node-{lost} (set-up; last operation: startup)"
        assert f"{named} disappeared without notice" in error_of(one, RankLost)
    assert not writers.target.exists()


def test_three_writers_write_one_checkpoint(writers: Writers) -> None:
    for writing in [writers.write(rank) for rank in range(3)]:
        writing.result(60)
    assert len(list(writers.target.glob("rank*.safetensors"))) == 3
    assert not writers.temporary.exists()
