"""The sinks of metrics, with stand-ins for the optional packages and with the real ones."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgraph.config import LogConfig
from rollgraph.files import FileError
from rollgraph.log import SampleWriter, SinkError, check_sinks, close_sinks, make_sinks, truncate_jsonl
from rollgraph.types import Prompt, Rollout

# Stand-ins for the optional packages: each has the interface that a sink uses, and records the calls.
STAND_INS = {
    "tensorboardX": """
import json, pathlib
class SummaryWriter:
    def __init__(self, logdir, purge_step=None, flush_secs=120):
        pathlib.Path(logdir).mkdir(parents=True, exist_ok=True)
        self.file = open(pathlib.Path(logdir) / "calls.jsonl", "a")
        self.record("open", purge_step)
    def record(self, *call): print(json.dumps(call), file=self.file, flush=True)
    def add_scalar(self, tag, scalar_value, global_step=None): self.record(tag, scalar_value, global_step)
    def close(self): self.record("close"); self.file.close()
""",
    "wandb": """
import json, pathlib
class Run:
    def __init__(self, folder): self.file = open(pathlib.Path(folder) / "calls.jsonl", "a")
    def record(self, *call): print(json.dumps(call), file=self.file, flush=True)
    def define_metric(self, name, step_metric=None): self.record(name, step_metric)
    def log(self, data, step=None): self.record(data, step)
    def finish(self): self.record("finish"); self.file.close()
def init(dir=None, id=None, resume=None, config=None, project=None):
    run = Run(dir); run.record("init", id, resume, config, project)
    return run
""",
    "mlflow": """
