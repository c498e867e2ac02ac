"""Workers are captured on the tape."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _small_census() -> Iterator[None]:
    """A capture looks through everything alive; leave out what was alive before a module's tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
