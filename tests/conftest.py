"""What every test runs under: two threads unless OMP_NUM_THREADS is set, seed 0, a hypothesis profile, this checkout.

Tests marked `gpu` run only with a GPU. `--shuffle SEED` runs all in random order.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

try:
    import hypothesis
except ImportError:  # the tests marked gpu need no more than pytest and torch
    pass
else:
    # Fewer examples in `make test`; `make test-all` takes "ci".
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=200)
    hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=5000)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Processes that a test starts import this checkout, wherever another one is installed.
_PATHS = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

multiprocessing.set_forkserver_preload(["tests.forkserver_imports"])

# Under nohup, signals of a closing terminal are ignored, in the processes that a test starts too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Results are compared bit for bit, and the order of a CPU reduction depends on the number of threads.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(min(2, torch.get_num_threads()))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in an order that is random, from this seed")


def shuffled(items: list[pytest.Item], order: random.Random) -> list[pytest.Item]:
    """The files in any order, and the tests of each: what the tests of a file share is made once still."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    paths = list(files)
    order.shuffle(paths)
    for path in paths:
        order.shuffle(files[path])
    return [item for path in paths for item in files[path]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        items[:] = shuffled(items, random.Random(seed))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for everything that was skipped; `-rs` has a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        ((reason, count),) = reasons.most_common(1)
        others = f", {len(skipped) - count} for other reasons (-rs lists them)" if count < len(skipped) else ""
        terminalreporter.write_line(f"skipped: {count} ({reason}){others}")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Restore the default Ctrl-C handler: a shell makes background jobs, and so the tests in them, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def _few_live_objects() -> Iterator[None]:
    """A capture looks through everything alive; leave out what was alive before a module's tests.

    It stays frozen: collecting what all imports have made, again for each module, would take a minute in all. With a
    GPU it does not, because garbage may hold the device's memory.
    """
    gc.collect()
    gc.freeze()
    yield
    if torch.cuda.is_available():
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
