"""The page in a browser, edge cases: runs without steps, wrong addresses, slow answers, keys on tokens, exports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rollgraph.cli import main
from tests.view.browser import WAIT, Tab, needs_chromium, served, tab
from tests.view.run_writer import RunWriter

pytestmark = [needs_chromium, pytest.mark.slow]

COUNT = "document.querySelector('.list-head .count').textContent"
PAGES = "**/samples?*"  # requests for rows of the list
NO_REFRESH = """async () => {
    const { VirtualList } = await import(new URL("static/virtual_list.js", document.baseURI));
    VirtualList.prototype.refresh = async () => {};
}"""  # otherwise the list requests its visible rows again whenever the run grows
NOTES = "document.querySelector('.notes').textContent"


def test_a_run_before_its_first_step_has_explanations(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run", steps=4)
    with served([run.folder]) as address, tab(browser, address, viewport={"width": 390, "height": 800}) as dashboard:
        page = dashboard.open("overview")
        assert "warm start" in dashboard.text(".chart-grid .empty")
        page.get_by_role("spinbutton", name="From").fill("3")
        page.keyboard.press("Enter")  # there is no range yet
        dashboard.visit("samples")
        dashboard.wait("document.querySelector('.detail h2')?.checkVisibility()")
        assert "No samples yet" in dashboard.text(".detail")
        dashboard.visit("samples?q=nothing")
        dashboard.wait("document.querySelector('.detail h2')?.textContent === 'No sample matches'")
        assert page.locator(".detail h2").is_visible()


def test_an_empty_folder_says_so(browser: Any, tmp_path: Path) -> None:
    with served([tmp_path]) as address, tab(browser, address) as dashboard:
        dashboard.open()
        assert "There is no run yet" in dashboard.text("main")
        assert "No run was found" in dashboard.text(".notes")


def test_the_note_of_an_unknown_run_stays(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run", steps=40)
    run.take_steps(0, 3)
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        dashboard.open("overview?run=nobody")
        assert "There is no run nobody here" in dashboard.text(".notes")
        run.take_steps(3, 5)
        dashboard.wait("document.querySelector('.steps').textContent === '5 of 40 steps'")
        dashboard.page.wait_for_timeout(1000)  # obsolete notes disappear after the charts are drawn
        assert "There is no run nobody here" in dashboard.text(".notes")


def test_a_long_scroll_requests_only_the_rows_at_its_end(browser: Any, tmp_path: Path) -> None:
    """Responses are held back until the scroll ends, as with a slow disk."""
    run = RunWriter(tmp_path / "run", steps=400)
    run.take_steps(0, 400)
    scroll = """async (pixels) => {
        const list = document.querySelector(".virtual-list");
        for (let at = 0; at < list.scrollHeight; at += pixels) {
            list.scrollTop = at;
            await new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
        }
    }"""
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        page = dashboard.open("samples")
        records = map(json.loads, (run.folder / "samples.jsonl").read_text().splitlines())
        groups = len({(record["step"], record["group"]) for record in records})
        dashboard.wait(f"{COUNT} === '{groups} groups'")
        page.evaluate(NO_REFRESH)
        waiting_requests: list[Any] = []
        page.route(PAGES, lambda route: waiting_requests.append(route))
        page.evaluate(scroll, 700)
        end = time.monotonic() + WAIT / 1000
        while not waiting_requests and time.monotonic() < end:
            page.wait_for_timeout(100)
        assert 0 < len(waiting_requests) <= 2
        page.route(PAGES, lambda route: route.continue_())
        for route in waiting_requests:
            route.continue_()
        dashboard.wait("[...document.querySelectorAll('.virtual-row')].every((row) => row.textContent !== '…')")
        last = page.locator(".virtual-row").last
        assert last.get_attribute("aria-posinset") == str(groups)


def test_wrong_addresses_are_explained_or_corrected(dashboard: Tab) -> None:
    page = dashboard.open("samples?run=nobody&open=x.y.z")
    dashboard.wait("document.querySelector('.detail h2')?.textContent === 'This group is not here'")
    assert "There is no run nobody here" in dashboard.text(".notes")
    dashboard.visit("overview")
    dashboard.wait("document.querySelectorAll('.chart canvas').length > 8")
    page.get_by_role("spinbutton", name="From").fill("30")
    page.keyboard.press("Enter")
    dashboard.wait("location.hash.includes('from=30&to=39')")
    page.get_by_role("spinbutton", name="to").fill("10")
    page.keyboard.press("Enter")
    dashboard.wait("location.hash.includes('from=10&to=30')")


def test_arrow_keys_show_the_values_of_tokens(dashboard: Tab) -> None:
    page = dashboard.open("samples?kind=train&color=logprob")
    dashboard.wait("document.querySelector('.card')?.querySelector('.token.warm')")
    page.locator(".card").first.locator(".text[tabindex]").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    second = page.locator(".card .token").nth(1)
    assert "read" in (second.get_attribute("class") or "")
    tip_text = page.locator(".tip code").text_content() or ""
    assert tip_text.strip('"') == second.text_content()
    assert "Log-probability" in dashboard.text(".tip")
    page.keyboard.press("Tab")
    assert page.locator(".tip").is_hidden()
    assert page.locator(".token.read").count() == 0


def test_buttons_step_through_single_samples(dashboard: Tab) -> None:
    page = dashboard.open("samples?kind=train&layout=single")
    dashboard.wait("document.querySelectorAll('.card').length === 6")
    page.get_by_role("button", name="Worse sample").click()
    page.get_by_role("button", name="Worse sample").click()
    assert dashboard.text(".turner") == "‹sample 3 of 6›"
    visible_labels = [card.get_attribute("aria-label") for card in page.locator(".card").all() if card.is_visible()]
    assert len(visible_labels) == 1
    assert (visible_labels[0] or "").startswith("Sample 3")


def test_open_topics_and_notes_survive_new_metrics_and_runs(browser: Any, tmp_path: Path) -> None:
    first = RunWriter(tmp_path / "first", steps=40)
    first.take_steps(0, 6)
    with served([tmp_path]) as address, tab(browser, address) as dashboard:
        page = dashboard.open("overview")
        page.wait_for_selector(".topics summary")
        page.evaluate("document.querySelector('.topics summary').click()")  # a mouse may miss it while charts appear
        assert page.evaluate("document.querySelector('.topics details').open")
        first.add_row(6, **{"logged/a, b c": 2.0})
        dashboard.wait("[...document.querySelectorAll('summary')].some((one) => one.textContent.startsWith('logged'))")
        dashboard.wait("document.querySelector('.topics details').open")
        dashboard.visit("overview?show=logged/a, b c")
        page.reload()
        dashboard.wait("document.querySelector('.topics details[open] .value')?.textContent === '2'")
        dashboard.visit("compare")
        assert "There is one run" in dashboard.text("main")
        second = RunWriter(tmp_path / "second", steps=40)
        second.take_steps(0, 6)
        (second.folder / "config.yaml").unlink()
        dashboard.wait("document.querySelectorAll('.chip').length === 2")
        dashboard.wait(f"{NOTES}.includes('config.yaml is missing')")
        second.take_steps(6, 8)
        dashboard.wait(
            "document.querySelector('.compare .position') && document.querySelectorAll('canvas').length === 4"
        )
        page.wait_for_timeout(1500)  # longer than the page needs to update: the note still holds
        assert "config.yaml is missing" in dashboard.text(".notes")


def test_an_export_can_compare_follow_prompts_and_search(browser: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        run = RunWriter(tmp_path / "runs" / name, steps=40)
        run.take_steps(0, 6)
        for number in range(60):
            completion = "z" * 500 + f" the end of {number}."
            run.add_sample(5, completion, group=100 + number, prompt=f"Prompt {number}", finish_reason="length")
        run.add_sample(5, "failed", group=200, failures={"correct": "timed out"})
    page = tmp_path / "page.html"
    assert main(["view", str(tmp_path / "runs"), "--export", str(page)]) == 0
    with tab(browser, page.as_uri(), offline=True) as dashboard:
        dashboard.open("compare")
        dashboard.wait("document.querySelectorAll('.cards.compared .card').length === 2")
        dashboard.visit("samples?run=runs-first&q=the end of 40.")
        dashboard.wait(f"{COUNT} === '1 group'")
        dashboard.page.get_by_role("link", name="Follow this prompt").click()
        dashboard.wait("document.querySelectorAll('.answers tbody tr').length === 1")
        dashboard.visit("samples?run=runs-first&finish=error")
        dashboard.wait(f"{COUNT} === '1 group'")
