"""Metrics: copied to the host once per step, then written to JSON lines, TensorBoard, W&B or MLflow."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from rollgraph.errors import UserError
from rollgraph.files import ESCAPE_SURROGATES, open_for_writing, reporting_full_disk, write_atomically, write_new
from rollgraph.log.streams import note_to_stderr

if TYPE_CHECKING:
    from torch import Tensor

    from rollgraph.config import LogConfig, SinkName


# -- files of JSON lines ---------------------------------------------------------------------------

Notify = Callable[[str], None]
MAX_DAMAGED_LINES_SHOWN = 5  # of one file; the others are only counted


def open_to_append(path: Path) -> IO[str]:
    """Open a file that grows line by line. We refuse a link, because its target belongs to somebody else."""
    return open(open_for_writing(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8", errors=ESCAPE_SURROGATES)


def truncate_jsonl(path: Path, step: int, note: Notify = note_to_stderr) -> int:
    """Remove damaged lines and the lines of steps after `step`. Returns the number of removed lines.

    Damaged lines are reported with their line numbers. A crash cuts off the last line, a failing disk damages others.
    The file is replaced atomically: if we crash in here, it is either the old one or the new one.
    """
    if not path.exists():
        return 0
    open_to_append(path).close()  # refuses a link
    dropped = 0
    damaged: list[str] = []
    temporary = path.with_name(f".{path.name}.tmp")
    write_new(temporary)
    # Read bytes, because a cut-off line may end inside a character.
    size = path.stat().st_size
    with reporting_full_disk(temporary, size), path.open("rb") as old, temporary.open("r+b") as new:
        for number, line in enumerate(old, start=1):
            step_of_line = _read_step(line)
            if step_of_line is not None and step_of_line <= step:
                new.write(line)
                continue
            dropped += 1
            if step_of_line is None:
                damaged.append(f"{path}:{number}: {_describe_damage(line)}")
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)
    for text in damaged[:MAX_DAMAGED_LINES_SHOWN]:
        note(text)
    if len(damaged) > MAX_DAMAGED_LINES_SHOWN:
        note(f"{path}: {len(damaged) - MAX_DAMAGED_LINES_SHOWN} more damaged lines were removed")
    return dropped


def _read_step(line: bytes) -> int | None:
    """The step of a line, or None if the line is damaged."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _describe_damage(line: bytes) -> str:
    """A message about a removed line: the damage, and how the line begins."""
    damage = "this line is damaged" if line.endswith(b"\n") else "the last line was cut off"
    text = line.decode("utf-8", "backslashreplace").strip()
    more = " and so on" if len(text) > 100 else ""
    return f"{damage}, and was removed: {text[:100]!r}{more}"


# -- the metrics of a step -------------------------------------------------------------------------

Values = dict[str, float]


class Sink(Protocol):
    def write(self, step: int, values: Values) -> None: ...


class JsonlSink:
    """One JSON object per line: {"step": 3, "loss": 0.5}."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open_to_append(path)

    def write(self, step: int, values: Values) -> None:
        line = json.dumps({"step": step, **values}) + "\n"
        with reporting_full_disk(self._path, len(line)):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with reporting_full_disk(self._path, 0):  # closing flushes the buffer
            self._file.close()


class LineSink:
    """One readable line per step: `step    3  loss 0.5000  tokens/s 1.2e+04`."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout

    def write(self, step: int, values: Values) -> None:
        cells = []
        for name, value in values.items():
            number = f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"
            cells.append(f"{name} {number}")
        print(f"step {step:4d}  " + "  ".join(cells), file=self._stream, flush=True)


