"""A browser, and pages of two runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import Tab, chromium, served, tab
from tests.view.run_writer import RunWriter


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep indexes of test runs out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Scoped to a module, because nothing else in this process can run an event loop while Playwright is active."""
    with chromium() as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `first` and `second`, of 40 steps each."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed, lr in (("first", 0, 1e-6), ("second", 1, 5e-7)):
        run = RunWriter(folder / name, steps=40, seed=seed, lr=lr)
        run.take_steps(0, 40)
        run.finish()
    return folder


@pytest.fixture(scope="module")
def address(two_runs: Path) -> Iterator[str]:
    with served([two_runs]) as url:
        yield url


@pytest.fixture
def dashboard(browser: Any, address: str) -> Iterator[Tab]:
    with tab(browser, address) as dashboard_tab:
        yield dashboard_tab
