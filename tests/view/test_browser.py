"""The page in a browser: the main use of every view, and hostile text stays text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rollgraph.cli import main
from tests.view.browser import Tab, needs_chromium, served, tab
from tests.view.run_writer import HOSTILE, RunWriter

pytestmark = needs_chromium


def test_every_view_serves_its_purpose(dashboard: Tab) -> None:
    dashboard.open("overview")
    zoom_by_a_drag(dashboard)
    dashboard.visit("samples?kind=train")
    read_a_group(dashboard)
    follow_a_prompt(dashboard)
    dashboard.visit("diagnosis")
    read_the_diagnosis(dashboard)
    dashboard.visit("compare")
    compare_two_runs(dashboard)
    dashboard.visit("machine")
    read_about_the_machine(dashboard)


def zoom_by_a_drag(dashboard: Tab) -> None:
    page = dashboard.page
    dashboard.wait("document.querySelectorAll('.chart canvas').length > 8")
    assert dashboard.text(".steps") == "40 of 40 steps"
    reward, entropy = (
        page.locator(".chart").filter(has=page.get_by_text(title, exact=True)) for title in ("Reward", "Entropy")
    )
    latest = reward.locator(".value").first.text_content()
    plot_box = reward.locator(".u-over").bounding_box()
    assert plot_box is not None
    middle = plot_box["y"] + plot_box["height"] / 2
    page.mouse.move(plot_box["x"] + 30, middle)
    assert reward.locator(".value").first.text_content() != latest
    assert reward.locator(".position").text_content() == entropy.locator(".position").text_content() != ""
    page.mouse.down()
    page.mouse.move(plot_box["x"] + 150, middle)
    page.mouse.up()
    dashboard.wait("location.hash.includes('from=')")
    page.get_by_role("button", name="Whole run").click()
    dashboard.wait("!location.hash.includes('from=')")


def read_a_group(dashboard: Tab) -> None:
    """Samples from best to worst, with the parts of each reward, coloured tokens, and replies of tools set apart."""
    page = dashboard.page
    rewards = "Array.from(document.querySelectorAll('.card .reward'), (one) => Number(one.textContent))"
    dashboard.wait(f"{rewards}.length === 6")
    rewards_shown = page.evaluate(rewards)
    assert rewards_shown == sorted(rewards_shown, reverse=True)
    assert {"correct", "boxed"} <= set(page.locator(".card").first.locator("dt").all_text_contents())
    page.get_by_label("Colour tokens by").select_option("logprob")
    dashboard.wait("document.querySelectorAll('.card .token.warm').length > 20")
    assert "surprising" in dashboard.text(".token-legend")
    page.locator(".token").nth(3).hover()
    assert "Log-probability" in dashboard.text(".tip")
    assert "environment" in dashboard.text(".turn.reply")  # group 1, the newest of training, calls a tool


def follow_a_prompt(dashboard: Tab) -> None:
    page = dashboard.page
    page.get_by_role("link", name="Follow this prompt").click()
    dashboard.wait("document.querySelectorAll('.answers tbody tr').length === 8")
    assert page.locator(".answers tbody tr").first.locator("a").text_content() == "35"
    page.locator(".answers tbody tr").last.locator("a").click()
    dashboard.wait("document.querySelector('.group-head h2').textContent.startsWith('Step 0')")


def read_the_diagnosis(dashboard: Tab) -> None:
    """Each finding is a sentence with evidence that links to its chart."""
    assert "all rewards are equal" in dashboard.text(".finding")
    dashboard.wait("document.querySelector('.finding canvas')")
    dashboard.page.locator(".finding a").first.click()
    dashboard.wait("document.querySelector('.chart.shown h3')?.textContent === 'Truncated and constant'")


def compare_two_runs(dashboard: Tab) -> None:
    page = dashboard.page
    dashboard.wait("document.querySelectorAll('.compare .chart canvas').length === 4")
    dashboard.wait("document.querySelectorAll('.cards.compared .card').length === 2")
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in page.locator(".compare tbody tr").all_inner_texts()}
    assert rows["optimizer.lr"] == ["1e-6", "5e-7"]
    page.locator(".chip").last.click()
    dashboard.wait("document.querySelectorAll('.cards.compared .card').length === 1")


def read_about_the_machine(dashboard: Tab) -> None:
    page = dashboard.page
    assert "fits no bucket" in dashboard.text(".remark")
    assert page.locator("section").filter(has_text="Memory by phase").locator("tbody tr").count() >= 4
    assert "rank 1" in (page.locator("section").filter(has_text="Ranks").text_content() or "")


@pytest.mark.slow
def test_a_live_run_grows_and_hostile_text_stays_text(browser: Any, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "<b onclick=x>run</b>", steps=40)
    with served([run.folder]) as address, tab(browser, address) as dashboard:
        page = dashboard.open("overview")
        dashboard.wait("document.querySelector('.notes').textContent.includes('metrics.jsonl is missing')")
        run.take_steps(0, 3)
        dashboard.wait("document.querySelector('.notes').textContent === ''")  # the note no longer holds
        dashboard.wait("document.querySelector('.steps')?.textContent === '3 of 40 steps'")
        dashboard.wait("document.querySelectorAll('.chart canvas').length > 8")
        reward_shown = page.locator(".chart .value").first.text_content()
        start_time = time.monotonic()
        run.take_steps(3, 10)
        run.add_sample(
            9, HOSTILE, prompt=HOSTILE, columns={HOSTILE: HOSTILE}, rewards={HOSTILE: 1.0}, extra={HOSTILE: HOSTILE}
        )
        dashboard.wait("document.querySelector('.steps').textContent === '10 of 40 steps'")
        dashboard.wait(f"document.querySelector('.chart .value').textContent !== '{reward_shown}'")
        print(f"the page followed after {time.monotonic() - start_time:.2f} s")  # for the reader of the output
        dashboard.visit("samples?step=9")
        dashboard.wait("document.querySelector('.card .text:not(.loading)')")
        for selector in (".card .text", ".prompt .text", ".parts dt", ".prompt dd", ".card .columns dt"):
            assert page.locator(selector).text_content() == HOSTILE, selector
        assert page.evaluate("window.broken") is None
        assert page.locator("main img, main script, b[onclick]").count() == 0


def test_an_export_opens_without_a_server(browser: Any, two_runs: Path, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "hostile", steps=4)
    run.take_steps(0, 1)
    hostile = HOSTILE + "</script><!-- </style>"
    run.add_sample(0, hostile, prompt=HOSTILE)
    page = tmp_path / "page.html"
    assert main(["view", str(two_runs / "first"), str(run.folder), "--export", str(page)]) == 0
    with tab(browser, page.as_uri(), offline=True) as dashboard:
        dashboard.open("overview")
        assert str(time.localtime().tm_year) in dashboard.text("header .tag")
        dashboard.wait("document.querySelectorAll('.chart canvas').length > 8")
        dashboard.visit("samples?kind=train")
        read_a_group(dashboard)
        follow_a_prompt(dashboard)
        dashboard.visit("diagnosis")
        read_the_diagnosis(dashboard)
        ids = [option.get_attribute("value") for option in dashboard.page.locator(".picker option").all()]
        dashboard.visit(f"samples?run={ids[-1]}&open=0.train.90")
        dashboard.wait(f"document.querySelector('.card .text')?.textContent.startsWith({HOSTILE[:30]!r})")
        assert dashboard.page.locator(".card .text").text_content() == hostile
        assert dashboard.page.evaluate("window.broken") is None
