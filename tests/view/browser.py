"""Chromium without a window, and the page in it. Tests that need it skip with a reason where it is missing."""

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
WAIT = 60_000  # milliseconds that a test waits for what must come; a busy machine needs long


def find_chromium() -> str | None:
    """The browser of this machine; ROLLGRAPH_CHROMIUM names another one."""
    named = os.environ.get("ROLLGRAPH_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str:
    """What a test in a browser lacks on this machine; empty if nothing."""
    packages = [name for name in ("playwright", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if packages:
        return f"a test in a browser needs the Python packages {', '.join(packages)}: pip install 'rollgraph[dev]'"
    if find_chromium() is None:
        return "a test in a browser needs Chromium: apt-get install chromium"
    return ""


needs_chromium = pytest.mark.skipif(bool(missing()), reason=missing())


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # The sandbox of Chromium does not work for root and in most containers; the pages are our own.
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[str]:
    """The address of a server of these folders, in this process."""
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
    """A page that remembers what went wrong in it: errors of scripts, and what the content policy refused."""

    page: Page
    base: str
    errors: list[str] = field(default_factory=list)

    def open(self, address: str = "") -> Page:
        self.page.goto(f"{self.base}#/{address}")
        self.page.wait_for_selector("main > *", timeout=WAIT)
        return self.page

    def visit(self, address: str) -> None:
        """Another address of the page, which is not loaded again."""
        self.page.evaluate("(address) => { location.hash = address }", f"#/{address}")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true. Playwright's own wait needs what the policy of the page forbids.

        An element that it names may be missing for a moment, while the page draws it anew.
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
    """A page with its own storage. It fails the test if a script of it failed, unless the test itself failed before."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    opened = Tab(page, base)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("console", lambda message: opened.errors.append(message.text) if message.type == "error" else None)
    try:
        yield opened
    finally:
        context.close()
    assert opened.errors == []
