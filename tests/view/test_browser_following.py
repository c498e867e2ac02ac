"""The page in a real browser, while what it shows changes: groups that are written again, and folders that go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import WAIT, Tab, needs_chromium, served, tab
from tests.view.made_run import MadeRun

pytestmark = [needs_chromium, pytest.mark.slow]

REWARDS = "Array.from(document.querySelectorAll('.card .reward'), (one) => one.textContent)"
MARKED = "Array.from(CSS.highlights.get('search') ?? [], (range) => range.toString())"


def write_again(path: Path, step: int, reward: float) -> None:
    """As a resumed run does: what it had written of a step is replaced."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    new = [record | {"reward": reward} if record["step"] == step else record for record in records]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(record) + "\n" for record in new), encoding="utf-8")
    part.replace(path)


def test_what_is_open_follows_the_run_until_its_folder_is_gone(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", steps=40)
    run.take_steps(0, 11)
    run.finish()
    with served([run.folder]) as address, tab(browser, address) as opened:
        page = opened.open("samples?open=10.train.0")
        opened.wait(f"{REWARDS}.length === 6")
        write_again(run.folder / "samples.jsonl", 10, 9.0)
        opened.wait(f"{REWARDS}.join() === '9,9,9,9,9,9'")
        page.get_by_role("link", name="Follow this prompt").click()
        opened.wait("document.querySelectorAll('.answers tbody tr').length === 3")
        run.take_steps(15, 16)
        opened.wait("document.querySelectorAll('.answers tbody tr').length === 4")
        opened.visit("machine")
        page.locator("summary").first.click()
        run.take_steps(16, 18)
        opened.wait("document.querySelector('.steps').textContent === '18 of 40 steps'")
        assert page.locator("details").first.get_attribute("open") is not None
        run.folder.rename(tmp_path / "elsewhere")
        opened.wait("document.querySelector('.notes').textContent.includes('folder of this run is gone')")
        assert page.locator("details").count() > 0


def test_a_search_is_marked_across_tokens(opened: Tab) -> None:
    opened.open("samples?kind=train&color=entropy&q=THE answer is \\boxed{")
    opened.wait("document.querySelectorAll('.card .token.warm').length > 20")
    opened.wait(f"{MARKED}.includes('the answer is \\\\boxed{{')")


def test_tabs_out_of_sight_leave_connections_to_others(browser: Any, address: str) -> None:
    """A browser keeps six connections to one server: more tabs than that must open all the same."""
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
