"""`rollgraph check --exact` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollgraph.cli import main
from rollgraph.model import Architecture, Decoder, save_model
from rollgraph.model.gemm import matmul


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny = Architecture("llama", vocabulary=96, hidden=32, mlp=48, layers=2, heads=2, kv_heads=1, head_dim=16)
    save_model(Decoder(tiny), path)
    return path


@pytest.fixture
def splitting_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM library that splits K in two halves for at most two rows."""
    whole = matmul._torch_matmul

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
        if len(x) > 2:
            return whole(x, weight, bias, wide)
        half = x.shape[1] // 2
        return whole(x[:, :half], weight[:, :half], bias, wide) + whole(x[:, half:], weight[:, half:], None, wide)

    monkeypatch.setattr(matmul, "_torch_matmul", library)


@pytest.mark.usefixtures("splitting_library")
def test_a_model_with_chosen_gemm_algorithms_agrees(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--exact", str(folder), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama, 2 layers, float32, CPU\n")
    assert "packed: 512 tokens; prefill: 64, 256, 512 tokens; decode: 1, 2, 4, 8 rows" in out
    assert "1: torch, padded to 4 rows" in out
    assert "attention        2 of 2 layers equal" in out
    assert "logits           equal" in out
    assert "240 of 240 log-probabilities equal in training" in out
    assert out.endswith("Generation and training agree bit for bit.\n")


@pytest.mark.usefixtures("splitting_library")
def test_the_first_difference_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", str(folder), "--exact", "--default-gemms", "--device", "cpu", "--rows", "4", "--length", "40"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "GEMMs: the library's default algorithms" in out
    assert "attention        2 of 2 layers equal" in out
    assert "gate_up          0 of 2 layers equal" in out
    assert "logits           different" in out
    assert "First difference: layer 0, qkv, in decode with 1 row, at position 23: " in out
    assert "of 64 values differ, by at most " in out
    assert main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] is False
    assert report["rows"] == [1, 2, 4]
    assert report["products"] is None
    assert report["differences"][0]["operation"] == "qkv"
    assert report["differences"][-1]["operation"] == "logits"
    assert report["differences"][-1]["layer"] is None
    assert report["logprobs"]["scoring"]["tokens"] == 7 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exact", "--length", "1"], "--length 1: must be at least 2"),
        (["--exact", "--length", "600"], "but it has 512; use a larger --tokens or a smaller --length"),
        (["--exact", "--device", "banana"], "--device banana: expected cuda or cpu"),
        (["--exact", "--device", "cuda:x"], "--device cuda:x: expected cuda or cpu"),
        (["--exact", "--backend", "tape"], "--backend cannot be combined with --exact"),
        (["--exact", "--replays", "2"], "--replays cannot be combined with --exact"),
        (["--rows", "4"], "--rows needs --exact"),
        (["--default-gemms"], "--default-gemms needs --exact"),
    ],
    ids=range(8),
)
def test_an_invalid_argument_is_reported_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "--exact" in arguments and "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    assert main(["check", str(folder), *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("rollgraph check: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_folder_without_a_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--exact", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
