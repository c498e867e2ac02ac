"""Every test of the runtime runs on the tape (CPU) and, on a machine with a GPU, on CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def device(backend: str) -> Iterator[torch.device]:
    """The device of `backend`, as the default device, with deterministic kernels.

    The CPU is that already. Setting it would pass each operation, even each attribute of a tensor, through Python.
    """
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    if device.type != "cpu":
        torch.set_default_device(device)
    yield device
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(before)
