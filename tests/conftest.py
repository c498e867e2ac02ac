"""Settings of every test: two threads unless OMP_NUM_THREADS is set, seed 0, a Hypothesis profile, this checkout.

Tests marked `gpu` run only with a GPU. `--shuffle SEED` runs all tests in random order.
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
except ImportError:  # tests marked gpu need only pytest and torch
    pass
else:
    # Fewer examples in `make test`; `make test-all` takes "ci".
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=200)
    hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=5000)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Child processes import this checkout, even if another one is installed.
_PATHS = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

multiprocessing.set_forkserver_preload(["tests.forkserver_imports"])

# nohup ignores SIGHUP, also in child processes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Results are compared bit for bit, and the order of a CPU reduction depends on the number of threads.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(min(2, torch.get_num_threads()))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in random order, from this seed")


def shuffle_tests(items: list[pytest.Item], order: random.Random) -> list[pytest.Item]:
    """Shuffle files, and tests within each file, so that module fixtures are still made once."""
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
        items[:] = shuffle_tests(items, random.Random(seed))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Summarize skipped tests in one line; `-rs` has a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        ((reason, count),) = reasons.most_common(1)
        others = f", {len(skipped) - count} for other reasons (-rs lists them)" if count < len(skipped) else ""
        terminalreporter.write_line(f"skipped: {count} ({reason}){others}")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Restore the default Ctrl-C handler, because shells let background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def _few_live_objects() -> Iterator[None]:
    """Freeze the objects from before a module's tests, since a capture walks over all that are not frozen.

    They stay frozen, because collecting the objects of all imports after each module would take a minute in total.
    With a GPU they do not, because garbage may hold device memory.
    """
    gc.collect()
    gc.freeze()
    yield
    if torch.cuda.is_available():
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
