"""The page in a real browser, at its edges: nothing to show yet, addresses that are wrong, exports, keys on tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rollgraph.cli import main
from tests.view.browser import WAIT, Tab, needs_chromium, served, tab
from tests.view.made_run import MadeRun

pytestmark = [needs_chromium, pytest.mark.slow]

COUNT = "document.querySelector('.list-head .count').textContent"
PAGES = "**/samples?*"  # requests for rows of the list
NO_REFRESH = """async () => {
    const { VirtualList } = await import(new URL("static/virtual_list.js", document.baseURI));
    VirtualList.prototype.refresh = async () => {};
}"""  # when the server finds more of a run, the list asks for what is in sight again
NOTES = "document.querySelector('.notes').textContent"


def test_a_run_before_its_first_step(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", steps=4)
    with served([run.folder]) as address, tab(browser, address, viewport={"width": 390, "height": 800}) as opened:
        page = opened.open("overview")
        assert "warm start" in opened.text(".chart-grid .empty")
        page.get_by_role("spinbutton", name="From").fill("3")
        page.keyboard.press("Enter")  # there is no range yet
        opened.visit("samples")
        opened.wait("document.querySelector('.detail h2')?.checkVisibility()")
        assert "No samples yet" in opened.text(".detail")
        opened.visit("samples?q=nothing")
        opened.wait("document.querySelector('.detail h2')?.textContent === 'No sample matches'")
        assert page.locator(".detail h2").is_visible()


def test_an_empty_folder_says_so(browser: Any, tmp_path: Path) -> None:
    with served([tmp_path]) as address, tab(browser, address) as opened:
        opened.open()
        assert "There is no run yet" in opened.text("main")
        assert "No run was found" in opened.text(".notes")


def test_a_run_that_is_not_there_is_noted_for_as_long_as_it_is_not(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", steps=40)
    run.take_steps(0, 3)
    with served([run.folder]) as address, tab(browser, address) as opened:
        opened.open("overview?run=nobody")
        assert "There is no run nobody here" in opened.text(".notes")
        run.take_steps(3, 5)
        opened.wait("document.querySelector('.steps').textContent === '5 of 40 steps'")
        opened.page.wait_for_timeout(1000)  # notes that no longer hold are taken away after the charts are drawn
        assert "There is no run nobody here" in opened.text(".notes")


def test_a_long_scroll_asks_for_what_is_in_sight_at_its_end(browser: Any, tmp_path: Path) -> None:
    """Each answer is held back until the scroll is over, as a slow disk would do it."""
    run = MadeRun(tmp_path / "run", steps=400)
    run.take_steps(0, 400)
    scroll = """async (pixels) => {
        const list = document.querySelector(".virtual-list");
        for (let at = 0; at < list.scrollHeight; at += pixels) {
            list.scrollTop = at;
            await new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
        }
    }"""
    with served([run.folder]) as address, tab(browser, address) as opened:
        page = opened.open("samples")
        records = map(json.loads, (run.folder / "samples.jsonl").read_text().splitlines())
        groups = len({(record["step"], record["group"]) for record in records})
        opened.wait(f"{COUNT} === '{groups} groups'")
        page.evaluate(NO_REFRESH)
        held: list[Any] = []
        page.route(PAGES, lambda route: held.append(route))
        page.evaluate(scroll, 700)
        end = time.monotonic() + WAIT / 1000
        while not held and time.monotonic() < end:
            page.wait_for_timeout(100)
        assert 0 < len(held) <= 2
        page.route(PAGES, lambda route: route.continue_())
        for route in held:
            route.continue_()
        opened.wait("[...document.querySelectorAll('.virtual-row')].every((row) => row.textContent !== '…')")
        last = page.locator(".virtual-row").last
        assert last.get_attribute("aria-posinset") == str(groups)


def test_a_wrong_address_says_what_is_wrong(opened: Tab) -> None:
    page = opened.open("samples?run=nobody&open=x.y.z")
    opened.wait("document.querySelector('.detail h2')?.textContent === 'This group is not here'")
    assert "There is no run nobody here" in opened.text(".notes")
    opened.visit("overview")
    opened.wait("document.querySelectorAll('.chart canvas').length > 8")
    page.get_by_role("spinbutton", name="From").fill("30")
    page.keyboard.press("Enter")
    opened.wait("location.hash.includes('from=30&to=39')")
    page.get_by_role("spinbutton", name="to").fill("10")
    page.keyboard.press("Enter")
    opened.wait("location.hash.includes('from=10&to=30')")


def test_the_numbers_of_tokens_are_read_by_keys(opened: Tab) -> None:
    page = opened.open("samples?kind=train&color=logprob")
    opened.wait("document.querySelector('.card')?.querySelector('.token.warm')")
    page.locator(".card").first.locator(".text[tabindex]").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    second = page.locator(".card .token").nth(1)
    assert "read" in (second.get_attribute("class") or "")
    shown = page.locator(".tip code").text_content() or ""
    assert shown.strip('"') == second.text_content()
    assert "Log-probability" in opened.text(".tip")
    page.keyboard.press("Tab")
    assert page.locator(".tip").is_hidden()
    assert page.locator(".token.read").count() == 0


def test_one_sample_at_a_time_needs_no_keys(opened: Tab) -> None:
    page = opened.open("samples?kind=train&layout=single")
    opened.wait("document.querySelectorAll('.card').length === 6")
    page.get_by_role("button", name="Worse sample").click()
    page.get_by_role("button", name="Worse sample").click()
    assert opened.text(".turner") == "‹sample 3 of 6›"
    shown = [card.get_attribute("aria-label") for card in page.locator(".card").all() if card.is_visible()]
    assert len(shown) == 1
    assert (shown[0] or "").startswith("Sample 3")


def test_what_is_open_stays_open_when_a_metric_comes_and_a_run_joins_the_comparison(
    browser: Any, tmp_path: Path
) -> None:
    first = MadeRun(tmp_path / "first", steps=40)
    first.take_steps(0, 6)
    with served([tmp_path]) as address, tab(browser, address) as opened:
        page = opened.open("overview")
        page.wait_for_selector(".topics summary")
        page.evaluate("document.querySelector('.topics summary').click()")  # a mouse may miss it while charts appear
        assert page.evaluate("document.querySelector('.topics details').open")
        first.add_row(6, **{"logged/a, b c": 2.0})
        opened.wait("[...document.querySelectorAll('summary')].some((one) => one.textContent.startsWith('logged'))")
        opened.wait("document.querySelector('.topics details').open")
        opened.visit("overview?show=logged/a, b c")
        page.reload()
        opened.wait("document.querySelector('.topics details[open] .value')?.textContent === '2'")
        opened.visit("compare")
        assert "There is one run" in opened.text("main")
        second = MadeRun(tmp_path / "second", steps=40)
        second.take_steps(0, 6)
        (second.folder / "config.yaml").unlink()
        opened.wait("document.querySelectorAll('.chip').length === 2")
        opened.wait(f"{NOTES}.includes('config.yaml is missing')")
        second.take_steps(6, 8)
        opened.wait("document.querySelector('.compare .position') && document.querySelectorAll('canvas').length === 4")
        page.wait_for_timeout(1500)  # for longer than the page needs to follow: the note still holds
        assert "config.yaml is missing" in opened.text(".notes")


def test_an_export_compares_follows_and_searches(browser: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        run = MadeRun(tmp_path / "runs" / name, steps=40)
        run.take_steps(0, 6)
        for number in range(60):
            last = "z" * 500 + f" the end of {number}."
            run.add_sample(5, last, group=100 + number, prompt=f"Prompt {number}", finish_reason="length")
        run.add_sample(5, "failed", group=200, failures={"correct": "timed out"})
    page = tmp_path / "page.html"
    assert main(["view", str(tmp_path / "runs"), "--export", str(page)]) == 0
    with tab(browser, page.as_uri(), offline=True) as opened:
        opened.open("compare")
        opened.wait("document.querySelectorAll('.cards.compared .card').length === 2")
        opened.visit("samples?run=runs-first&q=the end of 40.")
        opened.wait(f"{COUNT} === '1 group'")
        opened.page.get_by_role("link", name="Follow this prompt").click()
        opened.wait("document.querySelectorAll('.answers tbody tr').length === 1")
        opened.visit("samples?run=runs-first&finish=error")
        opened.wait(f"{COUNT} === '1 group'")
