"""Checkpoints of a run are complete, appear and disappear atomically, and survive kills and broken or full disks."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollgraph.checkpoint.format import CheckpointError, manifest_checksum, read_states
from rollgraph.checkpoint.keep import Checkpoints, SavedCheckpoint, choose_kept
from rollgraph.parallel.data.bucket_plan import Offload, StateFormat
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from tests.checkpoint.test_checkpoint_writer import make, same, state, steps
from tests.parallel.small_net import ALONE
from tests.parallel.worlds import run_world

BOTH = pytest.mark.parametrize("asynchronous", [True, False])


class Run:
    """A tiny model in training, with its checkpoints."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model, self.sharded, self.optimizer = make(ALONE)
        self.checkpoints = Checkpoints(folder, self.sharded, self.optimizer, **options)

    def train(self, count: int = 1) -> None:
        steps(ALONE, self.model, self.sharded, self.optimizer, count)
        self.model.seen.add_(1)

    def save(self, *, score: float | None = None, **more: Any) -> dict[str, Tensor]:
        """Save, and return everything that a load must restore."""
        self.checkpoints.save(self.optimizer.steps, {"cursor": self.optimizer.steps, **more}, score)
        return self.everything()

    def everything(self) -> dict[str, Tensor]:
        return everything(self.sharded, self.optimizer)


