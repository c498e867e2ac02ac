"""Metrics on their way to the sinks: tensors become floats, in order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from rollgraph.log.metrics import JsonlSink, LineSink, Metrics, to_host


def test_tensors_and_numbers_arrive_in_order_and_as_floats(tmp_path: Path) -> None:
    metrics = Metrics([JsonlSink(tmp_path / "run" / "metrics.jsonl"), LineSink(stream := io.StringIO())])
    metrics.log(0, {"loss": torch.tensor([0.5]), "tokens": 3, "flag": torch.tensor(True)})
    metrics.log(1, {"loss": torch.tensor(0.25, requires_grad=True), "tokens/s": 123456.0})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "loss": 0.5, "tokens": 3.0, "flag": 1.0},
        {"step": 1, "loss": 0.25, "tokens/s": 123456.0},
    ]
    assert stream.getvalue().splitlines()[1] == "step    1  loss 0.2500  tokens/s 1.23e+05"


def test_a_tensor_of_several_numbers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="ratio"):
        to_host({"loss": torch.zeros(()), "ratio": torch.zeros(3)})
