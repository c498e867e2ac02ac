"""Indexes: what is read once is not read again, and a long run opens with little work."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgraph.view import answers, index
from rollgraph.view.index import Database
from rollgraph.view.runs import RunData
from tests.view.synthetic_run import (
    HEALTHY,
    index_all,
    make_sample,
    open_run,
    work_of,
    write_group,
    write_lines,
    write_metrics,
    write_run,
)

NAMES = "reward\npolicy/kl\npolicy/entropy\nlength/mean"


def write_long_run(folder: Path, steps: int, samples: int, size: int = 8) -> None:
    """Many rows, written as text: a million of them would take minutes as records."""
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
    """What the page asks for when it opens a run, its newest samples, and one of them."""
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
    assert run.counters.lines_parsed == 0  # nothing of what was indexed
    look_at(run)
    assert run.counters.bytes_read < 100_000
    assert run.counters.lines_parsed <= 8 * (20 + 1 + 20)
    assert run.step == steps - 1
    series = answers.answer_series(run, {"names": "reward", "points": "100"})["series"]["reward"]
    assert len(series["x"]) <= 100
    assert series["low"][0] == 0.5
    assert series["high"][-1] == steps - 0.5
    total = answers.answer_samples(run, {"reward_min": "7", "reward_max": "7"})["total"]
    assert total == samples // 8


def test_a_long_run_opens_with_little_work(tmp_path: Path) -> None:
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
    assert list(open_run(folder).samples.groups()) == list(run.samples.groups())


def test_a_large_file_is_indexed_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "UPDATE_BYTES", 4000)
    folder = write_run(tmp_path / "run", steps=100)
    run = open_run(folder)
    assert 0 < run.metrics.indexed_fraction < 1
    assert any("being indexed" in note for note in run.notes())
    first = len(run.metrics.steps())
    assert 0 < first < 100
    index_all(run)
    assert len(run.metrics.steps()) == 100
    assert not any("being indexed" in note for note in run.notes())


def test_a_saved_index_may_end_inside_a_group(tmp_path: Path) -> None:
    """The file may end in the middle of a group when the index is saved."""
    folder = write_run(tmp_path / "run", steps=5)
    write_group(folder, 0, 7, size=2)
    write_group(folder, 1, 8, size=3)
    open_run(folder, tmp_path / "cache")
    write_group(folder, 1, 8, size=2)
    write_group(folder, 2, 9, size=1)
    run = open_run(folder, tmp_path / "cache")
    assert run.counters.lines_parsed == 3
    assert [len(run.samples.read_group(group)) for group in run.samples.groups()] == [2, 5, 1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_replaced_file_is_indexed_again(tmp_path: Path, name: str) -> None:
    """A resumed run cuts its files and writes on; the new one may be as long as the old one was."""
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
        check_equal(run, fresh)


def test_a_file_rewritten_in_place_is_indexed_again(tmp_path: Path) -> None:
    """A copy onto it leaves the same file with other lines, and possibly more of them."""
    folder = write_run(tmp_path / "run", steps=4)
    run = open_run(folder)
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "reward": -7.0, "text": "x" * 2000}) + "\n" for step in range(9))
    run.update()
    assert run.metrics.column("reward").tolist() == [-7.0] * 9
    assert run.metrics.progress.damaged_lines == 0


def test_an_unfinished_line_of_megabytes_does_not_delay_the_index(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    write_group(folder, 0, 0)
    whole = (folder / "samples.jsonl").stat().st_size
    line = json.dumps(make_sample(1, 0, 0, completion="x" * (3 << 20)))
    with (folder / "samples.jsonl").open("a") as file:
        file.write(line)
    run = open_run(folder)
    run.update()  # the second portion is the half line
    assert (run.is_indexed, run.samples.progress.indexed_bytes) == (True, whole)
    assert any("half-written" in note for note in run.notes())
    with (folder / "samples.jsonl").open("a") as file:
        file.write("\n")
    run.update()
    assert (run.is_indexed, run.samples.count_groups()) == (True, 2)


# -- the database ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", steps=10)
    write_group(folder, 3, 1)
    return folder


def damage_header(file: Path) -> None:
    file.write_bytes(b"x" * 40 + file.read_bytes()[40:])


def cut_in_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite_tables(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:4096] + b"x" * (file.stat().st_size - 4096))


def leave_a_stale_journal(file: Path) -> None:
    Path(f"{file}-journal").write_bytes(b"x" * 10_000)


@pytest.mark.parametrize("damage", [damage_header, cut_in_half, overwrite_tables, os.unlink])
def test_a_damaged_index_is_rebuilt(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with open_run(folder, tmp_path / "cache").opened():
        pass
    damage(tmp_path / "cache" / "index.sqlite")
    with open_run(folder, tmp_path / "cache").opened() as run:
        assert run.counters.lines_parsed == 10 + 4
        check_equal(run, open_run(folder))
    open_run(folder, tmp_path / "cache")  # where the file was repaired by its removal
    with open_run(folder, tmp_path / "cache").opened() as run:
        assert run.counters.lines_parsed == 0
        check_equal(run, open_run(folder))


def test_a_journal_of_something_else_is_ignored(folder: Path, tmp_path: Path) -> None:
    with open_run(folder, tmp_path / "cache").opened():
        pass
    leave_a_stale_journal(tmp_path / "cache" / "index.sqlite")
    check_equal(open_run(folder, tmp_path / "cache"), open_run(folder))


def test_an_index_damaged_while_in_use_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    run = open_run(folder, tmp_path / "cache")
    with run.opened():
        pass

    def ask() -> None:
        with run.opened():
            overwrite_tables(tmp_path / "cache" / "index.sqlite")
            run.metrics.steps()

    with pytest.raises(sqlite3.DatabaseError):
        ask()
    assert not (tmp_path / "cache" / "index.sqlite").exists()
    with run.opened():
        check_equal(run, open_run(folder))


def test_an_unwritable_cache_costs_only_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    check_equal(open_run(folder, tmp_path / "cache"), open_run(folder))


def test_a_full_disk_costs_only_time(folder: Path, tmp_path: Path) -> None:
    write_metrics(folder, HEALTHY, range(10, 2000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        run = index_all(open_run(folder, tmp_path / "cache"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_equal(run, index_all(open_run(folder)))
    with index_all(open_run(folder, tmp_path / "cache")).opened() as run:  # space was made
        check_equal(run, index_all(open_run(folder)))


def test_a_locked_index_costs_only_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.01)
    with open_run(folder, tmp_path / "cache").opened():
        pass
    locking = sqlite3.connect(tmp_path / "cache" / "index.sqlite", isolation_level=None)
    locking.execute("BEGIN EXCLUSIVE")
    run = open_run(folder, tmp_path / "cache")
    locking.close()
    check_equal(run, open_run(folder))


def test_servers_share_the_work_of_indexing_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "UPDATE_BYTES", 4000)
    folder = write_run(tmp_path / "run", steps=100)
    for step in range(20):
        write_group(folder, step, 0)
    servers = [open_run(folder, tmp_path / "cache") for _ in range(3)]
    while not all(server.is_indexed for server in servers):
        for server in servers:
            server.update()
    fresh = index_all(open_run(folder))
    assert sum(server.counters.lines_parsed for server in servers) == fresh.counters.lines_parsed
    for server in servers:
        with server.opened():
            check_equal(server, fresh)


def test_a_portion_that_another_server_stored_first_is_not_stored_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunData("first", "run", folder, Database(tmp_path / "index.sqlite"))
    second = RunData("second", "run", folder, Database(tmp_path / "index.sqlite"))

    def parse_after_the_second(*arguments: Any) -> dict[str, Any] | None:
        monkeypatch.undo()
        with second.opened():
            assert len(second.metrics.steps()) == 10
        return index.parse_object(*arguments)

    monkeypatch.setattr(index, "parse_object", parse_after_the_second)
    with index_all(first).opened():
        check_equal(first, open_run(folder))
        assert (first.metrics.superseded_count, first.samples.superseded_count) == (0, 0)


@pytest.mark.multi
def test_a_process_that_is_killed_leaves_whole_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed in a transaction whose pages are in the file already."""
    monkeypatch.setattr(index, "UPDATE_BYTES", 4000)
    folder = write_run(tmp_path / "run", steps=100)
    for step in range(20):
        write_group(folder, step, 0)
    process = os.fork()
    if not process:
        try:
            open_run(folder, tmp_path / "cache")
            with Database(tmp_path / "cache" / "index.sqlite").writing() as connection:
                connection.execute("PRAGMA cache_size = 1")
                connection.execute("DELETE FROM chunks")
                connection.executemany(
                    "INSERT INTO samples VALUES (-?, 0, '', 0)", [(row,) for row in range(1, 10_000)]
                )
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "cache" / "index.sqlite-journal").stat().st_size > 0
    run = index_all(RunData("run", "run", folder, Database(tmp_path / "cache" / "index.sqlite")))
    fresh = index_all(open_run(folder))
    assert fresh.counters.lines_parsed == 100 + 80
    assert 80 < run.counters.lines_parsed < 100 + 80  # one portion of each file was kept
    with run.opened():
        check_equal(run, fresh)
    assert not (tmp_path / "cache" / "index.sqlite-journal").exists()


