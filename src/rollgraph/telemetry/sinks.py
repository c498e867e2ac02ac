"""Where metrics go: JSON lines, TensorBoard, Weights & Biases, MLflow.

Owns `metrics.jsonl` and `tensorboard/` in a run's folder, and how each sink continues after a resume. A package is
imported when a sink that needs it is made. Only rank 0 makes sinks. A new sink is a class here, an
entry in `make_sinks`, and its name and options in `config/keys.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.errors import UserError
from rollgraph.files import write_atomically
from rollgraph.telemetry.jsonl import Note, tell, truncate_jsonl
from rollgraph.telemetry.metrics import JsonlSink, Sink, Values

if TYPE_CHECKING:
    from rollgraph.config import LogConfig, SinkName

DEFAULT_SINKS: tuple[SinkName, ...] = ("jsonl", "tensorboard")
PACKAGES = {  # a sink needs any one of its packages
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


class SinkError(UserError, RuntimeError):
    """A sink that was configured cannot be made."""


def check_sinks(log: LogConfig, note: Note = tell) -> tuple[SinkName, ...]:
    """The names of the sinks to make; SinkError if a configured one cannot be imported or an option is unknown."""
    names = log.sinks if log.sinks is not None else DEFAULT_SINKS
    missing = [name for name in names if name in PACKAGES and not any(map(_installed, PACKAGES[name]))]
    if log.sinks is None:
        names = tuple(name for name in names if name not in missing)
        for name in missing:
            note(f"{name} is not installed, so there is no {name} log (pip install 'rollgraph[{name}]')")
    elif missing:
        commands = "; ".join(f"{name}: pip install 'rollgraph[{name}]'" for name in missing)
        raise SinkError(f"log.sinks: not installed: {commands}")
    for name in names:
        try:
            _import(name)
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
    note: Note = tell,
) -> list[Sink]:
    """Make the configured sinks; close them with `close_sinks`.

    `resume_at` is the first step that will be written: entries of that step and later ones are removed, and so are
    damaged ones, with a note. W&B and MLflow show `run_config` beside the metrics.
    """
    names = check_sinks(log, note)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(run_config or {})
    makers: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: _continue_jsonl(folder / "metrics.jsonl", resume_at, note),
        "tensorboard": lambda: TensorBoardSink(folder / "tensorboard", resume_at),
        "wandb": lambda: WandbSink(folder, log.wandb, config),
        "mlflow": lambda: MlflowSink(folder, log.mlflow, config),
    }
    return [makers[name]() for name in names]


def close_sinks(sinks: Iterable[Sink]) -> None:
    """Close every sink, even if one of them fails."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            if close := getattr(sink, "close", None):
                stack.callback(close)


class TensorBoardSink:
    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        writer = _import("tensorboard").SummaryWriter
        # TensorBoard hides what an earlier process wrote for `purge_step` and later.
        self._writer = writer(str(folder), purge_step=resume_at, flush_secs=10)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A resumed run keeps its id; W&B ignores steps that it already has.

    Its own steps begin at 0 and ours at -1, with the validation before the first one. So charts have our step on their
    x axis, and W&B counts rows.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        known = _remembered(folder / "wandb_run.txt") or _remember(folder / "wandb_run.txt", uuid.uuid4().hex[:12])
        given = {"dir": str(folder), "id": known, "resume": "allow", "config": dict(config), **options}
        self._run = _import("wandb").init(**given)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values}, step=step + 1)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    def __init__(self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._mlflow = _import("mlflow")
        if uri := options.get("tracking_uri"):
            self._mlflow.set_tracking_uri(uri)
        if experiment := options.get("experiment"):
            self._mlflow.set_experiment(experiment)
        known = _remembered(folder / "mlflow_run.txt")
        run = self._mlflow.start_run(run_id=known, run_name=options.get("run_name"))
        if known is None:
            _remember(folder / "mlflow_run.txt", run.info.run_id)
            self._mlflow.log_dict(dict(config), "config.json")

    def write(self, step: int, values: Values) -> None:
        # MLflow allows few characters in names: pass@4 becomes pass_4.
        self._mlflow.log_metrics({re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _continue_jsonl(path: Path, resume_at: int | None, note: Note) -> JsonlSink:
    if resume_at is not None:
        truncate_jsonl(path, resume_at - 1, note)
    return JsonlSink(path)


def _import(name: str) -> Any:
    """What a sink writes with; `jsonl` needs nothing."""
    if name == "tensorboard":
        return importlib.import_module("torch.utils.tensorboard" if _installed("tensorboard") else "tensorboardX")
    return importlib.import_module(name) if name in PACKAGES else None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _remembered(path: Path) -> str | None:
    """The id that this run has in another tool. A damaged id would start a second run there."""
    if not path.exists():
        return None
    text = path.read_bytes()
    sum_file = _sum_file(path)
    if sum_file.exists() and sum_file.read_bytes() != _checksum(text):
        raise SinkError(f"{path} is damaged: its checksum differs. Repair it, or remove it to start a new run there")
    return text.decode().strip()


def _remember(path: Path, text: str) -> str:
    content = f"{text}\n".encode()
    write_atomically(_sum_file(path), _checksum(content))
    write_atomically(path, content)
    return text


def _sum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"
