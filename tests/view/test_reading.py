"""Run folders that are unfinished, resumed, incomplete, damaged or of another version: notes, never errors."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgraph.view import answers
from rollgraph.view import runs as catalog_module
from rollgraph.view.charts import AxisRange, downsample, find_phases, find_series
from rollgraph.view.runs import Catalog, RunData
from tests.view.synthetic_run import (
    HEALTHY,
    index_all,
    make_sample,
    open_run,
    write_group,
    write_lines,
    write_metrics,
    write_run,
)

ANSWERS = (
    answers.answer_names,
    answers.answer_series,
    answers.answer_phases,
    answers.answer_samples,
    answers.answer_prompts,
    answers.answer_diagnosis,
    answers.answer_machine,
)


def all_answers(run: RunData) -> str:
    """All answers about a run, as JSON. Raises if one cannot be written as JSON."""
    run_answers = [answer(run, {"names": "\n".join(run.metrics.names)}) for answer in ANSWERS]
    return "".join(map(answers.dump_json, [*run_answers, run.summary()]))


def test_an_unfinished_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    line = json.dumps({"step": 3, "reward": 0.75})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[:9])
    run = open_run(folder)
    assert run.step == 2
    note = "metrics.jsonl ends in a half-written line, which is left out."
    assert note in run.notes()
    assert not any("damaged" in text for text in run.notes())
    (folder / "run.lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert note not in run.notes()  # the run is writing it
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[9:] + "\n")
    run.update()
    assert run.step == 3
    assert run.metrics.column("reward")[-1] == 0.75


def test_a_resumed_run_hides_steps_that_were_taken_again(tmp_path: Path) -> None:
    """Steps 6 to 9 of the first start are obsolete, also those that the second start has not reached."""
    folder = write_run(tmp_path / "run", steps=10)
    for step in (4, 6, 8):
        write_group(folder, step, 0, prompt="old")
    write_lines(folder / "starts.jsonl", [{"time": "2026-11-16T11:00:00+00:00", "first_step": 6}])
    write_metrics(folder, {**HEALTHY, "reward": lambda step: -1.0}, range(6, 8))
    write_group(folder, 6, 0, prompt="new")
    run = open_run(folder)
    assert run.metrics.steps().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert run.metrics.column("reward").tolist()[5:] == [HEALTHY["reward"](5), -1.0, -1.0]
    groups = answers.answer_samples(run, {"order": "oldest"})["groups"]
    assert [(group["step"], group["prompt"]) for group in groups] == [(4, "old"), (6, "new")]
    notes = " ".join(run.notes())
    assert "resumed at step 6" in notes
    assert "metrics.jsonl has 4 entries of steps that were taken again" in notes


def test_a_group_written_twice_is_shown_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    for prompt in ("old", "new"):
        for group in (0, 1):
            write_group(folder, 2, group, prompt=prompt)
    groups = answers.answer_samples(open_run(folder), {})["groups"]
    assert sorted((group["group"], group["prompt"]) for group in groups) == [(0, "new"), (1, "new")]


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\0\0\0\n[1, 2]\n{"reward": 1}\n\xff\xfe\n' + b'{"step": 1e999}\n' + b"[" * 5000 + b"\n")
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": "x", "group": {}}\n{"step": 1, "split": "elsewhere"}\n')
    write_metrics(folder, {"reward": lambda step: float("nan")}, range(2, 4))
    run = open_run(folder)
    assert run.step == 3
    assert "metrics.jsonl has 6 lines that are damaged" in " ".join(run.notes())
    assert "samples.jsonl has 2 lines that are damaged" in " ".join(run.notes())
    all_answers(run)


@pytest.mark.parametrize("missing", ["config.yaml", "starts.jsonl", "metrics.jsonl", "samples.jsonl", "graphs.json"])
def test_a_missing_file_leaves_a_note(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    write_group(folder, 5, 0)
    (folder / "graphs.json").write_text('{"graphs": []}')
    (folder / missing).unlink()
    run = open_run(folder)
    assert missing in all_answers(run)
    for name in ("config.yaml", "starts.jsonl", "metrics.jsonl", "samples.jsonl", "graphs.json"):
        (folder / name).unlink(missing_ok=True)
    all_answers(open_run(folder))


@pytest.mark.parametrize("content", ["", "[1]", "{", "a: [", "\0", "x" * 100, '{"graphs": 5}'])
def test_files_with_unexpected_content_open(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    for name in ("config.yaml", "starts.jsonl", "graphs.json", "memory.json", "run.lock"):
        (folder / name).write_text(content)
    all_answers(open_run(folder))


def test_fields_of_another_version_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    write_lines(folder / "starts.jsonl", [{"versions": {"rollgraph": "99.0"}, "first_step": "later", "ranks": 8}])
    strange = [
        {"step": 1},
        {"step": 1, "spans": 5, "rewards": [1], "tokens": "many", "reward": None, "token_values": []},
        {"step": 1, "group": 1, "reward": 10**400, "advantage": 10**400, "tokens": 10**400},
        {"step": 2, "prompt": ["a", "list"], "completion": None, "spans": [3, {"start": -1, "end": "x"}]},
        make_sample(2, 5, 0, columns={"inf": math.inf, "list": [math.nan]}, extra={"deep": [[1]]}),
        make_sample(3, 0, 0, token_values={"text": ["a"], "logprob": ["x"], "kl": [float("inf")], "new": [1]}),
    ]
    write_lines(folder / "samples.jsonl", strange)
    write_lines(folder / "samples.jsonl", [{"step": 10**30}, {"step": 1, "group": -(10**30)}])
    run = open_run(folder)
    assert run.samples.progress.damaged_lines == 2
    assert "rollgraph 99.0 wrote this run" in all_answers(run)
    assert "8 ranks" in json.dumps(answers.answer_machine(run, {}))
    for group in answers.answer_samples(run, {})["groups"]:
        for sample in group["samples"]:
            answers.dump_json(answers.answer_sample(run, sample["id"]))


def test_ranks_and_memory_by_phase(tmp_path: Path) -> None:
    curves = {f"speed__ranks__{rank}__seconds__generate": lambda step, rank=rank: 1.0 + rank for rank in range(3)}
    curves |= {"speed__memory_gib": lambda step: 4.0, "speed__memory_gib__train": lambda step: 2.0 + (step == 7)}
    folder = write_run(tmp_path / "run", steps=10, **curves)
    lines = [
        {"name": "parameters", "nbytes": 3, "where": "device", "phases": ["generate", "train"]},
        {"name": "activations", "nbytes": 5, "where": "device", "phases": ["train"]},
        {"name": "optimizer, offloaded", "nbytes": 7, "where": "host", "phases": ["generate", "train"]},
        {"name": "of another version"},
    ]
    record = {
        "device": "cpu",
        "lines": lines,
        "chosen": {"memory.logits": "chunks"},
        "reasons": {"memory.logits": "too large"},
    }
    (folder / "memory.json").write_text(json.dumps(record))
    machine = answers.answer_machine(open_run(folder), {})
    assert [(rank["rank"], rank["step_seconds"]) for rank in machine["ranks"]] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert machine["memory"]["measured"] == {"peak": 4 * 2**30, "train": 3 * 2**30}
    assert machine["memory"]["planned"] == {
        "lines": lines[:3],
        "phases": {"generate": 3, "score": 0, "train": 8},
        "peak": 8,
        "device": "cpu",
        "device_bytes": None,
        "reasons": [{"key": "memory.logits", "value": "chunks", "reason": "too large"}],
    }


def test_the_status_of_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6)  # 6 of 60 steps
    summary = open_run(folder).summary()
    assert (summary["status"], summary["step"], summary["steps"], summary["seconds_left"]) == ("stopped", 5, 60, None)
    assert any("samples.jsonl is missing" in note for note in open_run(folder).notes())
    (folder / "run.lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    summary = open_run(folder).summary()
    assert (summary["status"], summary["seconds_left"]) == ("running", 54 * 2.0)
    assert open_run(folder).notes() == []  # a running run may still write them
    (folder / "run.lock").write_text(f"process 999999999 on {socket.gethostname()}\n")
    assert open_run(folder).summary()["status"] == "stopped"
    (folder / "run.lock").write_text("process 1 on another.machine\n")
    assert open_run(folder).summary()["status"] == "running"
    for name in ("metrics.jsonl", "run.lock"):
        os.utime(folder / name, (1e9, 1e9))
    assert open_run(folder).summary()["status"] == "unknown"
    (folder / "run.lock").unlink()
    (folder / "graphs.json").write_text("{}")
    assert open_run(folder).summary()["status"] == "stopped"  # it was stopped before its last step
    write_metrics(folder, HEALTHY, range(6, 60))
    assert open_run(folder).summary()["status"] == "finished"


def test_runs_are_found_below_the_given_folders(tmp_path: Path) -> None:
    root = tmp_path / "named"
    write_run(root / "a" / "run", steps=1)
    write_run(root / "b", steps=1)
    write_run(tmp_path / "elsewhere" / "b", steps=1)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    catalog = Catalog([root])
    assert [(run.id, run.name) for run in catalog.find()] == [("named-b", "named/b"), ("named-a-run", "named/a/run")]
    write_run(root / "c", steps=1)
    assert {run.id for run in catalog.find()} == {"named-b", "named-a-run", "named-c"}
    both = Catalog([root / "b", tmp_path / "elsewhere" / "b"])
    first, second = both.find()
    assert first.id == "b"
    assert second.id.startswith("b-")
    assert both.get(second.id) is second


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    secret = tmp_path / "secret.jsonl"
    write_lines(secret, [make_sample(0, 0, 0, completion="secret")])
    (folder / "samples.jsonl").symlink_to(secret)
    (folder / "graphs.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "secret.json").write_text('{"graphs": ["secret"]}')
    run = open_run(folder)
    assert "secret" not in all_answers(run).replace(str(tmp_path), "")
    assert (
        "samples.jsonl is a link to somewhere else, and is not shown, so there are no samples to show." in run.notes()
    )


def test_links_created_later_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "mine", steps=2)
    write_group(folder, 0, 0)
    run = open_run(folder)
    secret = tmp_path / "secret.jsonl"
    write_lines(secret, [make_sample(0, 0, place, completion="secret") for place in range(9)])
    (folder / "samples.jsonl").unlink()
    (folder / "samples.jsonl").symlink_to(secret)
    run.update()
    assert "secret" not in all_answers(run).replace(str(tmp_path), "")
    (folder / "samples.jsonl").unlink()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    run.update()
    assert run.step is None


BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20))


@pytest.mark.parametrize("config", ["a: &a {b: *a}", "a: 2026-99-99", f"a: {'9' * 5000}", "a: !!int ''", BOMB])
def test_an_unreadable_configuration_leaves_a_note(tmp_path: Path, config: str) -> None:
    folder = write_run(tmp_path / "run", steps=2, config=config)
    catalog = Catalog([folder])
    assert any("the configuration is not known" in note for note in open_run(folder).notes())
    assert answers.answer_compare(catalog, {"ids": catalog.find()[0].id})["config"] == []
    assert answers.list_runs(catalog)["notes"] == []


def test_a_named_pipe_as_lock_does_not_block(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    os.mkfifo(folder / "run.lock")
    assert open_run(folder).status == "stopped"


def test_too_many_folders_leave_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MAX_FOLDERS", 3)
    for name in "abcd":
        write_run(tmp_path / "runs" / name, steps=1)
    answer = answers.list_runs(Catalog([tmp_path / "runs"]))
    assert [run["name"] for run in answer["runs"]] == ["runs/a", "runs/b"]
    assert answer["notes"] == ["runs has many folders: only the first 3 were searched for runs."]


def test_a_run_beyond_its_last_step_has_no_time_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6, config="steps: 4\n")
    (folder / "run.lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert open_run(folder).summary()["seconds_left"] == 0


def test_pipes_and_folders_in_place_of_files_leave_notes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    os.mkfifo(folder / "samples.jsonl")  # opening it would block
    run = open_run(folder)
    assert any("samples.jsonl is a named pipe" in note for note in run.notes())
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    run.update()
    assert any("metrics.jsonl is a folder" in note for note in run.notes())
    assert run.step is None
    all_answers(run)


# -- charts ------------------------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_extremes(tmp_path: Path) -> None:
    spike = {"reward": lambda step: 9.0 if step == 777 else float(step % 2)}
    folder = write_run(tmp_path / "run", steps=1000, **spike)
    metrics = index_all(open_run(folder)).metrics
    (thinned,) = find_series(metrics, ["reward"], AxisRange(points=10)).values()
    assert len(thinned["x"]) == 10
    assert max(thinned["high"]) == 9.0
    assert thinned["low"] == [0.0] * 10
    assert thinned["y"][0] == 0.5
    (zoomed,) = find_series(metrics, ["reward"], AxisRange(start=775, end=779)).values()
    assert zoomed["x"] == [775, 776, 777, 778, 779]
    assert zoomed["y"] == zoomed["low"] == zoomed["high"] == [1, 0, 9, 0, 1]
    values = metrics.column("reward")
    assert downsample(values[:0], values[:0], 5) == {"x": [], "y": [], "low": [], "high": []}


def test_the_time_axis_sums_steps_and_phases_fill_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    write_metrics(folder, HEALTHY, range(0, 40, 10))  # log.every: 10
    metrics = open_run(folder).metrics
    (series,) = find_series(metrics, ["reward"], AxisRange("time")).values()
    assert series["x"] == [2.0, 22.0, 42.0, 62.0]
    write_lines(tmp_path / "untimed" / "metrics.jsonl", [{"step": step, "reward": 1.0} for step in range(3)])
    untimed = answers.answer_series(open_run(tmp_path / "untimed"), {"names": "reward", "x": "time"})
    assert any("no axis of time" in note for note in untimed["notes"])
    phases = find_phases(metrics, AxisRange())
    assert phases["x"] == [0, 10, 20, 30]
    assert phases["phases"] == {"generate": [1.25] * 4, "train": [0.5] * 4, "switching": [0.25] * 4}


def test_a_line_without_a_step_adds_no_metric(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    write_lines(folder / "metrics.jsonl", [{"other": 1.0}])
    run = open_run(folder)
    assert "other" not in run.metrics.names
    assert "1 line that is damaged" in " ".join(run.notes())


def test_numbers_beyond_float_range_are_left_out(tmp_path: Path) -> None:
    huge = "9" * 400
    config = f"steps: {huge}\noptimizer: {{clip_norm: {huge}}}\ndata: {{prompts_per_step: .inf}}\n"
    folder = write_run(tmp_path / "run", steps=30, config=config)
    (folder / "run.lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    run = open_run(folder)
    assert (run.steps, run.summary()["seconds_left"]) == (None, None)
    all_answers(run)


def test_metric_names_may_have_commas_and_spaces(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, **{"logged__a, b c": lambda step: 2.0})
    answer = answers.answer_series(open_run(folder), {"names": "logged/a, b c\nreward"})
    assert answer["series"].keys() == {"logged/a, b c", "reward"}
    assert answer["series"]["logged/a, b c"]["y"] == [2.0] * 3
    assert not any("has no" in note for note in answer["notes"])


def test_an_unreadable_folder_is_noted_and_others_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "mine", steps=3)
    locked = tmp_path / "runs" / "locked"
    write_run(locked, steps=3)
    monkeypatch.setattr(os, "stat", _refuse_inside(locked, os.stat))  # since permissions do not bind root
    monkeypatch.setattr(os, "scandir", _refuse_inside(locked, os.scandir))
    answer = answers.list_runs(Catalog([tmp_path / "runs"]))
    assert [run["name"] for run in answer["runs"]] == ["runs/mine"]
    assert answer["notes"] == ["locked cannot be read: Permission denied."]


def _refuse_inside(folder: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(path: Any = ".", *rest: Any, **options: Any) -> Any:
        is_inside = isinstance(path, str | Path) and folder in Path(path).parents
        if is_inside or (call.__name__ == "scandir" and Path(path) == folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return call(path, *rest, **options)

    return refuse
