"""A visit to the page in a real browser: every view does what it is for, and text of a model stays text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rollgraph.cli import main
from tests.view.browser import Tab, needs_chromium, served, tab
from tests.view.made_run import HOSTILE, MadeRun

pytestmark = needs_chromium


def test_every_view_does_what_it_is_for(opened: Tab) -> None:
    opened.open("overview")
    zoom_by_a_drag(opened)
    opened.visit("samples?kind=train")
    read_a_group(opened)
    follow_a_prompt(opened)
    opened.visit("diagnosis")
    read_the_diagnosis(opened)
    opened.visit("compare")
    compare_two_runs(opened)
    opened.visit("machine")
    read_about_the_machine(opened)


def zoom_by_a_drag(opened: Tab) -> None:
    page = opened.page
    opened.wait("document.querySelectorAll('.chart canvas').length > 8")
    assert opened.text(".steps") == "40 of 40 steps"
    reward, entropy = (
        page.locator(".chart").filter(has=page.get_by_text(title, exact=True)) for title in ("Reward", "Entropy")
    )
    latest = reward.locator(".value").first.text_content()
    over = reward.locator(".u-over").bounding_box()
    assert over is not None
    middle = over["y"] + over["height"] / 2
    page.mouse.move(over["x"] + 30, middle)
    assert reward.locator(".value").first.text_content() != latest
    assert reward.locator(".position").text_content() == entropy.locator(".position").text_content() != ""
    page.mouse.down()
    page.mouse.move(over["x"] + 150, middle)
    page.mouse.up()
    opened.wait("location.hash.includes('from=')")
    page.get_by_role("button", name="Whole run").click()
    opened.wait("!location.hash.includes('from=')")


def read_a_group(opened: Tab) -> None:
    """Best to worst, with the parts of each reward, coloured by token; what a tool said stands apart."""
    page = opened.page
    rewards = "Array.from(document.querySelectorAll('.card .reward'), (one) => Number(one.textContent))"
    opened.wait(f"{rewards}.length === 6")
    found = page.evaluate(rewards)
    assert found == sorted(found, reverse=True)
    assert {"correct", "boxed"} <= set(page.locator(".card").first.locator("dt").all_text_contents())
    page.get_by_label("Colour tokens by").select_option("logprob")
    opened.wait("document.querySelectorAll('.card .token.warm').length > 20")
    assert "surprising" in opened.text(".token-legend")
    page.locator(".token").nth(3).hover()
    assert "Log-probability" in opened.text(".tip")
    assert "environment" in opened.text(".turn.reply")  # group 1, the newest of training, calls a tool


def follow_a_prompt(opened: Tab) -> None:
    page = opened.page
    page.get_by_role("link", name="Follow this prompt").click()
    opened.wait("document.querySelectorAll('.answers tbody tr').length === 8")
    assert page.locator(".answers tbody tr").first.locator("a").text_content() == "35"
    page.locator(".answers tbody tr").last.locator("a").click()
    opened.wait("document.querySelector('.group-head h2').textContent.startsWith('Step 0')")


def read_the_diagnosis(opened: Tab) -> None:
    """A sentence, with evidence that leads to its chart."""
    assert "all rewards are equal" in opened.text(".finding")
    opened.wait("document.querySelector('.finding canvas')")
    opened.page.locator(".finding a").first.click()
    opened.wait("document.querySelector('.chart.shown h3')?.textContent === 'Truncated and constant'")


def compare_two_runs(opened: Tab) -> None:
    page = opened.page
    opened.wait("document.querySelectorAll('.compare .chart canvas').length === 4")
    opened.wait("document.querySelectorAll('.cards.compared .card').length === 2")
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in page.locator(".compare tbody tr").all_inner_texts()}
    assert rows["optimizer.lr"] == ["1e-6", "5e-7"]
    page.locator(".chip").last.click()
    opened.wait("document.querySelectorAll('.cards.compared .card').length === 1")


def read_about_the_machine(opened: Tab) -> None:
    page = opened.page
    assert "fits no bucket" in opened.text(".remark")
    assert page.locator("section").filter(has_text="Memory by phase").locator("tbody tr").count() >= 4
    assert "rank 1" in (page.locator("section").filter(has_text="Ranks").text_content() or "")


@pytest.mark.slow
def test_a_live_run_grows_and_hostile_text_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "<b onclick=x>run</b>", steps=40)
    with served([run.folder]) as address, tab(browser, address) as opened:
        page = opened.open("overview")
        opened.wait("document.querySelector('.notes').textContent.includes('metrics.jsonl is missing')")
        run.take_steps(0, 3)
        opened.wait("document.querySelector('.notes').textContent === ''")  # what was said no longer holds
        opened.wait("document.querySelector('.steps')?.textContent === '3 of 40 steps'")
        opened.wait("document.querySelectorAll('.chart canvas').length > 8")
        before = page.locator(".chart .value").first.text_content()
        started = time.monotonic()
        run.take_steps(3, 10)
        run.add_sample(
            9, HOSTILE, prompt=HOSTILE, columns={HOSTILE: HOSTILE}, rewards={HOSTILE: 1.0}, extra={HOSTILE: HOSTILE}
        )
        opened.wait("document.querySelector('.steps').textContent === '10 of 40 steps'")
        opened.wait(f"document.querySelector('.chart .value').textContent !== '{before}'")
        print(f"the page followed after {time.monotonic() - started:.2f} s")  # a number to read, not to assert
        opened.visit("samples?step=9")
        opened.wait("document.querySelector('.card .text:not(.loading)')")
        for selector in (".card .text", ".prompt .text", ".parts dt", ".prompt dd", ".card .columns dt"):
            assert page.locator(selector).text_content() == HOSTILE, selector
        assert page.evaluate("window.broken") is None
        assert page.locator("main img, main script, b[onclick]").count() == 0


def test_an_export_opens_without_a_server(browser: Any, two_runs: Path, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "hostile", steps=4)
    run.take_steps(0, 1)
    hostile = HOSTILE + "</script><!-- </style>"
    run.add_sample(0, hostile, prompt=HOSTILE)
    page = tmp_path / "page.html"
    assert main(["view", str(two_runs / "first"), str(run.folder), "--export", str(page)]) == 0
    with tab(browser, page.as_uri(), offline=True) as opened:
        opened.open("overview")
        assert str(time.localtime().tm_year) in opened.text("header .tag")
        opened.wait("document.querySelectorAll('.chart canvas').length > 8")
        opened.visit("samples?kind=train")
        read_a_group(opened)
        follow_a_prompt(opened)
        opened.visit("diagnosis")
        read_the_diagnosis(opened)
        ids = [option.get_attribute("value") for option in opened.page.locator(".picker option").all()]
        opened.visit(f"samples?run={ids[-1]}&open=0.train.90")
        opened.wait(f"document.querySelector('.card .text')?.textContent.startsWith({HOSTILE[:30]!r})")
        assert opened.page.locator(".card .text").text_content() == hostile
        assert opened.page.evaluate("window.broken") is None