import json, types
calls = []
def set_tracking_uri(uri): calls.append(("uri", uri))
def set_experiment(name): calls.append(("experiment", name))
def start_run(run_id=None, run_name=None):
    calls.append(("start", run_id, run_name))
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "new"))
def log_dict(dictionary, artifact_file): calls.append((artifact_file, dictionary))
def log_metrics(metrics, step=None): calls.append((metrics, step))
def end_run(): calls.append(("end",))
""",
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, source in STAND_INS.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield
    for name in STAND_INS:
        sys.modules.pop(name, None)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def install_only(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr("rollgraph.log.metrics._is_installed", lambda package: package in packages)


def test_missing_tensorboard_is_a_note_unless_it_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_only(monkeypatch)
    notes: list[str] = []
    sinks = make_sinks(LogConfig(), tmp_path, note=notes.append)
    sinks[0].write(3, {"reward": 0.5})
    assert len(sinks) == 1
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, "reward": 0.5}]
    assert notes == [
        "tensorboard is not installed, so there is no tensorboard log (pip install 'rollgraph[tensorboard]')"
    ]
    with pytest.raises(SinkError, match=r"tensorboard: pip install 'rollgraph\[tensorboard\]'"):
        make_sinks(LogConfig(sinks=("jsonl", "tensorboard")), tmp_path / "other", note=notes.append)
    assert len(notes) == 1
    assert not (tmp_path / "other").exists()


def test_all_missing_packages_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_only(monkeypatch)
    with pytest.raises(SinkError, match=r"'rollgraph\[wandb\]'; mlflow: pip install 'rollgraph\[mlflow\]'"):
        make_sinks(LogConfig(sinks=("wandb", "mlflow")), tmp_path)


def test_the_real_tensorboard_reads_a_resumed_run(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for attempt, (resume_at, steps) in enumerate(((-1, (-1, 0)), (-1, (-1, 0, 1, 2)), (1, (1,)))):
        (sink,) = make_sinks(LogConfig(sinks=("tensorboard",)), tmp_path, resume_at=resume_at)
        for step in steps:
            sink.write(step, {"reward": 10 * attempt + step})
        close_sinks([sink])
    events = loader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(-1, 9.0), (0, 10.0), (1, 21.0)]


@pytest.mark.usefixtures("stand_ins")
def test_tensorboardx_takes_the_place_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_only(monkeypatch, "tensorboardX")
    sinks = make_sinks(LogConfig(), tmp_path, resume_at=4)
    for sink in sinks:
        sink.write(4, {"reward": 0.5, "kl": 0.1})
    close_sinks(sinks)
    calls = [["open", 4], ["reward", 0.5, 4], ["kl", 0.1, 4], ["close"]]
    assert lines(tmp_path / "tensorboard" / "calls.jsonl") == calls


@pytest.mark.usefixtures("stand_ins")
def test_a_resumed_wandb_run_has_the_same_id(tmp_path: Path) -> None:
    for step in (-1, 0):
        sinks = make_sinks(LogConfig(sinks=("wandb",), wandb={"project": "p"}), tmp_path, run_config={"seed": 7})
        sinks[0].write(step, {"reward": 0.5})
        close_sinks(sinks)
    first, axis, log, finish, second, _, later, _ = lines(tmp_path / "calls.jsonl")
    assert first == second == ["init", first[1], "allow", {"seed": 7}, "p"]
    assert len(first[1]) == 12
    assert (axis, finish) == (["*", "step"], ["finish"])
    assert (log, later) == ([{"step": -1, "reward": 0.5}, 0], [{"step": 0, "reward": 0.5}, 1])


@pytest.mark.usefixtures("stand_ins")
def test_a_resumed_mlflow_run_goes_on(tmp_path: Path) -> None:
    log = LogConfig(sinks=("mlflow",), mlflow={"tracking_uri": "u", "experiment": "e", "run_name": "n"})
    for step in (0, 1):
        sinks = make_sinks(log, tmp_path, run_config={"seed": 7})
        sinks[0].write(step, {"validation/pass@4": 0.5})
        close_sinks(sinks)
    set_up = [("uri", "u"), ("experiment", "e")]
    assert importlib.import_module("mlflow").calls == [
        *(*set_up, ("start", None, "n"), ("config.json", {"seed": 7}), ({"validation/pass_4": 0.5}, 0), ("end",)),
        *(*set_up, ("start", "new", "n"), ({"validation/pass_4": 0.5}, 1), ("end",)),
    ]


def test_the_real_wandb_writes_both_parts_of_a_resumed_run(tmp_path: Path) -> None:
    """In offline mode, each part of the run has its own file, to be synced later."""
    wandb = pytest.importorskip("wandb")
    options = {"mode": "offline", "project": "p", "settings": wandb.Settings(console="off", silent=True)}
    for step in (0, 1):
        sinks = make_sinks(LogConfig(sinks=("wandb",), wandb=options), tmp_path, run_config={"seed": 7})
        sinks[0].write(step, {"validation/pass@4": 0.5})
        close_sinks(sinks)
    name = (tmp_path / "wandb_run.txt").read_text().strip()
    written = list((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert written
    assert all(b"validation/pass@4" in path.read_bytes() for path in written)


def test_the_real_mlflow_resumes_a_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    log = LogConfig(sinks=("mlflow",), mlflow={"tracking_uri": uri, "experiment": "e", "run_name": "n"})
    for step in (0, 1):
        sinks = make_sinks(log, tmp_path, run_config={"seed": 7})
        sinks[0].write(step, {"validation/pass@4": step + 0.5})
        close_sinks(sinks)
    name = (tmp_path / "mlflow_run.txt").read_text().strip()
    history = mlflow.tracking.MlflowClient(uri).get_metric_history(name, "validation/pass_4")
    assert [(entry.step, entry.value) for entry in history] == [(0, 0.5), (1, 1.5)]
    assert mlflow.artifacts.load_dict(f"runs:/{name}/config.json") == {"seed": 7}


@pytest.mark.usefixtures("stand_ins")
def test_unknown_options_of_mlflow_are_named(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="unknown options: name"):
        make_sinks(LogConfig(sinks=("mlflow",), mlflow={"name": "n"}), tmp_path)


def test_every_sink_is_closed_even_if_one_fails() -> None:
    closed = []

    class Failing:
        def write(self, step: int, values: dict[str, float]) -> None: ...

        def close(self) -> None:
            closed.append(self)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        close_sinks([Failing(), Failing()])
    assert len(closed) == 2


def test_metrics_after_the_resumed_step_are_written_once(tmp_path: Path) -> None:
    log = LogConfig(sinks=("jsonl",))
    for resume_at, steps in ((None, range(5)), (3, range(3, 6))):
        (sink,) = make_sinks(log, tmp_path, resume_at=resume_at)
        for step in steps:
            sink.write(step, {"resumed": float(resume_at is not None)})
    rows = lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["resumed"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]


@pytest.mark.parametrize("torn", [b'{"step": 1, "rew', b'{"step": 1}', b'{"step": 1, "text": "\xe2\x82', b"\n", b"7\n"])
def test_a_torn_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "text": "\xe2\x82\xac"}\n{"step": 2}\n{"step": 1}\n' + torn)
    assert truncate_jsonl(path, 1) == 2
    assert path.read_bytes() == b'{"step": 0, "text": "\xe2\x82\xac"}\n{"step": 1}\n'
    assert truncate_jsonl(path, 1) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damaged_lines_are_reported_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second line has flipped bits, and a crash cut off the last line."""
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(b'{"step": %d, "reward": 0.5}\n' % step for step in range(5))
    second = whole.splitlines(keepends=True)[1]
    damaged = second.replace(b'"reward"', b'"rewa\xf2d\x02')
    path.write_bytes(whole.replace(second, damaged) + b'{"step": 5, "rew')
    notes: list[str] = []
    (sink,) = make_sinks(LogConfig(sinks=("jsonl",)), tmp_path, resume_at=4, note=notes.append)
    sink.write(4, {"reward": 0.25})
    close_sinks([sink])
    assert [row["step"] for row in lines(path)] == [0, 2, 3, 4]
    assert notes == [
        f"{path}:2: this line is damaged, and was removed: " + repr('{"step": 1, "rewa\\xf2d\x02: 0.5}'),
        f"{path}:6: the last line was cut off, and was removed: " + repr('{"step": 5, "rew'),
    ]
    (tmp_path / "samples.jsonl").write_bytes(b'{"step": 0}\n' + b"\0" * 5000)
    SampleWriter(tmp_path, every=1, groups=1, resume_at=1)
    (message,) = capsys.readouterr().err.splitlines()
    assert "samples.jsonl:2: the last line was cut off" in message
    assert len(message) < 800


