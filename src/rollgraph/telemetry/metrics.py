"""Metrics: tensors stay on their device until one transfer for each step; sinks write what arrived."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from rollgraph.files import open_own

if TYPE_CHECKING:
    from torch import Tensor

Values = dict[str, float]


class Sink(Protocol):
    def write(self, step: int, values: Values) -> None: ...


class JsonlSink:
    """One JSON object a line: {"step": 3, "loss": 0.5}."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(path)

    def write(self, step: int, values: Values) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def open_to_append(path: Path) -> IO[str]:
    """A file that grows line by line. A link of that name is refused: what it points to is somebody else's."""
    return open(open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")


class LineSink:
    """One readable line for a step: `step    3  loss 0.5000  tokens/s 1.2e+04`."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout

    def write(self, step: int, values: Values) -> None:
        cells = [f"{name} {value:.4f}" if abs(value) < 1e4 else f"{name} {value:.3g}" for name, value in values.items()]
        print(f"step {step:4d}  " + "  ".join(cells), file=self._stream, flush=True)


class Metrics:
    """Collects the values of a step, on the device or off it, and hands them to the sinks at once."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def log(self, step: int, values: Mapping[str, float | Tensor]) -> Values:
        """Write one step. All tensors cross to the host in one transfer."""
        numbers = to_host(values)
        for sink in self._sinks:
            sink.write(step, numbers)
        return numbers


def to_host(values: Mapping[str, float | Tensor]) -> Values:
    import torch

    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    several = [name for name, tensor in tensors.items() if tensor.numel() != 1]
    if several:
        raise ValueError(f"metrics must be single numbers: {', '.join(several)}")
    fetched = torch.stack([t.detach().float().reshape(()) for t in tensors.values()]).tolist() if tensors else []
    numbers = dict(zip(tensors, fetched, strict=True))
    return {name: numbers[name] if name in numbers else float(value) for name, value in values.items()}
