"""The check compares the operations of generation and training one by one, and names each that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.model import Architecture, Decoder, decoder
from rollgraph.model.gemm import matmul
from rollgraph.policy import Limits, agreement
from rollgraph.policy.agreement import AgreementReport, check_agreement

LLAMA = Architecture("llama", vocabulary=96, hidden=64, mlp=96, layers=3, heads=4, kv_heads=2, head_dim=16)
ARCHITECTURES = {
    "plain": LLAMA,
    "a bias, a tied head": replace(LLAMA, family="qwen2", attention_bias=True, tied=True),
    "head norms": replace(LLAMA, family="qwen3", head_dim=32),
    "a window": replace(LLAMA, family="mistral", windows=(20, None, 70)),
}
LIMITS = Limits(max_length=96, rows=8, token_buckets=(512,))
GEMMS = {"qkv", "out", "gate_up", "down"}


def model_of(architecture: Architecture, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(architecture, checkpointing=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model.to(device, dtype)


def split_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a library that sums the two halves of K separately if there is one row."""
    multiply = matmul._torch_matmul

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
        if len(x) > 1:
            return multiply(x, weight, bias, wide)
        half = x.shape[1] // 2
        return multiply(x[:, :half], weight[:, :half], bias, wide) + multiply(x[:, half:], weight[:, half:], None, wide)

    monkeypatch.setattr(matmul, "_torch_matmul", library)


def differing(report: AgreementReport) -> dict[str, list[int]]:
    """The layers of each operation that differs."""
    layers: dict[str, list[int]] = {}
    for difference in report.differences:
        layers.setdefault(difference.operation, []).append(difference.layer)
    return layers


def cases() -> Iterator[Any]:
    """Each architecture in each precision; `make test` runs one of the two on the CPU, in turn."""
    for number, name in enumerate(ARCHITECTURES):
        for turn, dtype in enumerate((torch.float32, torch.bfloat16)):
            marks = [] if number % 2 == turn else [pytest.mark.slow]
            yield pytest.param(name, "cpu", dtype, id=f"{name}, cpu, {dtype}", marks=marks)
        yield pytest.param(name, "cuda", torch.bfloat16, id=f"{name}, cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "device", "dtype"), list(cases()))
def test_everything_agrees(name: str, device: str, dtype: torch.dtype) -> None:
    report = check_agreement(model_of(ARCHITECTURES[name], device, dtype), LIMITS)
    assert report.gemm_report is not None
    assert report.gemm_report.exact
    assert differing(report) == {}
    assert report.agrees
    assert report.row_counts == (1, 2, 4, 8)
    assert all(differences.tokens == 15 * 16 for differences in report.logprobs.values())


def test_rows_share_sequences_if_there_are_more_rows() -> None:
    report = check_agreement(model_of(LLAMA), Limits(max_length=70, rows=12, token_buckets=(256,)))
    assert report.agrees
    assert report.logprobs["scoring"].tokens == (1 + 2 + 4 + 8 + 12) * 16


def test_without_gemm_algorithms_only_gemms_of_few_rows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference does not spread: each operation gets the inputs of the packed run."""
    split_one_row(monkeypatch)
    model = model_of(LLAMA)
    assert check_agreement(model, LIMITS).agrees
    report = check_agreement(model, LIMITS, select_algos=False)
    assert not report.agrees
    assert report.gemm_report is None
    assert differing(report) == {**{name: [0, 1, 2] for name in GEMMS}, "logits": [3]}
    first = report.differences[0]
    assert (first.operation, first.layer, first.phase, first.rows) == ("qkv", 0, "decode", 1)
    assert first.position == 79  # the last token of the longest prompt
    assert 0 < first.differing <= first.values == 128
    assert 0 < first.largest < 1e-4
    assert all(0 < differences.largest < 1e-3 for differences in report.logprobs.values())
    assert all(0 < differences.differing < differences.tokens for differences in report.logprobs.values())


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_fault_in_attention_is_found_in_its_layer(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    correct = getattr(decoder, f"paged_{phase}")

    def faulty(q: Tensor, *arguments: Any) -> Tensor:
        """Attention of the layer with a window is wrong in its second row."""
        out: Tensor = correct(q, *arguments)
        if arguments[-1] == 20 and len(out) > 1:
            out[1] *= 1.01
        return out

    for module in (decoder, agreement):
        monkeypatch.setattr(module, f"paged_{phase}", faulty)
    report = check_agreement(model_of(replace(LLAMA, family="mistral", windows=(None, 20, None))), LIMITS)
    assert differing(report) == {"attention": [1]}
    (difference,) = report.differences
    assert difference.phase == phase
    assert difference.position == (79 if phase == "decode" else 1)
    assert difference.differing <= 64
    assert not report.agrees
    assert report.logprobs["scoring"].differing > 0


def test_a_fault_in_the_sampler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = agreement.sampler.sample

    def faulty(logits: Tensor, rows: Any) -> Any:
        drawn = correct(logits, rows)
        return replace(drawn, logprob=drawn.logprob - 1e-3)

    monkeypatch.setattr(agreement.sampler, "sample", faulty)
    report = check_agreement(model_of(LLAMA), LIMITS)
    assert differing(report) == {"log-probability": [3]}
    assert report.logprobs["training"].differing == report.logprobs["training"].tokens


def test_hooks_are_removed_and_gemm_algorithms_cleared() -> None:
    model = model_of(replace(LLAMA, layers=1))
    limits = Limits(max_length=70, rows=2, token_buckets=(256,))
    check_agreement(model, limits)
    check_agreement(model, limits, select_algos=False)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not getattr(module, "algos", {})


def test_non_finite_logits_are_an_error() -> None:
    model = model_of(LLAMA)
    with torch.no_grad():
        model.norm.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        check_agreement(model, LIMITS, select_algos=False)
