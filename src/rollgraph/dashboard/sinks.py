"""Where metrics and sample completions go: JSON lines, TensorBoard, Weights & Biases, MLflow.

Owns the files `metrics.jsonl`, `samples.jsonl` and `tensorboard/` of a run's folder, and how they go on after a
resume. Other packages are imported when a sink of theirs is made. Only the first rank makes sinks.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.metrics import JsonlSink, Sink, Values

if TYPE_CHECKING:
    from rollgraph.config import Log, SinkName
    from rollgraph.types import Rollout

DEFAULT_SINKS: tuple[SinkName, ...] = ("jsonl", "tensorboard")
PACKAGES = {  # any one of them will do
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


class SinkError(RuntimeError):
    """A sink that was asked for cannot be made."""


def check_sinks(
    log: Log, note: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
) -> tuple[SinkName, ...]:
    """The sinks there will be. One that was asked for and cannot be imported raises, as does an option it has not."""
    names = log.sinks if log.sinks is not None else DEFAULT_SINKS
    missing = [name for name in names if name in PACKAGES and not any(map(_installed, PACKAGES[name]))]
    if log.sinks is None:
        names = tuple(name for name in names if name not in missing)
        for name in missing:
            note(f"no {name} log: it is not installed (pip install 'rollgraph[{name}]')")
    elif missing:
        commands = "; ".join(f"{name}: pip install 'rollgraph[{name}]'" for name in missing)
        raise SinkError(f"log.sinks names what is not installed: {commands}")
    for name in names:
        try:
            _import(name)
        except Exception as error:  # a package that is there and broken
            raise SinkError(f"log.sinks: {name} cannot be imported: {type(error).__name__}: {error}") from error
    if unknown := log.mlflow.keys() - {"tracking_uri", "experiment", "run_name"}:
        raise SinkError(f"log.mlflow has unknown options: {', '.join(sorted(unknown))}")
    return names


def make_sinks(
    log: Log,
    folder: Path,
    *,
    resume_at: int | None = None,
    run_config: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> list[Sink]:
    """The sinks of `log.sinks`; close them by `close_sinks`.

    `resume_at` is the first step that will be written: what is there of it and of later steps goes away.
    `run_config` is shown beside the metrics by W&B and MLflow.
    """
    names = check_sinks(log, note)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(run_config or {})
    makers: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: _continue_jsonl(folder / "metrics.jsonl", resume_at),
        "tensorboard": lambda: TensorBoardSink(folder / "tensorboard", resume_at),
        "wandb": lambda: WandbSink(folder, log.wandb, config),
        "mlflow": lambda: MlflowSink(folder, log.mlflow, config),
    }
    return [makers[name]() for name in names]


def close_sinks(sinks: Iterable[Sink]) -> None:
    """Every sink, also after one has failed."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            if close := getattr(sink, "close", None):
                stack.callback(close)


class TensorBoardSink:
    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        writer = _import("tensorboard").SummaryWriter
        # It hides steps from `purge_step` on that an earlier process wrote into the same folder.
        self._writer = writer(str(folder), purge_step=resume_at, flush_secs=10)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A resumed run goes on with the same id; W&B itself ignores steps that it has."""

    def __init__(self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        known = _remembered(folder / "wandb_run.txt") or _remember(folder / "wandb_run.txt", uuid.uuid4().hex[:12])
        given = {"dir": str(folder), "id": known, "resume": "allow", "config": dict(config), **options}
        self._run = _import("wandb").init(**given)

    def write(self, step: int, values: Values) -> None:
        self._run.log(values, step=step)

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


class SampleWriter:
    """Some rollouts of every so many steps, one JSON object each, in `samples.jsonl`."""

    def __init__(self, folder: Path, every: int, most: int = 64, resume_at: int | None = None) -> None:
        self._path, self._every, self._most = folder / "samples.jsonl", every, most
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            truncate_jsonl(self._path, resume_at - 1)

    def write(self, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> bool:
        """Whether it was such a step. `advantages` has one number for each rollout."""
        if len(rollouts) != len(advantages):
            raise ValueError(f"{len(rollouts)} rollouts with {len(advantages)} advantages")
        if self._every == 0 or step % self._every:
            return False
        with self._path.open("a", encoding="utf-8") as file:
            for rollout, advantage in list(zip(rollouts, advantages, strict=True))[: self._most]:
                row = {
                    "step": step,
                    "prompt": rollout.prompt.text,
                    "completion": rollout.text,
                    "reward": rollout.reward,
                    "rewards": rollout.rewards,
                    "advantage": advantage,
                    "finish_reason": rollout.finish_reason,
                    "tokens": len(rollout.tokens),
                    "prompt_id": rollout.prompt.id,
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return True


def truncate_jsonl(path: Path, step: int) -> int:
    """Take away the lines of steps after `step`, and one that a crash tore; the number of them.

    The file is replaced in one go: after a crash in here it is the old one or the new one.
    """
    if not path.exists():
        return 0
    dropped = 0
    temporary = path.with_name(f".{path.name}.tmp")
    # Bytes, because a torn line may end inside a character.
    with path.open("rb") as old, temporary.open("wb") as new:
        for line in old:
            if _is_kept(line, step):
                new.write(line)
            else:
                dropped += 1
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)
    return dropped


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def _continue_jsonl(path: Path, resume_at: int | None) -> JsonlSink:
    if resume_at is not None:
        truncate_jsonl(path, resume_at - 1)
    return JsonlSink(path)


def _import(name: str) -> Any:
    """What a sink writes with; `jsonl` needs nothing."""
    if name == "tensorboard":
        return importlib.import_module("torch.utils.tensorboard" if _installed("tensorboard") else "tensorboardX")
    return importlib.import_module(name) if name in PACKAGES else None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _remembered(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


def _remember(path: Path, text: str) -> str:
    path.write_text(text + "\n")
    return text
