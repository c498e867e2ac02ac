"""The gallery of the documentation: each program gives the report that is printed there, and its fix is clean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.graph import Findings
from rollgraph.graph.sanitizer.findings import KINDS

ROOT = Path(__file__).parents[3]


def read_preamble(text: str) -> str:
    """The imports that all programs of the gallery share."""
    (preamble,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(preamble)


def read_gallery(text: str) -> dict[str, tuple[str, str, str]]:
    """Title -> (program, report, fixed program). A diff holds both programs."""
    entries = {}
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        (diff,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
        (report,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
        lines = diff.splitlines(keepends=True)
        program = "".join(line[1:] or line for line in lines if not line.startswith("+"))
        fixed = "".join(line[1:] or line for line in lines if not line.startswith("-"))
        entries[title] = (program, report, fixed)
    return entries


GALLERY_PAGE = (ROOT / "docs/sanitizer_gallery.md").read_text()


PREAMBLE = read_preamble(GALLERY_PAGE)


GALLERY = read_gallery(GALLERY_PAGE)


def documented_kinds() -> dict[str, tuple[str, str]]:
    """Kind -> (why, fix), as the documentation's table has them."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \| (.*) \|$", (ROOT / "docs/sanitizer.md").read_text(), re.MULTILINE)
    return {kind: (why, fix) for kind, why, fix in rows}


def complete(report: str) -> str:
    """A report of the gallery with the lines that it leaves out, taken from the table of kinds."""
    why, fix = documented_kinds()[report.partition(":")[0]]
    finding, summary = report.split("\n\n")
    return f"{finding}\n  why:   {why}\n  fix:   {fix}\n\n{summary}"


def run(program: str) -> Findings:
    names: dict[str, Any] = {"__name__": "gallery"}
    exec(PREAMBLE, names)
    exec(compile(program, "program.py", "exec"), names)
    findings = names["findings"]
    assert isinstance(findings, Findings)
    return findings


def test_the_documentation_has_every_kind() -> None:
    assert documented_kinds() == {kind.name: (kind.why, kind.fix) for kind in KINDS.values()}


def test_the_documentation_shows_a_complete_report() -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs/sanitizer.md").read_text(), re.DOTALL)
    assert shown == complete(GALLERY["`.item()` in a loss"][1])


@pytest.mark.parametrize("title", GALLERY)
def test_each_program_gives_its_report_and_its_fix_is_clean(title: str) -> None:
    program, report, fixed = GALLERY[title]
    findings = run(program)
    (marked,) = [i for i, line in enumerate(program.splitlines(), 1) if line.endswith("# <-")]
    assert findings.items[0].where.line == marked
    assert str(findings) + "\n" == complete(report)
    clean = run(fixed)
    assert not len(clean), clean
    assert clean.replays or clean.graphs


def test_the_gallery_has_every_kind_and_the_known_failures_of_the_field() -> None:
    kinds = {report.partition(":")[0] for _, report, _ in GALLERY.values()}
    assert kinds >= {
        "host-read", "escape", "moved", "hook", "constant", "stale-output", "orphan", "generator", "tree", "collective",
        "differs",
    }  # fmt: skip
    titles = " ".join(GALLERY).lower()
    for known in (
        "weak reference",
        "hook that records nothing",
        "graph manager",
        "after the next replay",
        "learning rate",
    ):
        assert known in titles


ON_CUDA = [  # the others name a CPU generator or a CPU tensor
    title
    for title in GALLERY
    if not any(word in title for word in ("generator made", "collective", "differs from eager"))
]


@pytest.mark.gpu
@pytest.mark.parametrize("title", ON_CUDA)
def test_each_program_gives_its_finding_on_cuda_and_its_fix_is_clean(title: str) -> None:
    program, report, fixed = GALLERY[title]
    (marked,) = [i for i, line in enumerate(program.splitlines(), 1) if line.endswith("# <-")]
    with torch.device("cuda"):
        finding = run(program).items[0]
        clean = run(fixed)
    assert (finding.kind, finding.where.line) == (report.partition(":")[0], marked)
    assert not len(clean), clean
    assert clean.graphs