def test_an_index_deleted_while_in_use_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    run = open_run(folder, tmp_path / "cache")
    for _ in range(2):
        with run.opened():
            check_equal(run, open_run(folder))
        (tmp_path / "cache" / "index.sqlite").unlink()
    with run.opened():
        check_equal(run, open_run(folder))


def test_a_server_that_could_not_read_a_file_does_not_empty_it_for_others(folder: Path, tmp_path: Path) -> None:
    first = open_run(folder, tmp_path / "cache")
    second = open_run(folder, tmp_path / "cache")
    (folder / "metrics.jsonl").rename(tmp_path / "elsewhere")
    with second.opened():
        assert second.metrics.steps().tolist() == []
    (tmp_path / "elsewhere").rename(folder / "metrics.jsonl")
    for run in (first, second):
        with run.opened():
            check_equal(run, open_run(folder))


def test_the_index_is_outside_the_run_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(folder.iterdir())
    with RunData("run", "run", folder).opened() as run:
        assert run.step == 9
        assert sorted(folder.iterdir()) == before
    (saved,) = (tmp_path / "cache" / "rollgraph" / "view").iterdir()
    assert saved.suffix == ".sqlite"


# -- columns and groups ----------------------------------------------------------------------------


def check_equal(run: RunData, fresh: RunData) -> None:
    """Both know the same of the run."""
    assert run.metrics.names == fresh.metrics.names
    for metric in ["step", *fresh.metrics.names]:
        assert np.array_equal(run.metrics.column(metric), fresh.metrics.column(metric), equal_nan=True)
    assert list(run.samples.groups()) == list(fresh.samples.groups())
    for reward in ("0.1", "0.4", "0.7"):
        wanted = answers.answer_samples(fresh, {"reward_min": reward})
        assert answers.answer_samples(run, {"reward_min": reward}) == wanted
    assert run.notes() == fresh.notes()