def test_the_first_damaged_lines_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    path, notes = tmp_path / "metrics.jsonl", list[str]()
    odd = ['{"step": Infinity}', "[" * 100_000, '{"step": null}', "{}", "[1]", '{"step": "x"}', '"step"', "\0"]
    path.write_text("".join(f"{line}\n" for line in odd) + '{"step": 0}\n')
    assert truncate_jsonl(path, 3, notes.append) == len(odd)
    assert [note.split(": ")[0] for note in notes] == [*(f"{path}:{number}" for number in range(1, 6)), str(path)]
    assert notes[-1] == f"{path}: 3 more damaged lines were removed"
    assert path.read_text() == '{"step": 0}\n'


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, exists: bool) -> None:
    run, target = tmp_path / "run", tmp_path / "target.jsonl"
    run.mkdir()
    (run / name).symlink_to(target)
    if exists:
        target.write_text("years of work")

    def write(resume_at: int | None) -> None:
        if name == "metrics.jsonl":
            make_sinks(LogConfig(sinks=("jsonl",)), run, resume_at=resume_at)
        else:
            SampleWriter(run, every=1, groups=1, resume_at=resume_at).write(0, [make_rollout(1.0)], [1.0])

    for resume_at in (None, 0, 5):
        with pytest.raises(FileError, match=rf"{name}: is a link; links are not written through"):
            write(resume_at)
    assert target.exists() == exists
    if exists:
        assert target.read_text() == "years of work"


def test_a_resume_does_not_write_through_a_link_at_its_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / ".metrics.jsonl.tmp").symlink_to(tmp_path / "mine")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert truncate_jsonl(tmp_path / "metrics.jsonl", 0) == 1
    assert (tmp_path / "mine").read_text() == "years of work"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert not (tmp_path / "metrics.jsonl").is_symlink()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_damaged_run_id_does_not_start_a_second_run(tmp_path: Path, name: str) -> None:
    path, target = tmp_path / "run" / f"{name}_run.txt", tmp_path / "target"
    log = LogConfig(sinks=(name,))
    path.parent.mkdir()
    path.with_name(f"{path.name}.sha256").symlink_to(target)
    close_sinks(make_sinks(log, path.parent))
    assert not target.exists()
    whole = path.read_text()
    path.write_text(("f" if whole[0] != "f" else "e") + whole[1:])
    with pytest.raises(SinkError, match=rf"{path.name} is damaged: its checksum differs"):
        make_sinks(log, path.parent)
    path.write_text(whole)
    close_sinks(make_sinks(log, path.parent))


def test_truncating_an_absent_file_does_nothing(tmp_path: Path) -> None:
    assert truncate_jsonl(tmp_path / "absent.jsonl", 3) == 0
    assert not (tmp_path / "absent.jsonl").exists()


def make_rollout(reward: float) -> Rollout:
    prompt = Prompt(id=7, tokens=(48, 43), text="0+")
    return Rollout(prompt, [50, 10], [True, True], [-0.1, -0.2], text="2 €\n", reward=reward, rewards={"exact": reward})


@pytest.mark.usefixtures("stand_ins")
def test_a_broken_package_is_named_before_a_run_begins(tmp_path: Path) -> None:
    (tmp_path / "packages" / "mlflow" / "__init__.py").write_text("raise RuntimeError('wrong version of something')")
    with pytest.raises(SinkError, match=r"log\.sinks: mlflow cannot be imported: RuntimeError: wrong version"):
        check_sinks(LogConfig(sinks=("jsonl", "mlflow")))
    assert check_sinks(LogConfig(sinks=("jsonl", "wandb"))) == ("jsonl", "wandb")
