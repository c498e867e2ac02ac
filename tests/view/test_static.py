"""Rules for the files of the page: text never becomes markup, nothing is loaded from other hosts, modules are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "src" / "rollgraph" / "view" / "static"
MODULES = [path for path in sorted(STATIC.glob("*.js")) if path.name != "uplot.js"]
SINKS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "createContextualFragment", "DOMParser", "document.write",
         "setHTML", "srcdoc", "eval(", "new Function", "javascript:")  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_turns_text_into_markup_or_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [sink for sink in SINKS if sink in text] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_modules_are_small_and_import_only_each_other(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    imports = re.findall(r"^import .*?;$", text, re.MULTILINE | re.DOTALL)
    # The export, which puts all modules into one file, recognizes imports by this form.
    matches = [re.fullmatch(r'import (?:[\w{},\s]+) from "\./([\w.]+)";', line) for line in imports]
    assert all(match and (STATIC / match[1]).is_file() for match in matches), imports
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("// ")  # a header that says what the module owns


def test_every_file_is_used() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    visited, reachable = set(), {"app.js"}
    while reachable - visited:
        name = (reachable - visited).pop()
        visited.add(name)
        reachable |= set(re.findall(r'from "\./([\w.]+)"', (STATIC / name).read_text(encoding="utf-8")))
    styles = set(re.findall(r'href="static/([\w.]+)"', page))
    assert visited | styles | {"index.html", "uplot.LICENSE.txt"} == {path.name for path in STATIC.iterdir()}


def test_the_page_has_no_inline_code_and_names_no_other_host() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="static/app.js">']
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)
    for path in [*STATIC.glob("*.css"), *MODULES, STATIC / "index.html"]:
        assert not re.search(r"https?://|@import|url\(", path.read_text(encoding="utf-8")), path.name