def test_columns_that_span_chunks_keep_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    expected: dict[int, float] = {}
    with monkeypatch.context() as few:
        few.setattr(index, "CHUNK_ROWS", 3)
        growing = open_run(folder)
        for turn, steps in enumerate([range(1), range(1, 8), range(5, 6), range(6, 7), range(3, 12), range(2, 4)]):
            curves = {"reward": lambda step: 0.5, f"new/{turn}": lambda step, turn=turn: float(turn)}
            write_metrics(folder, curves, steps)
            expected = {step: value for step, value in expected.items() if step < steps[0]}
            expected |= dict.fromkeys(steps, float(turn))
            for size in (2, 1):  # a group in two parts
                write_group(folder, steps[-1], 0, size=size, finish_reason="length")
                growing.update()
        whole = open_run(folder)
        for run in (growing, whole):
            assert run.metrics.steps().tolist() == list(expected)
            assert run.metrics.column("reward").tolist() == [0.5] * len(expected)
            for turn in range(6):
                values = [value if value == turn else math.nan for value in expected.values()]
                assert np.array_equal(run.metrics.column(f"new/{turn}"), values, equal_nan=True)
        check_equal(growing, whole)
        assert [group.step for group in whole.samples.groups()] == [0, 3]
        assert whole.metrics.superseded_count == 1 + 7 + 1 + 1 + 9 + 2 - len(expected)
        assert whole.samples.superseded_count == 4


def test_names_that_are_not_unicode_are_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    names = ["a\0b", "\ud800", "\x7f'\"; DROP TABLE files", "é", ""]
    write_lines(folder / "metrics.jsonl", [{"step": 0, **dict.fromkeys(names, 1.5)}])
    run = open_run(folder)
    assert run.metrics.names == names
    assert [run.metrics.column(name).tolist() for name in names] == [[1.5]] * len(names)


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
    assert run.samples.count_groups() == 1


def test_opening_a_long_run_indexes_only_a_small_portion(tmp_path: Path) -> None:
    write_long_run(tmp_path / "run", steps=5_000, samples=8_000)
    size = sum((tmp_path / "run" / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl"))
    assert size > 2_000_000
    run = open_run(tmp_path / "run")
    assert not run.is_indexed
    assert run.counters.bytes_read < 600_000
