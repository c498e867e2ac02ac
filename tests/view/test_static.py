"""Rules of the page's files: text never becomes markup, nothing comes from elsewhere, and modules stay small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "src" / "rollgraph" / "view" / "static"
MODULES = [path for path in sorted(STATIC.glob("*.js")) if path.name != "uplot.js"]
SINKS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "createContextualFragment", "DOMParser", "document.write",
         "setHTML", "srcdoc", "eval(", "new Function", "javascript:")  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_can_turn_text_into_markup_or_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [sink for sink in SINKS if sink in text] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_modules_import_only_their_neighbours_and_are_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    imports = re.findall(r"^import .*?;$", text, re.MULTILINE | re.DOTALL)
    # The export writes modules into one file, and finds their imports by this form.
    named = [re.fullmatch(r'import (?:[\w{},\s]+) from "\./([\w.]+)";', line) for line in imports]
    assert all(match and (STATIC / match[1]).is_file() for match in named), imports
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("// ")  # what the module owns


def test_every_file_is_used() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    seen, found = set(), {"app.js"}
    while found - seen:
        name = (found - seen).pop()
        seen.add(name)
        found |= set(re.findall(r'from "\./([\w.]+)"', (STATIC / name).read_text(encoding="utf-8")))
    styles = set(re.findall(r'href="static/([\w.]+)"', page))
    assert seen | styles | {"index.html", "uplot.LICENSE.txt"} == {path.name for path in STATIC.iterdir()}


def test_the_document_has_no_inline_script_or_style_and_names_no_other_host() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="static/app.js">']
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)
    for path in [*STATIC.glob("*.css"), *MODULES, STATIC / "index.html"]:
        assert not re.search(r"https?://|@import|url\(", path.read_text(encoding="utf-8")), path.name
