"""The page of the quickstart while it trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollgraph.commands.init import write_starter
from tests.view.browser import needs_chromium, served, tab

STEPS = "Number(document.querySelector('.steps')?.textContent.split(' ')[0] ?? 0)"
# Small, and without an end: the test stops the run.
SMALL = ("warm_start=null", "steps=100000", "data.prompts_per_step=4", "validation.max_prompts=4", "validation.every=5")


@pytest.mark.slow
@needs_chromium
@pytest.mark.multi
def test_the_page_follows_the_quickstart_while_it_trains(browser: Any, tmp_path: Path) -> None:
    write_starter("quickstart", tmp_path)
    command = [sys.executable, "-m", "rollgraph", "train", "config.yaml", "log.progress=plain", *SMALL]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as training:
        try:
            with served([tmp_path]) as address, tab(browser, address) as dashboard:
                page = dashboard.open("overview")
                dashboard.wait(f"{STEPS} > 0")
                assert dashboard.text(".status") == "running"
                assert "left" in dashboard.text(".left")
                first_steps = page.evaluate(STEPS)
                dashboard.wait(f"{STEPS} > {first_steps}")
                dashboard.wait("document.querySelectorAll('.chart canvas').length > 5")
                dashboard.visit("samples?kind=validation")
                dashboard.wait("document.querySelectorAll('.card .text:not(.loading)').length > 0")
                training.terminate()
                training.wait()
                dashboard.wait("document.querySelector('.status').textContent === 'stopped'")
        finally:
            training.kill()
