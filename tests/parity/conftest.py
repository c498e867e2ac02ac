"""The equalities run on the same backends as the tests of the runtime."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401 (else imported by the first checkpoint)

from tests.graph.conftest import backend, device  # noqa: F401


@pytest.fixture(scope="package", autouse=True)
def _fewer_objects() -> Iterator[None]:
    """A capture looks at every object alive for models and optimizers; the hundred thousands of imports are none."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
