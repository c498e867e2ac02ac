"""Headless Chromium, and the page in it. Without Chromium, tests that need it skip with a reason."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT = 60_000  # milliseconds until a wait fails; generous, for busy machines


def find_chromium() -> str | None:
    """The path of Chromium: ROLLGRAPH_CHROMIUM, or the first one on PATH."""
    override = os.environ.get("ROLLGRAPH_CHROMIUM")
    return override or next(filter(None, map(shutil.which, NAMES)), None)


def missing_requirement() -> str:
    """Why tests in a browser cannot run here, or an empty string."""
    packages = [name for name in ("playwright", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if packages:
        return f"a test in a browser needs the Python packages {', '.join(packages)}: pip install 'rollgraph[dev]'"
    if find_chromium() is None:
        return "a test in a browser needs Chromium: apt-get install chromium"
    return ""


needs_chromium = pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement())


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # The sandbox of Chromium fails for root and in most containers. We only open our own pages.
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[str]:
    """Serve the folders from a thread, and yield the address."""
    from rollgraph.view.server import Access, access_url, open_listener, serve_dashboard

    listening = open_listener("127.0.0.1", 0)
    access = Access("127.0.0.1", listening.getsockname()[1])
    reading, writing = os.pipe()
    with open(reading, "rb") as until:
        server = threading.Thread(target=serve_dashboard, args=(folders, access, listening, until))
        server.start()
        try:
            yield access_url(access)
        finally:
            os.close(writing)
            server.join()


@dataclass
class Tab:
    """A page that collects its errors, of scripts and of the content security policy."""

    page: Page
    base: str
    errors: list[str] = field(default_factory=list)

    def open(self, address: str = "") -> Page:
        self.page.goto(f"{self.base}#/{address}")
        self.page.wait_for_selector("main > *", timeout=WAIT)
        return self.page

    def visit(self, address: str) -> None:
        """Navigate within the page, without loading it again."""
        self.page.evaluate("(address) => { location.hash = address }", f"#/{address}")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. An element in it may be missing while the page redraws it.

        Playwright's own wait needs eval, which the content security policy of the page forbids.
        """
        end = time.monotonic() + WAIT / 1000
        while not self.page.evaluate(f"() => {{ try {{ return ({condition}) }} catch {{ return false }} }}"):
            assert time.monotonic() < end, f"{condition} did not become true; errors: {self.errors}"
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        self.page.wait_for_selector(selector, timeout=WAIT)
        return self.page.text_content(selector) or ""

    def width_beyond(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@contextmanager
def tab(browser: Browser, base: str, **options: Any) -> Iterator[Tab]:
    """A page with its own storage. At its end, the test fails if the page had errors."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    new_tab = Tab(page, base)
    page.on("pageerror", lambda error: new_tab.errors.append(str(error)))
    page.on("console", lambda message: new_tab.errors.append(message.text) if message.type == "error" else None)
    try:
        yield new_tab
    finally:
        context.close()
    assert new_tab.errors == [], new_tab.errors
