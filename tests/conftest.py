"""What every test runs under: two threads at most, seed 0, one hypothesis profile, `gpu` only with a GPU.

`--shuffle SEED` runs them in random order.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path

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

# Processes that a test starts import this checkout, wherever another one is installed.
_PATHS = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

# Ranks are forked from a process that has imported what takes long.
multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "rollgraph.train"])

# Results are compared bit for bit, and the order of a CPU reduction depends on the number of threads.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in an order that is random, from this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
