"""The wheel: its metadata, its files, and starters that train outside the repository."""

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

from tests.test_guides import PYTHON, write_program

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=[\"']([^\"']+)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because a build leaves files in its source folder. Nothing is downloaded."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"  # what pip calls
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=600)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", str(folder), str(wheel))
    return folder


def pip(command: str, *arguments: str) -> None:
    words = [sys.executable, "-m", "pip", command, "--quiet", "--no-index", "--no-deps", *arguments]
    subprocess.run(words, check=True, timeout=600)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_description_has_no_relative_links(wheel: Path) -> None:
    description = str(metadata_of(wheel).get_payload())
    links = [markdown or html for markdown, html in LINK.findall(description)]
    assert len(links) > 2
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_metadata_has_python_versions_licence_and_urls(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    classifiers = metadata.get_all("Classifier", [])
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert metadata["License-Expression"] == "Apache-2.0"
    names = [entry.partition(",")[0] for entry in metadata.get_all("Project-URL", [])]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(names)


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        contained = set(archive.namelist())
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "rollgraph").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert expected - contained == set()
    assert {"rollgraph/py.typed", "rollgraph/starters/quickstart/config.yaml"} <= expected
    assert any(name.endswith("/LICENSE") for name in contained)


def installation_commands() -> str:
    """The commands of docs/install.md. The doctor exits with 1 if an installed Megatron needs repairs."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(rollgraph --version.*?)```", page, re.DOTALL)
    return block.replace("rollgraph doctor\n", "rollgraph doctor || test $? = 1\n")


TRIAL = """
from train import main
tiny = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp": 64, "max_length": 544}
small = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 32, "rows": 4, "token_buckets": [640]}
main(steps=2, output="run_python", model={"tiny": tiny}, validation_max_prompts=4, **small)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "output"),
    [
        pytest.param(installation_commands(), "trial/run", id="quickstart"),
        pytest.param("rollgraph init math mine && cd mine && rollgraph train trial.yaml", "mine/trial", id="math"),
        pytest.param(f"rollgraph init math mine && cd mine && python -c '{TRIAL}'", "mine/run_python", id="python"),
        pytest.param("rollgraph init tools mine && cd mine && rollgraph train trial.yaml", "mine/trial", id="tools"),
    ],
)
def test_starters_train_from_an_installed_wheel(commands: str, output: str, installed: Path, tmp_path: Path) -> None:
    write_program(tmp_path / "python", PYTHON.format(python=sys.executable))
    path = os.pathsep.join([str(installed / "bin"), str(tmp_path), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", f"python -c 'import rollgraph; print(rollgraph.__file__)'\n{commands}"]
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, text=True, stdout=subprocess.PIPE, timeout=900
    ).stdout
    assert Path(printed.splitlines()[0]) == installed / "rollgraph" / "__init__.py"
    metrics = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == [-1, 0, 1]  # from the untrained model
    assert all("validation/reward" in entry for entry in (metrics[0], metrics[-1]))
    for entry in metrics[1:]:
        assert entry["policy/token_mult_prob_error_max"] == 1.0
        assert entry["failures/unrewarded"] == 0.0
