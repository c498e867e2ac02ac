"""A browser, and pages of two runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import Tab, chromium, served, tab
from tests.view.made_run import MadeRun


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes of the runs of tests do not go into the cache of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For a module only: while Playwright is at work, nothing else in this process can run an event loop."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `first` and `second`, of 40 steps each."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed, lr in (("first", 0, 1e-6), ("second", 1, 5e-7)):
        run = MadeRun(folder / name, steps=40, seed=seed, lr=lr)
        run.take_steps(0, 40)
        run.finish()
    return folder


@pytest.fixture(scope="module")
def address(two_runs: Path) -> Iterator[str]:
    with served([two_runs]) as found:
        yield found


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Tab]:
    with tab(browser, address) as found:
        yield found
