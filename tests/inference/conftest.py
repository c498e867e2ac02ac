"""The engine runs on the tape (CPU) and, on a machine with a GPU, on CUDA graphs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
