"""The page in a browser follows its run: groups that are rewritten, folders that disappear, tabs in the background."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import WAIT, Tab, needs_chromium, served, tab
from tests.view.run_writer import RunWriter

pytestmark = [needs_chromium, pytest.mark.slow]

REWARDS = "Array.from(document.querySelectorAll('.card .reward'), (one) => one.textContent)"
MARKED = "Array.from(CSS.highlights.get('search') ?? [], (range) => range.toString())"


def rewrite_step(path: Path, step: int, reward: float) -> None:
    """Replace the samples of a step, as a resumed run does."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rewritten = [record | {"reward": reward} if record["step"] == step else record for record in records]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(record) + "\n" for record in rewritten), encoding="utf-8")
    part.replace(path)


def test_open_views_follow_the_run_until_its_folder_is_gone(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run", steps=40)
    run.take_steps(0, 11)
    run.finish()
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        page = dashboard.open("samples?open=10.train.0")
        dashboard.wait(f"{REWARDS}.length === 6")
        rewrite_step(run.folder / "samples.jsonl", 10, 9.0)
        dashboard.wait(f"{REWARDS}.join() === '9,9,9,9,9,9'")
        page.get_by_role("link", name="Follow this prompt").click()
        dashboard.wait("document.querySelectorAll('.answers tbody tr').length === 3")
        run.take_steps(15, 16)
        dashboard.wait("document.querySelectorAll('.answers tbody tr').length === 4")
        dashboard.visit("machine")
        page.locator("summary").first.click()
        run.take_steps(16, 18)
        dashboard.wait("document.querySelector('.steps').textContent === '18 of 40 steps'")
        assert page.locator("details").first.get_attribute("open") is not None
        run.folder.rename(tmp_path / "elsewhere")
        dashboard.wait("document.querySelector('.notes').textContent.includes('folder of this run is gone')")
        assert page.locator("details").count() > 0


def test_search_marks_matches_across_tokens(dashboard: Tab) -> None:
    dashboard.open("samples?kind=train&color=entropy&q=THE answer is \\boxed{")
    dashboard.wait("document.querySelectorAll('.card .token.warm').length > 20")
    dashboard.wait(f"{MARKED}.includes('the answer is \\\\boxed{{')")


def test_hidden_tabs_release_their_connections(browser: Any, address: str) -> None:
    """A browser opens at most six connections to a server, but more tabs than that must load."""
    hide = """() => {
        Object.defineProperty(document, "hidden", { value: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    context = browser.new_context()
    for _ in range(8):
        page = context.new_page()
        page.goto(f"{address}#/overview")
        page.wait_for_selector(".chart canvas", timeout=WAIT)
        page.evaluate(hide)
    context.close()
