"""Time how fast the dashboard opens a long run: `python benchmarks/run_page.py [--steps 100000] [--samples 1000000]`.

It writes a run with that many steps and samples, starts `rollgraph view`, and opens the page in headless Chromium:
first with nothing indexed, then, after the index is complete, with a new server. A page counts as open when its charts
are drawn, or when its list of samples has its first rows. Then it scrolls through the list of samples. Needs
`pip install 'rollgraph[dev]'` and Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import table
from playwright.sync_api import sync_playwright

METRICS = 40  # in a step
GROUP = 8  # samples
CHARTS = "document.querySelectorAll('.chart canvas').length > 5"
ROWS = "document.querySelectorAll('.virtual-row .row-prompt').length > 5"
ALL = "document.querySelector('.list-head .count')?.textContent === '{:,} groups'"
SCROLL = """async (frames) => {
    const list = document.querySelector(".virtual-list");
    const times = [];
    let waiting = 0;
    for (let frame = 0; frame < frames; frame += 1) {
        const before = performance.now();
        list.scrollTop += 40;
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - before);
        waiting += [...list.querySelectorAll(".virtual-row")].some((row) => row.textContent === "…");
    }
    return [times, waiting];
}"""


def write_run(folder: Path, steps: int, samples: int) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    values = ", ".join(f'"metric/{number}": 0.123456789' for number in range(METRICS - 6))
    shown = '"policy/kl": 0.01, "policy/entropy": 0.7, "length/mean": 180.5, "loss": 0.1, "optimizer/grad_norm": 0.3'
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.write(f'{{"step": {step}, "reward": {step}.5, {shown}, {values}}}\n')
    groups = samples // GROUP
    with (folder / "samples.jsonl").open("w") as file:
        for group in range(groups):
            head = f'{{"step": {group * steps // groups}, "split": "train", "group": {group}, '
            for place in range(GROUP):
                text = f"This is answer {place} of group {group}. " * 12
                file.write(f'{head}"prompt": "prompt {group % 1000}", "completion": "{text}", "reward": {place}.0}}\n')


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[str]:
    """Start a server and yield its address."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rollgraph", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield next(word for line in server.stdout for word in line.split() if word.startswith("http"))
    finally:
        server.terminate()
        server.wait()


def wait(page: Any, condition: str) -> None:
    while not page.evaluate(condition):
        page.wait_for_timeout(5)


def time_opening(browser: Any, address: str, view: str, condition: str) -> float:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    started = time.perf_counter()
    page.goto(f"{address}#/{view}")
    wait(page, condition)
    seconds = time.perf_counter() - started
    page.close()
    return seconds


def measure(browser: Any, folder: Path, options: argparse.Namespace) -> list[tuple[str, str]]:
    groups = options.samples // GROUP
    rows: list[tuple[str, str]] = []
    cache = folder.parent / "cache"
    with served(folder, cache) as address:
        rows.append(("overview, nothing indexed", f"{time_opening(browser, address, 'overview', CHARTS):.2f} s"))
        indexed = time_opening(browser, address, "samples", ALL.format(groups))
        rows.append(("time to index all samples", f"{indexed:.0f} s"))
    for view, condition in (("overview", CHARTS), ("samples", ROWS)):
        with served(folder, cache) as address:
            times = [time_opening(browser, address, view, condition) for _ in range(3)]
        rows.append((f"{view}, a new server: first load, reload", f"{times[0]:.2f} s, {min(times[1:]):.2f} s"))
    with served(folder, cache) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{address}#/samples")
        wait(page, ROWS)
        times, waiting = page.evaluate(SCROLL, options.frames)
    ordered = sorted(times)
    late = ordered[int(0.95 * len(ordered))]
    rows.append(("scrolling, frame time: median, 95%", f"{statistics.median(times):.0f} ms, {late:.0f} ms"))
    rows.append(("frames with a row still missing", f"{waiting} of {options.frames}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time how quickly the dashboard opens a long run.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=300)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name) / "run"
        write_run(folder, options.steps, options.samples)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            rows = measure(browser, folder, options)
        finally:
            browser.close()
    table(f"{options.steps:,} steps, {options.samples:,} samples, {size:.0f} MB", ("what", "time"), rows)


if __name__ == "__main__":
    main()