class Metrics:
    """Sends the metrics of a step to all sinks. Values may be tensors on a device."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def log(self, step: int, values: Mapping[str, float | Tensor]) -> Values:
        """Write one step. All tensors are copied to the host in one transfer."""
        numbers = to_host(values)
        for sink in self._sinks:
            sink.write(step, numbers)
        return numbers


def to_host(values: Mapping[str, float | Tensor]) -> Values:
    import torch

    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    not_scalar = [name for name, tensor in tensors.items() if tensor.numel() != 1]
    if not_scalar:
        raise ValueError(f"metrics must be single numbers: {', '.join(not_scalar)}")
    numbers = {name: float(value) for name, value in values.items() if name not in tensors}
    if tensors:
        host_values = torch.stack([tensor.detach().float().reshape(()) for tensor in tensors.values()]).tolist()
        numbers |= zip(tensors, host_values, strict=True)
    return {name: numbers[name] for name in values}  # in the original order


# -- sinks -----------------------------------------------------------------------------------------
# Sinks own `metrics.jsonl` and `tensorboard/` in a run's folder, and know how to continue after a resume. A package is
# imported only when its sink is made. Only rank 0 makes sinks. To add a sink, write a class here, add it to
# `make_sinks`, and add its name and options to `config/keys.py`.

DEFAULT_SINKS: tuple[SinkName, ...] = ("jsonl", "tensorboard")
PACKAGES = {  # each sink needs one of its packages
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


class SinkError(UserError, RuntimeError):
    """A configured sink cannot be made."""


def check_sinks(log: LogConfig, note: Notify = note_to_stderr) -> tuple[SinkName, ...]:
    """The names of the sinks to make. Raises SinkError if one cannot be imported or an option is unknown."""
    names = log.sinks if log.sinks is not None else DEFAULT_SINKS
    missing = [name for name in names if name in PACKAGES and not any(map(_is_installed, PACKAGES[name]))]
    if log.sinks is None:
        names = tuple(name for name in names if name not in missing)
        for name in missing:
            note(f"{name} is not installed, so there is no {name} log (pip install 'rollgraph[{name}]')")
    elif missing:
        commands = "; ".join(f"{name}: pip install 'rollgraph[{name}]'" for name in missing)
        raise SinkError(f"log.sinks: not installed: {commands}")
    for name in names:
        try:
            _import_package(name)
        except Exception as error:  # installed, but broken
            raise SinkError(f"log.sinks: {name} cannot be imported: {type(error).__name__}: {error}") from error
    if unknown := log.mlflow.keys() - {"tracking_uri", "experiment", "run_name"}:
        raise SinkError(f"log.mlflow has unknown options: {', '.join(sorted(unknown))}")
    return names


def make_sinks(
    log: LogConfig,
    folder: Path,
    *,
    resume_at: int | None = None,
    run_config: Mapping[str, Any] | None = None,
    note: Notify = note_to_stderr,
) -> list[Sink]:
    """Make the configured sinks. Close them with `close_sinks`.

    `resume_at` is the first step that will be written. Entries of that step and later ones are removed. So are damaged
    entries, with a note. W&B and MLflow show `run_config` with the metrics.
    """
    names = check_sinks(log, note)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(run_config or {})
    factories: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: _continue_jsonl(folder / "metrics.jsonl", resume_at, note),
        "tensorboard": lambda: TensorBoardSink(folder / "tensorboard", resume_at),
        "wandb": lambda: WandbSink(folder, log.wandb, config),
        "mlflow": lambda: MlflowSink(folder, log.mlflow, config),
    }
    return [factories[name]() for name in names]


def close_sinks(sinks: Iterable[Sink]) -> None:
    """Close every sink, even if one of them fails."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            if close := getattr(sink, "close", None):
                stack.callback(close)


class TensorBoardSink:
    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        self._folder = folder
        writer = _import_package("tensorboard").SummaryWriter
        # TensorBoard hides entries of an earlier process for `purge_step` and later steps.
        self._writer = writer(str(folder), purge_step=resume_at, flush_secs=10)

    def write(self, step: int, values: Values) -> None:
        with reporting_full_disk(self._folder / "events", 0):  # the package chooses the name
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with reporting_full_disk(self._folder / "events", 0):
            self._writer.close()


class WandbSink:
    """Writes to W&B. A resumed run keeps its id, and W&B ignores steps that it already has.

    W&B's steps begin at 0. Ours begin at -1, for the validation before the first step. So charts use our step as their
    x axis, and W&B's own step only counts rows.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        run_id = _read_run_id(folder / "wandb_run.txt") or _write_run_id(
            folder / "wandb_run.txt", uuid.uuid4().hex[:12]
        )
        init_options = {"dir": str(folder), "id": run_id, "resume": "allow", "config": dict(config), **options}
        self._run = _import_package("wandb").init(**init_options)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values}, step=step + 1)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    def __init__(self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._mlflow = _import_package("mlflow")
        if uri := options.get("tracking_uri"):
            self._mlflow.set_tracking_uri(uri)
        if experiment := options.get("experiment"):
            self._mlflow.set_experiment(experiment)
        run_id = _read_run_id(folder / "mlflow_run.txt")
        run = self._mlflow.start_run(run_id=run_id, run_name=options.get("run_name"))
        if run_id is None:
            _write_run_id(folder / "mlflow_run.txt", run.info.run_id)
            self._mlflow.log_dict(dict(config), "config.json")

    def write(self, step: int, values: Values) -> None:
        # MLflow restricts the characters in names: pass@4 becomes pass_4.
        self._mlflow.log_metrics({re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _continue_jsonl(path: Path, resume_at: int | None, note: Notify) -> JsonlSink:
    if resume_at is not None:
        truncate_jsonl(path, resume_at - 1, note)
    return JsonlSink(path)


def _import_package(name: str) -> Any:
    """Import the package of a sink. `jsonl` needs none."""
    if name == "tensorboard":
        return importlib.import_module("torch.utils.tensorboard" if _is_installed("tensorboard") else "tensorboardX")
    return importlib.import_module(name) if name in PACKAGES else None


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _read_run_id(path: Path) -> str | None:
    """The id of this run in another tool, or None. We check it, because a damaged id would start a second run there."""
    if not path.exists():
        return None
    text = path.read_bytes()
    sum_file = _checksum_file(path)
    if sum_file.exists() and sum_file.read_bytes() != _checksum(text):
        raise SinkError(f"{path} is damaged: its checksum differs. Repair it, or remove it to start a new run there")
    return text.decode().strip()


def _write_run_id(path: Path, text: str) -> str:
    content = f"{text}\n".encode()
    write_atomically(_checksum_file(path), _checksum(content))
    write_atomically(path, content)
    return text


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"
