"""Files, links, functions and settings that the README and other pages name exist."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from rollgraph.config import load_config

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "rollgraph"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples")),
    *(ROOT / "docs").glob("*.md"),
]
NAMED_FILE = re.compile(r"`((?:src|examples|benchmarks|docs|tests)/[\w/.-]+)`")
LINK = re.compile(r"\]\(([\w/.-]+)(#[\w-]+)?\)")
# `policy/microbatch.py`, `pack_samples` and `lay_out`
NAMED_FUNCTION = re.compile(r"`([\w/]+\.py)`, `([\w.]+)`(?: (?:and|or) `([\w.]+)`)?")


def test_named_files_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = NAMED_FILE.findall(text) + [link for link, _ in LINK.findall(text)]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_names_existing_files_and_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = NAMED_FILE.findall(text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - {link for link, _ in LINK.findall(text)} == set()


def test_the_reading_order_has_twelve_short_files_without_private_imports() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    order = re.findall(r"^\d+\. `(src/\S+\.py)`", text, re.MULTILINE)
    assert len(order) == len(set(order)) == 12
    for name in order:
        source = (ROOT / name).read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 300, name
        imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        assert [alias.name for node in imported for alias in node.names if alias.name.startswith("_")] == [], name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [link for link, _ in LINK.findall(text) if not (page.parent / link).exists()] == []
    for link, anchor in [*LINK.findall(text), *(("", local) for local in re.findall(r"\]\((#[\w-]+)\)", text))]:
        if anchor:
            target = page.parent / link if link else page
            assert anchor in anchors(target), f"{link}{anchor}"


def test_the_configuration_in_the_readme_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "my.yaml"
    path.write_text(block)
    assert load_config(path).algorithm.name == "grpo"


def test_the_path_of_a_prompt_names_existing_functions() -> None:
    text = (ROOT / "docs" / "prompt_path.md").read_text(encoding="utf-8")
    matches = NAMED_FUNCTION.findall(text)
    assert len(matches) > 20
    named = [(file, name) for file, *names in matches for name in names if name]
    assert [(file, name) for file, name in named if name not in definitions(SOURCE / file)] == []


def test_the_readme_begins_with_a_clone_and_existing_targets() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    clone, *targets = runpy.run_path(str(ROOT / "tools" / "try_readme.py"))["commands_of"](readme)[:4]
    assert clone.startswith("git clone ")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [target for target in targets if f"\n{target.removeprefix('make ')}: " not in makefile] == []


def test_links_and_pictures_of_the_readme_work_in_a_checkout() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    outside = re.findall(r"\]\((https?://[^)]+)\)", readme)
    assert [link for link in outside if "rollgraph" in link] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert len(pictures) == 2
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_program_in_the_readme_is_the_example() -> None:
    (program, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert (ROOT / "examples" / "shout.py").read_text(encoding="utf-8").endswith(program)


def test_pages_and_metadata_name_the_same_python_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tested_versions = re.findall(
        r"^\| (3\.\d+) \|", (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    classifiers = [entry.rpartition(" ")[2] for entry in project["classifiers"] if ":: Python :: 3." in entry]
    assert sorted(set(tested_versions)) == classifiers
    last = int(classifiers[-1].partition(".")[2])
    assert project["requires-python"] == f">={classifiers[0]},<3.{last + 1}"
    for page in ("README.md", "CONTRIBUTING.md", "docs/install.md"):
        assert f"Python {classifiers[0]} to {classifiers[-1]}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_changelog_follows_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", version) for version in versions[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for version in versions:
        assert f"\n{version.partition(' ')[0]}: https://" in text


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def definitions(file: Path) -> set[str]:
    """The functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names
