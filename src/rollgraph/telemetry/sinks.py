"""Where metrics and sample completions go: JSON lines, TensorBoard, Weights & Biases, MLflow.

Owns the files `metrics.jsonl`, `samples.jsonl` and `tensorboard/` of a run's folder, and how they go on after a
resume. Other packages are imported when a sink of theirs is made. Only the first rank makes sinks.
"""

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
from typing import TYPE_CHECKING, Any

from rollgraph.files import write_atomically, write_new
from rollgraph.telemetry.metrics import JsonlSink, Sink, Values, open_to_append

if TYPE_CHECKING:
    from rollgraph.config import LogConfig, SinkName
    from rollgraph.types import Rollout

Note = Callable[[str], None]

DEFAULT_SINKS: tuple[SinkName, ...] = ("jsonl", "tensorboard")
PACKAGES = {  # any one of them will do
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
TOLD = 5  # damaged lines of a file that are shown; of more, the number is


class SinkError(RuntimeError):
    """A sink that was asked for cannot be made."""


def tell(text: str) -> None:
    print(text, file=sys.stderr)


def check_sinks(log: LogConfig, note: Note = tell) -> tuple[SinkName, ...]:
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
    log: LogConfig,
    folder: Path,
    *,
    resume_at: int | None = None,
    run_config: Mapping[str, Any] | None = None,
    note: Note = tell,
) -> list[Sink]:
    """The sinks of `log.sinks`; close them by `close_sinks`.

    `resume_at` is the first step that will be written: what is there of it and of later steps goes away, and so does,
    with a note, what is damaged.
    `run_config` is shown beside the metrics by W&B and MLflow.
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

    def __init__(
        self, folder: Path, every: int, most: int = 64, resume_at: int | None = None, note: Note = tell
    ) -> None:
        self._path, self._every, self._most = folder / "samples.jsonl", every, most
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            truncate_jsonl(self._path, resume_at - 1, note)

    def write(self, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> bool:
        """Whether it was such a step. `advantages` has one number for each rollout."""
        if len(rollouts) != len(advantages):
            raise ValueError(f"{len(rollouts)} rollouts with {len(advantages)} advantages")
        if self._every == 0 or step % self._every:
            return False
        with open_to_append(self._path) as file:
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


def truncate_jsonl(path: Path, step: int, note: Note = tell) -> int:
    """Take away the lines of steps after `step`, and those that are damaged; the number of both.

    Damaged ones are told, by their numbers: the last one where a crash tore it, others where the disk failed. The file
    is replaced in one go: after a crash in here it is the old one or the new one.
    """
    if not path.exists():
        return 0
    open_to_append(path).close()  # or it is none of ours
    dropped, damaged = 0, list[str]()
    temporary = path.with_name(f".{path.name}.tmp")
    write_new(temporary)
    # Bytes, because a torn line may end inside a character.
    with path.open("rb") as old, temporary.open("r+b") as new:
        for number, line in enumerate(old, start=1):
            found = _step_of(line)
            if found is not None and found <= step:
                new.write(line)
                continue
            dropped += 1
            if found is None:
                damaged.append(f"{path}:{number}: {_described(line)}")
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)
    for text in damaged[:TOLD]:
        note(text)
    if len(damaged) > TOLD:
        note(f"{path}: {len(damaged) - TOLD} more lines were damaged, and were taken out")
    return dropped


def _step_of(line: bytes) -> int | None:
    """None of a line that is no record of a step."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _described(line: bytes) -> str:
    """What is wrong with a line that was taken out, and what there was of it."""
    what = "this line is damaged" if line.endswith(b"\n") else "the last line was cut off"
    text = line.decode("utf-8", "backslashreplace").strip()
    return f"{what}, and was taken out: {text[:100]!r}{' and so on' * (len(text) > 100)}"


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
    """The name that a run has elsewhere. One that is damaged would begin another run there."""
    if not path.exists():
        return None
    text, sum_file = path.read_bytes(), _sum_file(path)
    if sum_file.exists() and sum_file.read_bytes() != _checksum(text):
        raise SinkError(f"{path} is not what was written: its checksum differs. Mend it, or remove it to begin anew")
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
