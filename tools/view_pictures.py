"""Take the screenshots of docs/view.md: `python tools/view_pictures.py runs/first runs/second`.

Every view shows the first run; the comparison also shows the others. Needs Chromium and the packages of
`rollgraph[dev]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.view.browser import chromium, served, tab  # noqa: E402

IMAGES = ROOT / "docs" / "images"
VIEWS = {
    "overview": ("overview?smooth=0.6", "document.querySelectorAll('.chart canvas').length > 8"),
    "samples": ("samples?kind=train&color=logprob", "document.querySelectorAll('.token.warm').length > 4"),
    "diagnosis": ("diagnosis", "document.querySelector('.diagnosis h2')"),
    "compare": ("compare", "document.querySelectorAll('.compare canvas').length > 3"),
    "machine": ("machine", "document.querySelectorAll('.machine tbody tr').length > 4"),
}


def take_pictures(folders: list[Path]) -> None:
    with chromium() as browser, served(folders) as address, tab(browser, address) as opened:
        for name, (view, ready) in VIEWS.items():
            opened.open(view)
            opened.wait(ready)
            opened.page.wait_for_timeout(500)
            opened.page.screenshot(path=IMAGES / f"view_{name}.png")


if __name__ == "__main__":
    take_pictures([Path(folder) for folder in sys.argv[1:]])
