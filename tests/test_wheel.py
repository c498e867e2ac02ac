"""The wheel: what it says about the package, what it contains, and that its starters train outside the repository."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=[\"']([^\"']+)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a copy, because a build leaves files in its source folder. Nothing is downloaded."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    (found,) = (folder / "dist").glob("*.whl")
    return found


def pip(command: str, *arguments: str) -> None:
    words = [sys.executable, "-m", "pip", command, "--quiet", "--no-index", "--no-deps", *arguments]
    subprocess.run(words, check=True, timeout=600)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_description_has_no_link_that_breaks_outside_the_repository(wheel: Path) -> None:
    description = str(metadata_of(wheel).get_payload())
    links = [markdown or html for markdown, html in LINK.findall(description)]
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_metadata_names_versions_of_python_and_where_to_find_more(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    classifiers = metadata.get_all("Classifier", [])
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert metadata["License-Expression"] == "Apache-2.0"
    names = [entry.partition(",")[0] for entry in metadata.get_all("Project-URL", [])]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(names)


def test_the_wheel_has_types_the_licence_and_every_file_of_the_starters(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        contained = set(archive.namelist())
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "rollgraph").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert wanted - contained == set()
    assert {"rollgraph/py.typed", "rollgraph/starters/quickstart/config.yaml"} <= wanted
    assert any(name.endswith("/LICENSE") for name in contained)


QUICK = "steps=2 warm_start.steps=2 warm_start.check_every=2 validation.max_prompts=8 checkpoint.export_at_end=false"
TRAINED = {
    "quickstart": (f"rollgraph train config.yaml {QUICK}", "run"),
    "math": ("rollgraph train trial.yaml", "trial"),
    "tools": ("rollgraph train trial.yaml", "trial"),
}


@pytest.mark.slow
def test_starters_train_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--target", str(tmp_path / "site"), str(wheel))
    path = os.pathsep.join([str(tmp_path / "site" / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PATH": path}

    def run(command: str) -> str:
        return subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=900,
        ).stdout

    where = run(f'"{sys.executable}" -c "import rollgraph; print(rollgraph.__file__)"')
    assert Path(where.strip()) == tmp_path / "site" / "rollgraph" / "__init__.py"
    for name, (command, output) in TRAINED.items():
        run(f"rollgraph init {name} {name}")
        run(f"cd {name} && {command}")
        lines = (tmp_path / name / output / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        assert [entry["step"] for entry in metrics] == [0, 1]
        assert all(entry["token_mult_prob_error_max"] == 1.0 for entry in metrics)
        assert "before/validation/reward" in metrics[0]
        assert metrics[0].get("unrewarded") == 0.0