def everything(sharded: ShardedModel, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer state. With several ranks, the optimizer state is this rank's shard."""
    tensors = state(sharded.model, sharded)
    for piece in optimizer.parameter_states:
        for name, tensor in (("master", piece.master), *piece.state.items()):
            tensors[f"{piece.parameter.name} {name}"] = tensor.detach().clone()
    return {**tensors, "steps": torch.tensor(optimizer.steps), "skipped": optimizer.skipped.clone()}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs that share a folder, in turn or at the same time."""
    runs: list[Run] = []

    def begin(**options: Any) -> Run:
        runs.append(Run(tmp_path / "run", **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.checkpoints.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# -- saving and loading ---------------------------------------------------------------------------


@BOTH
def test_a_resumed_run_equals_one_that_never_stopped(start: Callable[..., Run], asynchronous: bool) -> None:
    first = start(asynchronous=asynchronous)
    first.train(2)
    first.optimizer.skipped.fill_(3)
    extra = {"rng": [1, [2, 2**63]], "text": "é\ud800", "rate": 0.1, "none": None, "prompts": {"7": ["a", ""]}}
    saved = first.save(score=0.5, **extra)
    first.train(2)
    first.checkpoints.wait()

    second = start()
    addresses = [tensor.data_ptr() for tensor in (*second.model.parameters(), *second.optimizer.masters)]
    latest = second.checkpoints.latest()
    assert latest == SavedCheckpoint(2, second.checkpoints.folder / "step_00000002", 0.5)
    assert second.checkpoints.load(latest) == {"cursor": 2, **extra}
    assert same(second.everything(), saved)
    second.train(2)
    assert same(second.everything(), first.everything())
    assert addresses == [tensor.data_ptr() for tensor in (*second.model.parameters(), *second.optimizer.masters)]
    assert second.checkpoints.problems == []


def test_a_background_save_does_not_see_later_changes(start: Callable[..., Run]) -> None:
    run, gate = start(), threading.Event()
    assert run.checkpoints._writer is not None
    for _ in range(2):  # the second snapshot reuses the memory of the first
        run.train()
        run.checkpoints._writer.submit(gate.wait, 30)  # simulates a slow disk
        cursor = [run.optimizer.steps]
        saved = run.save(list=cursor)
        run.train()
        cursor.append(0)
        assert cursor[0] not in [one.step for one in run.checkpoints.complete()]
        gate.set()
        run.checkpoints.wait()
        reader = start()
        latest = reader.checkpoints.latest()
        assert latest is not None
        assert reader.checkpoints.load(latest)["list"] == cursor[:1]
        assert same(reader.everything(), saved)
        gate.clear()


def test_a_save_waits_for_the_one_before_it(start: Callable[..., Run]) -> None:
    run, gate = start(), threading.Event()
    assert run.checkpoints._writer is not None
    run.checkpoints._writer.submit(gate.wait, 30)
    run.train()
    run.save()
    assert run.checkpoints.complete() == []
    threading.Timer(0.2, gate.set).start()
    run.train()
    run.save()
    assert gate.is_set()
    assert run.checkpoints.complete()[0].step == 1


def test_files_have_the_usual_mode_and_there_is_no_pickle(start: Callable[..., Run]) -> None:
    run = start(asynchronous=False)
    run.save()
    (run.checkpoints.folder / "any").touch()
    usual = (run.checkpoints.folder / "any").stat().st_mode
    files = list((run.checkpoints.folder / "step_00000000").iterdir())
    assert sorted(file.name for file in files) == [
        "manifest.json",
        "rank0.safetensors",
        "rest.safetensors",
        "state.json",
    ]
    assert {file.stat().st_mode for file in files} == {usual}


# -- several ranks ---------------------------------------------------------------------------------


def two_ranks(world: World, folder: Path) -> dict[str, Any]:
    model, sharded, optimizer = make(world)
    checkpoints = Checkpoints(folder, sharded, optimizer, timeout=30, keep_last=3)
    result: dict[str, Any] = {}
    latest = checkpoints.latest()
    assert latest is not None
    result["initial state"] = checkpoints.load(latest)
    result["loaded"] = state(model, sharded)
    for _ in range(3):
        steps(world, model, sharded, optimizer, 1)
        checkpoints.save(optimizer.steps, {"rank": world.rank}, score=0.0)
        steps(world, model, sharded, optimizer, 2)  # runs collectives while the save is being written
    checkpoints.wait()
    sharded.collectives.all_gather_text("all have written, and rank 0 has deleted")
    result["complete"] = [saved.step for saved in checkpoints.complete()]
    newest = checkpoints.latest()
    assert newest is not None
    result["state"] = checkpoints.load(newest)
    result["saved"] = state(model, sharded)
    before = everything(sharded, optimizer)

    sharded.collectives.all_gather_text("all have loaded")
    if world.rank == 0:  # only the rank that checks this file can notice
        flip(newest.path / "rank1.safetensors")
    sharded.collectives.all_gather_text("it is broken")
    result["broken"] = error_of(lambda: checkpoints.load(newest))
    fallback = checkpoints.latest()
    result["fallback"] = fallback and fallback.step
    sharded.collectives.all_gather_text("looked at")
    if world.rank == 0:
        flip(newest.path / "rank1.safetensors")

    with no_larger_files_than(1000 if world.rank == 1 else None):
        checkpoints.save(100, {})
        result["one cannot write"] = error_of(checkpoints.wait)
    checkpoints._timeout = 0.5
    if world.rank == 0:
        checkpoints.save(101, {})
        result["one does not save"] = error_of(checkpoints.wait)
    result["unchanged"] = same(before, everything(sharded, optimizer))
    result["names"] = names(folder)
    checkpoints.close()
    return result


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_resumes_on_one_rank_then_two_then_one(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    run.train(2)
    saved = run.save()
    run.checkpoints.wait()
    results = run_world(2, tmp_path, two_ranks, run.checkpoints.folder)
    for rank, result in enumerate(results):
        assert not isinstance(result, str), result
        assert result["initial state"] == {"cursor": 2}
        assert all(torch.equal(value, saved[name]) for name, value in result["loaded"].items())
        assert result["complete"] == [3, 6, 9]
        assert result["state"] == {"rank": rank}
        assert "rank1.safetensors is not what was written" in result["broken"]
        assert result["fallback"] == 6
        assert result["unchanged"]
    assert "rank1" in results[0]["one cannot write"]
    assert "File too large" in results[0]["one cannot write"]
    assert "File too large" in results[1]["one cannot write"]
    assert "nothing from rank1 within 0.5 s" in results[0]["one does not save"]
    assert not [name for name in results[0]["names"] if not name[5:].isdigit()]

    again = start()
    newest = next(one for one in again.checkpoints.complete() if one.step == 9)
    assert again.checkpoints.load(newest) == {"rank": 0}
    assert read_states(newest.path) == [{"rank": 0}, {"rank": 1}]
    assert same(state(again.model, again.sharded), results[0]["saved"])


# -- which checkpoints are kept --------------------------------------------------------------------

SCORES = st.none() | st.integers(0, 3).map(float)


@given(st.dictionaries(st.integers(0, 50), SCORES, min_size=1), st.integers(1, 4), st.integers(0, 3))
def test_the_newest_and_the_best_are_kept(scores: dict[int, float | None], last: int, best: int) -> None:
    saved = [SavedCheckpoint(step, Path(str(step)), score) for step, score in scores.items()]
    kept = choose_kept(saved, last, best)
    newest = {one for one in saved if sum(other.step > one.step for other in saved) < last}
    assert newest <= kept
    assert max(saved, key=lambda one: one.step) in kept
    scored = [one for one in saved if one.score is not None]
    for one in kept - newest:
        assert one.score is not None
    for one in scored:  # it is one of the best if fewer than `best` others are better, or equal and newer
        better = sum((other.score, other.step) > (one.score, one.step) for other in scored)  # type: ignore[operator]
        assert (one in kept) == (one in newest or better < best)


@BOTH
def test_pruned_checkpoints_are_deleted(start: Callable[..., Run], asynchronous: bool) -> None:
    run = start(keep_last=2, keep_best=1, asynchronous=asynchronous)
    kept = []
    for score in (0.1, 0.9, None, float("nan"), 0.2):
        run.train()
        run.save(score=score)
        run.checkpoints.wait()
        kept.append([saved.step for saved in run.checkpoints.complete()])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert names(run.checkpoints.folder) == ["step_00000002", "step_00000004", "step_00000005"]
    best = run.checkpoints.best()
    assert best is not None
    assert (best.step, best.score) == (2, 0.9)
    assert run.checkpoints.complete()[1].score is None


def test_a_run_resumed_from_an_older_checkpoint_keeps_its_saves(start: Callable[..., Run]) -> None:
    run = start(keep_last=1, keep_best=0)
    run.checkpoints.save(9, {})
    run.checkpoints.save(3, {})
    run.checkpoints.wait()
    assert [saved.step for saved in run.checkpoints.complete()] == [3, 9]


def test_checkpoints_kept_for_their_score_do_not_count_as_newest(start: Callable[..., Run]) -> None:
    run = start(keep_last=1, keep_best=1, asynchronous=False)
    kept = []
    for step, score, due in ((1, None, True), (2, 0.5, False), (3, 0.7, False), (4, 0.1, True), (5, 0.8, True)):
        run.checkpoints.save(step, {}, score, due=due)
        kept.append([saved.step for saved in run.checkpoints.complete()])
    assert kept == [[1], [1, 2], [1, 3], [3, 4], [5]]


def test_is_best_compares_with_the_kept_scores(start: Callable[..., Run]) -> None:
    run, gate = start(keep_best=2), threading.Event()
    assert run.checkpoints.is_best(0.0)
    assert not run.checkpoints.is_best(float("nan"))
    assert not run.checkpoints.is_best(None)
    run.checkpoints.save(1, {}, 0.5)
    assert run.checkpoints._writer is not None
    run.checkpoints.wait()
    run.checkpoints._writer.submit(gate.wait)
    run.checkpoints.save(2, {}, 0.7)  # this one is not on disk yet
    assert [run.checkpoints.is_best(score) for score in (0.4, 0.5, 0.6, 0.8)] == [False, False, True, True]
    gate.set()
    run.checkpoints.wait()
    assert [run.checkpoints.is_best(score) for score in (0.4, 0.5, 0.6, 0.8)] == [False, False, True, True]
    assert not start(keep_best=0).checkpoints.is_best(9.0)


def test_a_missing_score_is_never_best(start: Callable[..., Run]) -> None:
    run = start()
    run.save()
    run.checkpoints.wait()
    assert run.checkpoints.best() is None


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last=0"):
        Run(tmp_path, keep_last=0)


# -- broken checkpoints ----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "not text": lambda path: path.write_bytes(b"\xff" * path.stat().st_size) and None,
}


@pytest.mark.parametrize("file", ["manifest.json", "rank0.safetensors", "rest.safetensors", "state.json"])
def test_resuming_skips_broken_checkpoints(start: Callable[..., Run], file: str) -> None:
    first = start()
    first.train()
    sound = first.save(score=0.1)
    first.train()
    first.save(score=0.9)
    first.checkpoints.close()
    newest = first.checkpoints.folder / "step_00000002"
    whole = (newest / file).read_bytes()
    for damage in DAMAGES.values():
        damage(newest / file)
        run = start()
        before = run.everything()
        with pytest.raises(CheckpointError, match="step_00000002"):
            run.checkpoints.load(SavedCheckpoint(2, newest, None))
        assert same(run.everything(), before)
        run.checkpoints.close()

        run = start()
        latest, best = run.checkpoints.latest(), run.checkpoints.best()
        assert latest is not None
        assert (latest, latest.step) == (best, 1)
        assert run.checkpoints.load(latest) == {"cursor": 1}
        assert same(run.everything(), sound)
        (problem,) = run.checkpoints.problems
        assert "step_00000002 is skipped" in problem
        assert file in problem
        run.checkpoints.close()
        (newest / file).write_bytes(whole)
    flip(newest / file)
    run = start()
    latest = run.checkpoints.latest()
    assert latest is not None
    run.checkpoints.load(latest)
    run.train()
    saved = run.save()  # replaces the broken one
    run.checkpoints.wait()
    assert run.checkpoints.latest() == SavedCheckpoint(2, newest, None)
    assert names(run.checkpoints.folder) == ["step_00000001", "step_00000002"]
    again = start()
    again.checkpoints.load(SavedCheckpoint(2, newest, None))
    assert same(again.everything(), saved)


def test_a_flipped_bit_in_a_manifest_is_noticed_or_harmless(start: Callable[..., Run]) -> None:
    run = start(asynchronous=False)
    run.save(score=0.5)
    path = run.checkpoints.folder / "step_00000000" / "manifest.json"
    whole = path.read_bytes()
    for position in random.Random(0).sample(range(len(whole)), 200):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        run.checkpoints.broken.clear()
        if run.checkpoints.complete():
            assert json.loads(path.read_bytes()) == json.loads(whole)


@pytest.mark.parametrize("field", ["shards", "rest", "parameters", "steps"])
def test_an_incomplete_manifest_is_refused(start: Callable[..., Run], field: str) -> None:
    run = start()
    run.save()
    run.checkpoints.wait()
    path = run.checkpoints.folder / "step_00000000" / "manifest.json"
    manifest = {key: value for key, value in json.loads(path.read_text()).items() if key != field}
    path.write_text(json.dumps({**manifest, "sha256": manifest_checksum(manifest)}))
    assert run.checkpoints.latest() is None
    assert run.checkpoints.broken[path.parent] == f"{path} is not a checkpoint's manifest: it has no {field}"


def test_a_renamed_checkpoint_does_not_count(start: Callable[..., Run]) -> None:
    run = start(asynchronous=False)
    run.save()
    shutil.copytree(run.checkpoints.folder / "step_00000000", run.checkpoints.folder / "step_00000007")
    latest = run.checkpoints.latest()
    assert latest is not None
    assert latest.step == 0
    assert "step_00000007 was saved as step 0" in run.checkpoints.problems[0]


def test_a_buffer_of_another_shape_is_refused_before_anything_changes(start: Callable[..., Run]) -> None:
    run = start(asynchronous=False)
    run.train()
    run.save()
    changed = start()
    changed.model.register_buffer("seen", torch.zeros(3))
    before = changed.everything()
    with pytest.raises(CheckpointError, match="seen is float32 scalar in the checkpoint and float32 3 in the model"):
        changed.checkpoints.load(run.checkpoints.complete()[0])
    assert same(changed.everything(), before)


# -- saves that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": {"rng": [0, torch.zeros(1)]}}, r"state\['data'\]\['rng'\]\[1\] is a Tensor"),
        ({"seen": {1, 2}}, r"state\['seen'\] is a set"),
        ({"counts": {1: 2}}, r"state\['counts'\] has the key 1, which is not text"),
        ({"raw": b""}, r"state\['raw'\] is a bytes"),
    ],
)
def test_a_state_that_is_not_json_is_refused_by_name(start: Callable[..., Run], wrong: Any, message: str) -> None:
    run = start()
    with pytest.raises(CheckpointError, match=message):
        run.checkpoints.save(1, wrong)
    run.checkpoints.wait()
    assert names(run.checkpoints.folder) == []


@contextmanager
def no_larger_files_than(size: int | None) -> Iterator[None]:
    """Simulate a full disk for this process: the system refuses writes beyond this file size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("size", [1000, 0])  # with 0, not even a note of the error can be written
@pytest.mark.parametrize("raised_by", ["the save itself", "wait", "close"])
def test_a_full_disk_raises_and_loses_nothing(start: Callable[..., Run], raised_by: str, size: int) -> None:
    run = start(asynchronous=raised_by != "the save itself")
    sound = run.save()
    run.checkpoints.wait()
    run.train()
    before = run.everything()
    with no_larger_files_than(size):
        if raised_by == "the save itself":
            error = error_of(run.save)
        else:
            run.save()
            assert run.checkpoints._running is not None
            run.checkpoints._running.exception()  # waits until it is done
            error = error_of({"wait": run.checkpoints.wait, "close": run.checkpoints.close}[raised_by])
    assert error is not None
    assert "step_00000001 was not written" in error
    assert "File too large" in error
    assert same(run.everything(), before)
    assert names(run.checkpoints.folder) == ["step_00000000"]
    if raised_by != "close":
        run.save()  # there is room again, and the error is not raised twice
        run.checkpoints.wait()
        assert names(run.checkpoints.folder) == ["step_00000000", "step_00000001"]
    second = start()
    second.checkpoints.load(second.checkpoints.complete()[0])
    assert same(second.everything(), sound)


def test_a_failed_save_does_not_prevent_the_next_one(start: Callable[..., Run]) -> None:
    run = start()
    with no_larger_files_than(1000):
        run.save()
        assert run.checkpoints._running is not None
        run.checkpoints._running.exception()
    run.train()
    run.save()
    run.checkpoints.wait()
    assert names(run.checkpoints.folder) == ["step_00000001"]
    (problem,) = run.checkpoints.new_problems()
    assert "step_00000000 was not written" in problem
    assert run.checkpoints.new_problems() == []


@BOTH
def test_a_file_in_the_way_of_a_checkpoint_is_kept(start: Callable[..., Run], asynchronous: bool) -> None:
    run = start(asynchronous=asynchronous)
    run.save()
    (run.checkpoints.folder / "step_00000001").write_text("mine")
    run.train()
    error = error_of(lambda: (run.save(), run.checkpoints.wait()))
    assert error is not None
    assert "step_00000001 was not written" in error
    assert names(run.checkpoints.folder) == ["step_00000000", "step_00000001"]
    assert (run.checkpoints.folder / "step_00000001").read_text() == "mine"
    assert run.checkpoints.latest() == run.checkpoints.complete()[0]


def test_saving_to_a_deleted_folder_is_an_error(start: Callable[..., Run]) -> None:
    run = start()
    shutil.rmtree(run.checkpoints.folder)
    with pytest.raises(CheckpointError, match=r"run cannot be read: .*No such file"):
        run.save()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CheckpointError, match=r"run cannot be used: .*exists"):
        Run(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_saving_to_a_read_only_folder_is_an_error(start: Callable[..., Run]) -> None:
    run = start()
    run.checkpoints.folder.chmod(0o500)
    try:
        run.save()
        with pytest.raises(CheckpointError, match=r"step_00000000 was not written: .*Permission denied"):
            run.checkpoints.wait()
    finally:
        run.checkpoints.folder.chmod(0o700)


def test_a_step_is_not_saved_twice(start: Callable[..., Run]) -> None:
    run = start()
    run.save()
    with pytest.raises(CheckpointError, match="step_00000000 exists already"):
        run.save()


# -- leftovers of dead runs ------------------------------------------------------------------------


def test_leftovers_are_removed_only_if_their_run_is_dead(start: Callable[..., Run]) -> None:
    live = start()
    live.save()
    live.checkpoints.wait()
    folder = live.checkpoints.folder
    (lock,) = folder.glob("run_*.lock")
    (folder / "run_00000000.lock").touch()  # left by a killed run
    for run in ("00000000", "11111111", lock.stem.removeprefix("run_")):
        for what in ("incomplete", "deleted"):  # each holds a whole checkpoint under another name
            shutil.copytree(folder / "step_00000000", folder / f"step_00000005.{run}-9.{what}")
    (folder / "step_00000006.notes").mkdir()  # not written by rollgraph
    second = start()
    stays = [f"step_00000005.{lock.stem.removeprefix('run_')}-9.{what}" for what in ("deleted", "incomplete")]
    assert names(folder) == ["step_00000000", *stays, "step_00000006.notes"]
    assert [saved.step for saved in second.checkpoints.complete()] == [0]
    assert len(list(folder.glob("run_*.lock"))) == 2
    live.checkpoints.close()
    second.checkpoints.close()
    assert not list(folder.glob("run_*.lock"))
    start()
    assert names(folder) == ["step_00000000", "step_00000006.notes"]


def test_a_run_killed_before_its_lock_was_named_leaves_nothing(start: Callable[..., Run]) -> None:
    live = start()
    folder = live.checkpoints.folder
    (folder / "run_00000000.new").touch()
    with (folder / "run_11111111.new").open("x") as new:
        fcntl.flock(new, fcntl.LOCK_EX)  # its run is alive and about to rename it
        start()
        assert names(folder) == ["run_11111111.new"]
    start()
    assert names(folder) == []


def test_a_lock_removed_as_a_leftover_is_created_again(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run clears the folder after the file is created and before it is locked."""
    lock, removed_locks = fcntl.flock, []

    def lock_after_removal(file: Any, how: int) -> None:
        if how == fcntl.LOCK_EX and not removed_locks:
            removed_locks.append(Path(file.name))
            Path(file.name).unlink()
        lock(file, how)

    monkeypatch.setattr("rollgraph.checkpoint.keep.fcntl.flock", lock_after_removal)
    run = start()
    (held,) = run.checkpoints.folder.glob("run_*.lock")
    assert [held.stem] != [path.stem for path in removed_locks]


def test_files_that_only_look_like_leftovers_stay(start: Callable[..., Run], tmp_path: Path) -> None:
    folder = start().checkpoints.folder
    (tmp_path / "mine").touch()
    (folder / "run_00000000.lock").symlink_to(tmp_path / "mine")
    (folder / "run_11111111.lock").write_text("a note of mine")
    for name in ("run_notes.lock", "run_new.new", "run_1234567.new"):
        (folder / name).touch()
    before = sorted(path.name for path in folder.iterdir())
    start().checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (tmp_path / "mine").exists()


def test_one_checkpoint_too_many_is_deleted_after_a_load(start: Callable[..., Run]) -> None:
    """The run was killed after it renamed the newest checkpoint and before it deleted the oldest."""
    first = start(keep_last=3, keep_best=0, asynchronous=False)
    for step in (1, 2, 3):
        first.checkpoints.save(step, {})
    run = start(keep_last=2, keep_best=0)
    latest = run.checkpoints.latest()
    assert latest is not None
    run.checkpoints.load(latest)
    run.checkpoints.prune_after_load(latest)
    assert names(run.checkpoints.folder) == ["step_00000002", "step_00000003"]
    flip(latest.path / "rank0.safetensors")  # a broken checkpoint is not counted, and is kept for repair
    run = start(keep_last=1, keep_best=0)
    latest = run.checkpoints.latest()
    assert latest is not None
    run.checkpoints.prune_after_load(latest)
    assert names(run.checkpoints.folder) == ["step_00000002", "step_00000003"]


def test_readers_leave_no_trace(start: Callable[..., Run]) -> None:
    first = start(asynchronous=False)
    first.train()
    saved = first.save()
    first.checkpoints.close()
    folder = first.checkpoints.folder
    (folder / "run_00000000.new").touch()  # left by a killed run; only a writer clears it
    (folder / "step_00000005.00000000-9.incomplete").mkdir()
    before = untouched(folder)
    reader = start(writes=False)
    latest = reader.checkpoints.latest()
    assert latest is not None
    assert reader.checkpoints.load(latest) == {"cursor": 1}
    assert same(reader.everything(), saved)
    with pytest.raises(CheckpointError, match="run was opened for reading only"):
        reader.save()
    reader.checkpoints.close()
    assert untouched(folder, now=False) == before


def untouched(folder: Path, now: bool = True) -> dict[str, tuple[int, int]]:
    """Return the modification time and size of a folder and of everything in it.

    `now` first sets all times to long ago. Then even a file that comes and goes changes the time of its folder.
    """
    paths = [folder, *folder.rglob("*")]
    if now:
        for path in paths:
            os.utime(path, (1000, 1000), follow_symlinks=False)
    stats = {path: path.lstat() for path in paths}
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


# -- kill -9 ---------------------------------------------------------------------------------------


Kind = tuple[StateFormat, Offload]  # of optimizer state


def large(kind: Kind = ("fp32", "none")) -> tuple[ShardedModel, ShardedAdamW]:
    """Make a model large enough that a save takes longer than a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(12)))
    sharded = ShardedModel(model, ALONE)
    return sharded, ShardedAdamW(sharded, 0.01, state=kind[0], offload=kind[1])


