"""Indexes read each line once, and open a long run with little work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from rollgraph.view import answers, index
from rollgraph.view.runs import RunData
from tests.view.synthetic_run import (
    HEALTHY,
    index_all,
    make_sample,
    open_run,
    work_of,
    write_group,
    write_metrics,
    write_run,
)

NAMES = "reward\npolicy/kl\npolicy/entropy\nlength/mean"


def write_long_run(folder: Path, steps: int, samples: int, size: int = 8) -> None:
    """Write many rows as text, because serializing a million records would take minutes."""
    write_run(folder, steps=0)
    with (folder / "metrics.jsonl").open("w") as file:
        values = ", ".join(f'"{name}": 0.123456789' for name in HEALTHY if name != "reward")
        for step in range(steps):
            file.write(f'{{"step": {step}, "reward": {step}.5, {values}}}\n')
    groups = samples // size
    with (folder / "samples.jsonl").open("w") as file:
        for group in range(groups):
            step = group * steps // groups
            head = f'{{"step": {step}, "split": "train", "group": {group}, "prompt": "prompt {group % 1000}", '
            for place in range(size):
                file.write(f'{head}"completion": "answer {group}.{place}", "reward": {place}.0, "tokens": 5}}\n')


def look_at(run: RunData) -> None:
    """Request what the page requests for a run, its newest samples, and one of them."""
    answers.answer_names(run, {})
    answers.answer_series(run, {"names": NAMES})
    answers.answer_phases(run, {})
    groups = answers.answer_samples(run, {"limit": "20"})["groups"]
    answers.answer_sample(run, groups[0]["samples"][0]["id"])
    answers.answer_samples(run, {"reward_min": "6.5", "limit": "20"})


def check_long_run(folder: Path, cache: Path, steps: int, samples: int) -> None:
    write_long_run(folder, steps, samples)
    index_all(open_run(folder, cache))
    run = open_run(folder, cache)
    assert run.counters.lines_parsed == 0  # all of it is in the cache
    look_at(run)
    columns = len(HEALTHY) + 2
    tables = 64 * samples // 8 + 16 * samples
    assert run.counters.bytes_read < 8 * steps * columns + tables + 100_000
    assert run.counters.lines_parsed <= 8 * (20 + 1 + 20)
    assert run.step == steps - 1
    series = answers.answer_series(run, {"names": "reward", "points": "100"})["series"]["reward"]
    assert len(series["x"]) <= 100
    assert series["low"][0] == 0.5
    assert series["high"][-1] == steps - 0.5
    total = answers.answer_samples(run, {"reward_min": "7", "reward_max": "7"})["total"]
    assert total == samples // 8


def test_a_long_run_opens_with_little_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SAVE_AFTER_BYTES", 1)
    check_long_run(tmp_path / "run", tmp_path / "cache", steps=2_000, samples=8_000)


@pytest.mark.slow
def test_a_run_of_a_million_samples_opens_with_little_work(tmp_path: Path) -> None:
    check_long_run(tmp_path / "run", tmp_path / "cache", steps=100_000, samples=1_000_000)


def test_only_new_lines_of_a_growing_run_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=50)
    for step in range(50):
        write_group(folder, step, 0)
    run = open_run(folder)
    before = run.counters.lines_parsed
    assert before == 50 + 200
    assert not run.update()
    write_metrics(folder, HEALTHY, range(50, 53))
    write_group(folder, 52, 1)
    assert run.update()
    assert run.counters.lines_parsed == before + 3 + 4
    assert run.step == 52
    assert [int(step) for step in run.metrics.steps()] == list(range(53))
    fresh = open_run(folder)
    fresh.samples.path = folder / "samples.jsonl"
    assert np.array_equal(fresh.samples.groups, run.samples.groups)


def test_a_large_file_is_indexed_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.view.index.BLOCK_BYTES", 1000)
    monkeypatch.setattr(index.IndexedFile.update, "__defaults__", (4000,))
    folder = write_run(tmp_path / "run", steps=100)
    run = open_run(folder)
    assert 0 < run.metrics.indexed_fraction < 1
    assert any("being indexed" in note for note in run.notes())
    first = len(run.metrics.steps())
    assert 0 < first < 100
    index_all(run)
    assert len(run.metrics.steps()) == 100
    assert not any("being indexed" in note for note in run.notes())


def test_a_cached_index_may_end_inside_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may end in the middle of a group when the index is saved."""
    monkeypatch.setattr(index, "SAVE_AFTER_BYTES", 1)
    folder = write_run(tmp_path / "run", steps=5)
    write_group(folder, 0, 7, size=2)
    write_group(folder, 1, 8, size=3)
    open_run(folder, tmp_path / "cache")
    write_group(folder, 1, 8, size=2)
    write_group(folder, 2, 9, size=1)
    run = open_run(folder, tmp_path / "cache")
    assert run.counters.lines_parsed == 3
    assert [int(count) for count in run.samples.groups["count"]] == [2, 5, 1]
    assert len(run.samples.read_group(run.samples.groups[1])) == 5


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_replaced_file_is_indexed_again(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run truncates its files and appends, so a new file may be as long as the old one."""
    monkeypatch.setattr(index, "SAVE_AFTER_BYTES", 1)
    folder = write_run(tmp_path / "run", steps=10)
    for step in range(10):
        write_group(folder, step, 1)
    live = open_run(folder, tmp_path / "cache")
    lines = (folder / name).read_text().splitlines(keepends=True)
    text = "".join(lines[: len(lines) // 2]) + "".join(lines[len(lines) // 2 :]).replace("5", "6")
    (folder / "new").write_text(text)
    os.replace(folder / "new", folder / name)
    live.update()
    later = open_run(folder, tmp_path / "cache")
    fresh = open_run(folder)
    for run in (live, later):
        for metric in fresh.metrics.names:
            assert np.array_equal(run.metrics.column(metric), fresh.metrics.column(metric))
        assert np.array_equal(run.samples.groups, fresh.samples.groups)


def test_a_file_rewritten_in_place_is_indexed_again(tmp_path: Path) -> None:
    """Copying onto a file keeps its inode, with other lines and possibly more of them."""
    folder = write_run(tmp_path / "run", steps=4)
    run = open_run(folder)
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "reward": -7.0, "text": "x" * 2000}) + "\n" for step in range(9))
    run.update()
    assert run.metrics.column("reward").tolist() == [-7.0] * 9
    assert run.metrics.damaged_lines == 0


def test_an_unfinished_line_of_megabytes_does_not_delay_the_index(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    write_group(folder, 0, 0)
    whole = (folder / "samples.jsonl").stat().st_size
    line = json.dumps(make_sample(1, 0, 0, completion="x" * (3 << 20)))
    with (folder / "samples.jsonl").open("a") as file:
        file.write(line)
    run = open_run(folder)
    run.update()  # the second portion is the half line
    assert (run.is_indexed, run.samples.indexed_bytes) == (True, whole)
    assert any("half-written" in note for note in run.notes())
    with (folder / "samples.jsonl").open("a") as file:
        file.write("\n")
    run.update()
    assert (run.is_indexed, len(run.samples.groups)) == (True, 2)


@pytest.mark.parametrize("damage", ["header", "array", "format", "missing"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SAVE_AFTER_BYTES", 1)
    folder = write_run(tmp_path / "run", steps=10)
    write_group(folder, 3, 1)
    open_run(folder, tmp_path / "cache")
    for path in (tmp_path / "cache").iterdir():
        if damage == "header" and path.suffix == ".json":
            path.write_bytes(path.read_bytes()[:40])
        elif damage == "array" and path.suffix == ".npy":
            path.write_bytes(path.read_bytes()[:100])
        elif damage == "format" and path.suffix == ".json":
            path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
        elif damage == "missing" and path.suffix == ".npy":
            path.unlink()
    run = open_run(folder, tmp_path / "cache")
    assert run.counters.lines_parsed == 10 + 4
    assert run.step == 9
    assert len(run.samples.groups) == 1


def test_an_unwritable_cache_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SAVE_AFTER_BYTES", 1)
    folder = write_run(tmp_path / "run", steps=10)
    (tmp_path / "cache").write_text("a file, not a folder")
    run = open_run(folder, tmp_path / "cache")
    assert run.step == 9
    assert make_sample(0, 0, 0)["prompt"] == "prompt 0"


def test_tables_packed_while_growing_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    with monkeypatch.context() as few:
        few.setattr("rollgraph.view.indexes.MAX_TAIL_ROWS", 3)
        few.setattr("rollgraph.view.indexes.MAX_TAIL_SAMPLES", 3)
        packed = open_run(folder)
        for step in range(8):
            write_metrics(folder, HEALTHY | {f"new/{step}": lambda step: float(step)}, range(step, step + 1))
            for size in (2, 1):  # each group in two parts
                write_group(folder, step, 0, size=size, finish_reason="length")
                packed.update()
    fresh = open_run(folder)
    assert packed.metrics.names == fresh.metrics.names
    for metric in fresh.metrics.names:
        assert np.array_equal(packed.metrics.column(metric), fresh.metrics.column(metric), equal_nan=True)
    assert np.array_equal(packed.samples.groups, fresh.samples.groups)
    assert np.array_equal(packed.samples.samples, fresh.samples.samples)
    assert len(fresh.samples.groups) == 8


def test_an_unfinished_line_is_not_read_again_before_it_grows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    with (folder / "samples.jsonl").open("w") as file:
        file.write('{"step": 0, "completion": "' + "x" * 10_000)
    run = open_run(folder)
    before = work_of(run)
    run.update()
    assert work_of(run) == before
    with (folder / "samples.jsonl").open("a") as file:
        file.write('"}\n')
    assert run.update()
    assert len(run.samples.groups) == 1


def test_opening_a_long_run_indexes_only_a_small_portion(tmp_path: Path) -> None:
    write_long_run(tmp_path / "run", steps=5_000, samples=8_000)
    size = sum((tmp_path / "run" / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl"))
    assert size > 2_000_000
    run = open_run(tmp_path / "run")
    assert not run.is_indexed
    assert run.counters.bytes_read < 600_000
