"""The export: one file that needs no server, from whose data no completion can escape."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from rollgraph.view.export import collect_answers, write_export
from rollgraph.view.runs import Catalog
from tests.view.synthetic_run import write_group, write_run

PAGE = """<!doctype html><html><head>
<link rel="stylesheet" href="static/a.css">
<script type="module" src="static/app.js"></script>
</head><body></body></html>"""
HOSTILE = "</script><script>alert(1)</script><!-- \u2028 &amp; \ud83d"


@pytest.fixture
def exported_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text(PAGE)
    (static / "a.css").write_text("p { color: red }")
    (static / "app.js").write_text('import { b } from "./b.js";\nimport "./c.js";\nconsole.log(b, "from ./b.js");\n')
    (static / "b.js").write_text("export const b = 1;\n")
    (static / "c.js").write_text("\n")
    for name in ("one", "two"):
        folder = write_run(tmp_path / "runs" / name, steps=30)
        write_group(folder, 20, 0, completion=HOSTILE)
    target = tmp_path / "page.html"
    write_export(Catalog([tmp_path / "runs"]), target, static)
    return target.read_text(encoding="utf-8")


def test_the_file_holds_scripts_styles_and_data(exported_page: str) -> None:
    assert "static/" not in exported_page
    assert "<style>p { color: red }</style>" in exported_page
    (import_map,) = re.findall(r'<script type="importmap">(.*?)</script>', exported_page, re.DOTALL)
    modules = json.loads(import_map)["imports"]
    assert modules.keys() == {"view/app.js", "view/b.js", "view/c.js"}
    app = base64.b64decode(modules["view/app.js"].partition("base64,")[2]).decode()
    assert app == 'import { b } from "view/b.js";\nimport "view/c.js";\nconsole.log(b, "from ./b.js");\n'
    assert '<script type="module">import "view/app.js";</script>' in exported_page
    assert "default-src 'none'" in exported_page


def test_no_completion_ends_its_script_element(exported_page: str) -> None:
    (data,) = re.findall(
        r'<script type="application/json" id="rollgraph-export">(.*?)</script>', exported_page, re.DOTALL
    )
    assert "<" not in data
    content = json.loads(data)
    sample = content["data"]["runs-one"]["sample"]["20.train.0.0"]
    assert sample["completion"] == HOSTILE
    assert exported_page.count("<script") == 3


def test_the_export_has_every_answer_that_the_page_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rollgraph.view.export.NEWEST_GROUPS", 3)
    folder = write_run(tmp_path / "run", steps=1000)
    for step in range(5):
        write_group(folder, step, 0)
    content = collect_answers(Catalog([folder]))
    run = content["data"]["run"]
    assert run.keys() == {
        "names", "series", "phases", "samples", "sample", "prompts", "prompt", "diagnosis", "machine",
    }  # fmt: skip
    for axis in ("step", "time"):
        assert run["series"][axis]["series"].keys() == {entry["name"] for entry in run["names"]["names"]}
        assert 300 < len(run["series"][axis]["series"]["reward"]["x"]) <= 600
    assert [group["step"] for group in run["samples"]["groups"]] == [4, 3, 2]
    assert "2 are left out" in " ".join(run["samples"]["notes"])
    assert len(run["sample"]) == 3 * 4
    (key,) = run["prompt"]
    assert len(run["prompt"][key]["groups"]) == 5
    assert content["runs"]["runs"][0]["id"] == "run"


def test_compared_prompts_are_exported_for_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export has the most sampled prompts of each run, which may not be the shared ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rollgraph.view.export.PROMPTS", 1)
    monkeypatch.setattr("rollgraph.view.export.SHARED_PROMPTS", 2)
    for name in ("one", "two"):
        folder = write_run(tmp_path / "runs" / name, steps=3)
        for step, group in ((0, 0), (1, 0), (2, 1), (2, 2), (2, 3)):
            write_group(folder, step, group)
    content = collect_answers(Catalog([tmp_path / "runs"]))
    shared = [entry["key"] for entry in content["compare"]["prompts"]]
    assert len(shared) == 2
    for run in content["data"].values():
        assert set(shared) <= run["prompt"].keys()