def digest(sharded: ShardedModel, optimizer: ShardedAdamW) -> str:
    checksum = hashlib.sha256()
    for tensor in everything(sharded, optimizer).values():
        checksum.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def train_until_killed(folder: Path, asynchronous: bool, kind: Kind) -> None:
    parent = os.getppid()
    sharded, optimizer = large(kind)
    checkpoints = Checkpoints(folder / "run", sharded, optimizer, asynchronous=asynchronous, keep_last=1)
    latest = checkpoints.latest()
    if latest is not None:
        assert checkpoints.load(latest) == {"step": optimizer.steps}
    with (folder / "log").open("a") as log:
        while os.getppid() == parent:
            sharded.model(torch.full((1, 200), 1.0 + optimizer.steps)).square().mean().backward()
            sharded.gradients.finish()
            optimizer.step()
            log.write(f"{optimizer.steps} {digest(sharded, optimizer)}\n")
            log.flush()
            checkpoints.save(optimizer.steps, {"step": optimizer.steps}, score=float(optimizer.steps % 5))


def nursery(pipe: Any, folder: Path) -> None:
    """Fork training processes, one at a time. This process has already imported everything that a step needs."""
    torch.set_num_threads(1)
    large()[1].step()
    while (order := pipe.recv()) is not None:
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(folder, *order)
            finally:
                os._exit(1)
        pipe.send(child)
        pipe.send(os.waitpid(child, 0)[1])


