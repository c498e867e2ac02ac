"""Metrics: tensors stay on their device until one transfer per step, after which sinks write the numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from rollgraph.telemetry.jsonl import open_to_append

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
    """Hands the values of a step, on the device or not, to all sinks."""

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
    numbers = {name: float(value) for name, value in values.items() if name not in tensors}
    if tensors:
        fetched = torch.stack([tensor.detach().float().reshape(()) for tensor in tensors.values()]).tolist()
        numbers |= zip(tensors, fetched, strict=True)
    return {name: numbers[name] for name in values}  # in the order they were given
