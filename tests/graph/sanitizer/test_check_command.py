"""`rollgraph check` and ROLLGRAPH_SANITIZE=1, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forked import run_command

ROOT = Path(__file__).parents[3]

TARGETS = """
import torch
from rollgraph.graph import capture
model = torch.nn.Linear(4, 1)

def clean():
    print("building")
    return model, lambda x: model(x).sum().detach(), (torch.randn(3, 4),)

def module():
    return model, (torch.randn(3, 4),)

def dirty():
    return (lambda x: x * x.sum().item()), torch.randn(3)

def itself():
    capture(lambda x: x + 1, (torch.zeros(2),))(torch.zeros(2))

def broken():
    return (lambda x: x @ x), torch.randn(3, 4)

def wrong():
    return 3

def raising():
    raise OSError("no such model")

def nothing():
    pass

def itself_and_fails():
    capture(lambda x: x * x.sum().item(), (torch.zeros(2),))

def itself_and_misuses():
    g = capture(lambda x: x + 1, (torch.zeros(2),))
    g(torch.zeros(3))

def leaving():
    raise SystemExit(0)

def offsets():
    weight = torch.randn(10, 3)
    bag = lambda x, o: torch.nn.functional.embedding_bag(x, weight, o, mode="sum")
    return bag, (torch.arange(6), torch.tensor([0, 3]))
"""


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=900
    )


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "targets.py").write_text(TARGETS)
    return folder


@pytest.fixture(scope="module")
def odd_targets(targets: Path) -> Path:
    """A file with the name of a module that exists, and one that imports from its package."""
    folder = targets / "odd"
    (folder / "package").mkdir(parents=True)
    (folder / "random.py").write_text(TARGETS)
    (folder / "package/__init__.py").touch()
    (folder / "package/targets.py").write_text(TARGETS)
    (folder / "package/inner.py").write_text("from .targets import module")
    return folder


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("targets:clean", 0, "clean: 1 graph"),
        ("targets.py:module", 0, "clean: 1 graph"),
        ("targets:itself", 0, "clean: 1 graph"),
        ("targets:itself_and_fails", 1, "host-read"),
        ("targets:itself_and_misuses", 1, "mismatch"),
        ("targets:dirty", 1, "host-read"),
        ("targets:broken", 2, "the function itself fails"),
        ("targets:wrong", 2, "returned a value of type int"),
        ("targets:raising", 2, "OSError: no such model"),
        ("targets:nothing", 2, "captured nothing"),
        ("targets:leaving", 2, "sys.exit(0)"),
        ("targets:offsets", 0, "clean: 1 graph"),
        ("random.py:module", 0, "clean: 1 graph"),
        ("package/inner.py:module", 0, "clean: 1 graph"),
        ("missing.py:module", 2, "no such file"),
        ("targets:missing", 2, "no function 'missing'"),
        ("absent:f", 2, "cannot import absent"),
        ("targets", 2, "expected package.module:function"),
    ],
)
def test_check_prints_the_result_and_exits_with_its_code(
    targets: Path, odd_targets: Path, tmp_path: Path, target: str, code: int, message: str
) -> None:
    if target.startswith(("random", "package")):
        target = f"{odd_targets}/{target}"
    done = run_command(targets, tmp_path, "check", target)
    assert done.returncode == code, done.stderr
    assert message in (done.stdout if code < 2 else done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_check_on_cuda_is_refused_without_a_gpu(targets: Path, tmp_path: Path) -> None:
    """Nothing was checked, so there is no finding; the target is not even built."""
    done = run_command(targets, tmp_path, "check", "targets:raising", "--backend", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "rollgraph check: --backend cuda needs a CUDA device, and there is none; use --backend tape\n"


@pytest.mark.slow
def test_check_prints_json(targets: Path, tmp_path: Path) -> None:
    clean = command(targets, "-m", "rollgraph", "check", "--json", "--replays", "2", "targets:clean")
    report = json.loads(clean.stdout)
    assert report["clean"] is True
    assert report["replays"] == 2
    dirty = json.loads(run_command(targets, tmp_path, "check", "--json", "targets:dirty").stdout)
    (finding,) = dirty["findings"]
    assert finding["kind"] == "host-read"
    assert finding["where"]["line"] == 14
    assert {"what", "why", "fix"} <= set(finding)


def test_examples_are_clean(tmp_path: Path) -> None:
    programs = [path for path in sorted((ROOT / "examples").glob("*.py")) if "def build(" in path.read_text()]
    assert programs
    for example in programs:
        done = run_command(ROOT, tmp_path, "check", f"{example.relative_to(ROOT)}:build")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_environment_variable_covers_a_whole_process(targets: Path) -> None:
    script = (
        "import torch; from rollgraph.graph import capture\n"
        "g = capture(lambda x: x * 2, (torch.ones(2),))\n"
        "a = g(torch.ones(2)); b = g(torch.ones(2)); print('sum', (a + b).isnan().all().item())\n"
    )
    done = command(targets, "-c", script, ROLLGRAPH_SANITIZE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum True\n"
    assert done.stderr.count("stale-output: ") == 2  # when it is found, and in the summary
    assert "1 finding" in done.stderr
    script += "m = torch.nn.Linear(2, 2)\nwith torch.no_grad(): h = capture(lambda x: m(x), (torch.ones(1, 2),))\n"
    off = command(targets, "-c", script, ROLLGRAPH_SANITIZE="0")
    assert off.stdout == "sum False\n"
    assert (off.returncode, off.stderr) == (0, "")  # a process that holds captures ends quietly
