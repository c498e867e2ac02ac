"""What every test runs under: two threads at most, seed 0, one hypothesis profile, `gpu` only with a GPU."""

from __future__ import annotations

import os

import pytest
import torch

try:
    import hypothesis
except ImportError:  # the tests marked gpu need no more than pytest and torch
    pass
else:
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=200)
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=5000)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Results are compared bit for bit, and the order of a CPU reduction depends on the number of threads.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_train.py")  # the longest first, so that nobody waits for it
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
