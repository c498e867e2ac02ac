"""The page in a browser, in detail: axes, keys, search, phones, very long lists and texts, damaged folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.view.browser import Tab, needs_chromium, served, tab
from tests.view.run_writer import HOSTILE, RunWriter

pytestmark = [needs_chromium, pytest.mark.slow]

MANY = 1_000_000
COUNT = "document.querySelector('.list-head .count').textContent"


def test_curves_are_smoothed_and_axes_changed(dashboard: Tab) -> None:
    page = dashboard.open("overview?smooth=0.9")
    assert dashboard.text("output") == "0.90"
    page.get_by_role("button", name="Log").click()
    page.get_by_role("button", name="Time").click()
    dashboard.wait("document.querySelector('.chart').dataset.axis === 'time'")
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowLeft")
    dashboard.wait("/^\\d+:\\d\\d/.test(document.querySelector('.position').textContent)")
    assert "generate" in (page.locator(".chart.wide .legend").text_content() or "")
    # Half of the last label below a chart lies beyond the edge of the plot.
    room = page.evaluate("""() => {
        const [plot, over] = [".plot", ".u-over"].map((one) => document.querySelector(one).getBoundingClientRect());
        const pen = document.createElement("canvas").getContext("2d");
        pen.font = "11px ui-sans-serif, system-ui, sans-serif";
        return plot.right - over.right - pen.measureText("2:40").width / 2;
    }""")
    assert room >= 0


def test_smoothing_and_stacking_of_values(dashboard: Tab) -> None:
    page = dashboard.open("machine")
    smooth = "import('/static/smoothing.js').then((it) => it.smooth([2, null, 4, 4], 0.5))"
    first, gap, third, last = page.evaluate(smooth)
    assert (first, gap) == (2, None)
    assert third == pytest.approx((0.5 * 2 + 4) / 1.5)
    assert third < last < 4
    stack = "import('/static/smoothing.js').then((it) => it.stack([[1, 2], [10, null]]))"
    assert page.evaluate(stack) == [[1, 2], [11, 2]]


def test_keys_search_filter_and_step_through_samples(dashboard: Tab) -> None:
    page = dashboard.open("samples")
    dashboard.wait("document.querySelectorAll('.virtual-row').length > 4")
    page.keyboard.press("/")
    page.keyboard.type("MARBLES")
    dashboard.wait(f"{COUNT} === '8 groups'")
    marked = "Array.from(CSS.highlights.get('search') ?? [], (range) => range.toString())"
    dashboard.wait(f"{marked}.includes('marbles')")
    page.get_by_label("Step", exact=True).fill("35")
    dashboard.wait(f"{COUNT} === '1 group'")
    page.get_by_role("searchbox").fill("")
    dashboard.wait(f"{COUNT} === '4 groups'")
    page.get_by_role("listbox").focus()
    page.keyboard.press("ArrowDown")
    dashboard.wait("document.querySelector('.virtual-row[aria-selected=true]')?.id === 'row-1'")
    dashboard.wait("location.hash.includes('open=35.dropped.2')")
    dashboard.wait("document.querySelector('.group-head .quiet').textContent.includes('filtered out')")
    page.locator(".card.selected").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Sample 2")


def test_controls_have_accessible_names_and_visible_focus(dashboard: Tab) -> None:
    names = """Array.from(document.querySelectorAll('a, button, input, select, [tabindex="0"]'), (one) =>
        one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent.trim())"""
    for view in ("overview", "diagnosis", "compare", "machine", "samples"):
        page = dashboard.open(view)
        dashboard.wait("document.querySelector('main').textContent.length > 40")
        assert all(page.evaluate(names)), view
    focused = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        focused.add(page.evaluate("document.activeElement.textContent || document.activeElement.ariaLabel"))
    assert len(focused) >= 8


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_fits_a_phone(browser: Any, address: str, theme: str) -> None:
    with tab(browser, address, viewport={"width": 390, "height": 800}, color_scheme=theme) as dashboard:
        for view in ("overview", "samples", "samples?open=35.train.1&color=kl", "diagnosis", "compare", "machine"):
            dashboard.open(view)
            dashboard.wait("document.querySelector('main').textContent.length > 40")
            assert dashboard.width_beyond() <= 0, view
        assert dashboard.page.evaluate("document.documentElement.dataset.theme") == theme
        dashboard.page.keyboard.press("d")
        assert dashboard.page.evaluate("document.documentElement.dataset.theme") != theme


def test_a_megabyte_of_text_is_shown_in_portions(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "long", steps=4)
    run.take_steps(0, 1)
    megabyte = (HOSTILE + "\n") * (2**20 // len(HOSTILE))
    run.add_sample(0, megabyte)
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        page = dashboard.open("samples?open=0.train.90")
        dashboard.wait("document.querySelector('.card .more')")
        assert len(page.locator(".card .text").text_content() or "") < 30_000
        while page.locator(".card .more").count():
            page.locator(".card .more").click()
        assert page.locator(".card .text").text_content() == megabyte
        assert page.evaluate("window.broken") is None


def answer_with_many_groups(route: Any, request: Any) -> None:
    query = parse_qs(urlsplit(request.url).query)
    offset, limit = int(query.get("offset", ["0"])[0]), int(query["limit"][0])
    sample = {"id": "x", "reward": 1.0, "rewards": {}, "advantage": 0.0, "tokens": 3, "finish": "stop", "failed": False}
    sample |= {"reasons": [], "text_preview": "text"}
    group = {"step": 0, "kind": "train", "prompt_key": "k", "columns": {}, "samples": [sample]}
    groups = [group | {"group": n, "prompt": f"prompt {n}"} for n in range(offset, min(offset + limit, MANY))]
    route.fulfill(json={"total": MANY, "groups": groups, "notes": []})


def test_a_list_of_a_million_groups_renders_few_rows(dashboard: Tab) -> None:
    dashboard.page.route("**/api/runs/*/samples?*", answer_with_many_groups)
    dashboard.page.route("**/api/runs/*/samples/x", lambda route: route.fulfill(json={"turns": [], "notes": []}))
    page = dashboard.open("samples")
    dashboard.wait("document.querySelector('.row-prompt')?.textContent === 'prompt 0'")
    assert page.locator(".virtual-row").count() < 40
    page.get_by_role("listbox").focus()
    page.keyboard.press("End")
    dashboard.wait(
        f"[...document.querySelectorAll('.row-prompt')].some((row) => row.textContent === 'prompt {MANY - 1}')"
    )
    assert page.locator(".virtual-row").count() < 40
    page.keyboard.press("Home")
    dashboard.wait("document.querySelector('.row-prompt')?.textContent === 'prompt 0'")


def test_the_list_keeps_its_position_while_it_grows(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "live", steps=100)
    run.take_steps(0, 30, samples_every=1)
    first_visible = """(() => {
        const list = document.querySelector('.virtual-list').getBoundingClientRect();
        const rows = [...document.querySelectorAll('.virtual-row')];
        const row = rows.find((one) => one.getBoundingClientRect().top >= list.top);
        return row && [row.querySelector('.row-step')?.textContent, row.getBoundingClientRect().top - list.top];
    })()"""
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        page = dashboard.open("samples")
        dashboard.wait(f"{COUNT} === '120 groups'")
        page.evaluate("document.querySelector('.virtual-list').scrollTop = 68 * 40 + 10")
        dashboard.wait(f"{first_visible}?.[0] === 'step 19'")
        position = page.evaluate(first_visible)
        run.take_steps(30, 33, samples_every=1)
        dashboard.wait(f"{COUNT} === '132 groups'")
        dashboard.wait(f"{first_visible}?.[0] === 'step 19'")
        assert page.evaluate(first_visible) == position


def test_a_damaged_folder_opens_with_a_note(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "damaged", steps=4)
    run.take_steps(0, 2)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run.folder / name).open("a") as file:
            file.write('{"step": 1, "rewa\n{"step": 2, "rew')  # a damaged line and an unfinished one
    (run.folder / "config.yaml").unlink()
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        for view in ("overview", "samples", "diagnosis", "machine"):
            dashboard.open(view)
            dashboard.wait("document.querySelector('.notes').textContent.includes('config.yaml is missing')")
            dashboard.wait("document.querySelector('.notes').textContent.includes('half-written')")
        assert dashboard.text(".steps") == "2 steps"
