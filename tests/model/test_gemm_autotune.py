"""GEMM autotune: the digests that it compares, and how many results exist at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.model.gemm import autotune, candidates
from rollgraph.model.gemm.autotune import autotune_gemms
from rollgraph.model.gemm.candidates import row_digests, run_if_it_fits
from tests.policy.small_worker import make_model

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_digest_detects_one_flipped_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_DIGESTED_ELEMENTS", 100)  # several parts
    out = torch.randn(9, 33).to(dtype)
    changed = out.clone()
    changed.view(INTEGERS[dtype])[4, 32] ^= 1
    before, after = row_digests(out), row_digests(changed)
    assert (before != after).tolist() == [row == 4 for row in range(9)]
    order = torch.randperm(9)
    assert torch.equal(row_digests(out[order]), before[order])
    assert len(before.unique()) == 9


def test_one_large_result_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of the logits of a microbatch would decide the peak of a run."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts = []
    matmul_with_algo = autotune.matmul_with_algo

    def counting(*arguments: Any) -> Tensor:
        out = matmul_with_algo(*arguments)
        alive.add(out)
        counts.append(len(alive))
        return out

    monkeypatch.setattr(autotune, "matmul_with_algo", counting)
    autotune_gemms(make_model(), [1, 2, 16, 64], [1, 16, 64])
    assert len(counts) > 10
    assert max(counts) == 1


class OutOfResources(Exception):
    """As Triton raises it, for a kernel that needs more shared memory than a device has."""


def test_an_algorithm_that_does_not_fit_the_device_is_skipped() -> None:
    def too_large() -> Tensor:
        raise OutOfResources("shared memory")

    def wrong() -> Tensor:
        raise ValueError("a mistake")

    assert run_if_it_fits(too_large) is None
    assert run_if_it_fits(lambda: torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="a mistake"):
        run_if_it_fits(wrong)