STEP = "step_" + 8 * "[0-9]"
MOMENTS = [  # kill the process once this is on disk
    "*.incomplete",
    "*.incomplete/rank0.safetensors",
    "*.incomplete/rank0.json",
    "*.incomplete/manifest.json",
    "*.deleted",
]


@pytest.mark.slow
@pytest.mark.multi
def test_the_last_complete_checkpoint_loads_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    torn = kill_again_and_again(tmp_path, 20, ("fp32", "none"))
    assert torn.count(".incomplete") >= 5
    assert torn.count(".deleted") >= 1


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("kind", [("bf16", "none"), ("int8", "none"), ("fp32", "host"), ("int8", "host")])
def test_optimizer_state_of_any_format_loads_after_a_kill(kind: Kind, tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 5, kind)


def kill_again_and_again(tmp_path: Path, lives: int, kind: Kind) -> list[str]:
    """Each process resumes from the files of the previous one, and has the same weights at the same step.

    Returns the suffixes of checkpoints that were left half written or half deleted.
    """
    context, chance = multiprocessing.get_context("forkserver"), random.Random(0)
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=nursery, args=(child_pipe, tmp_path), daemon=True)
    process.start()
    folder, last = tmp_path / "run", 0
    torn: list[str] = []
    sharded, optimizer = large(kind)
    for life in range(lives):
        pipe.send((life % 2 == 0, kind))
        child = pipe.recv()
        deadline = time.monotonic() + 600
        while not any(int(path.name[5:]) > last for path in folder.glob(STEP)):  # until it has saved
            assert time.monotonic() < deadline
            time.sleep(0.001)
        moment, patience = MOMENTS[life % len(MOMENTS)], time.monotonic() + 0.5
        while not any(folder.glob(moment)) and time.monotonic() < patience:
            time.sleep(0.0002)
        time.sleep(chance.random() * 0.003)
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(pipe.recv()) == signal.SIGKILL, "the process ended before it was killed"
        torn += [path.suffix for path in folder.iterdir() if path.suffix != ".lock"]

        checkpoints = Checkpoints(folder, sharded, optimizer)
        latest = checkpoints.latest()
        assert latest is not None
        assert latest.step > last, "a complete checkpoint was lost"
        last = latest.step
        logged = dict(line.split() for line in (tmp_path / "log").read_text().splitlines())
        assert checkpoints.load(latest) == {"step": last}
        assert digest(sharded, optimizer) == logged[str(last)]
        assert checkpoints.problems == []
        assert not [name for name in names(folder) if not name[5:].isdigit()]
        checkpoints.close()
    pipe.send(None)
    process.join()
    seen: dict[str, str] = {}
    for step, text in (line.split() for line in (tmp_path / "log").read_text().splitlines()):
        assert seen.setdefault(step, text) == text
    return torn
