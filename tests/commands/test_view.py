"""`rollgraph view` and `rollgraph train --view` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rollgraph import cli
from rollgraph.commands import view
from tests.view.synthetic_run import write_group, write_run

needs_packages = pytest.mark.skipif(bool(view.missing_packages()), reason=view.missing_packages())


def ask(address: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{address}api/runs", timeout=20) as answer:
        response: dict[str, object] = json.load(answer)
        return response


@needs_packages
def test_a_page_is_served_until_its_standard_input_ends(tmp_path: Path) -> None:
    """As `rollgraph train --view` starts it: in another process, which does not import PyTorch."""
    folder = write_run(tmp_path / "run", steps=4)
    check = "import sys; from rollgraph.cli import main; code = main(); sys.exit('torch' in sys.modules or code)"
    command = [sys.executable, "-c", check, "view", str(folder), "--until-stdin-ends"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().partition(" ")[0]
        assert address.startswith("http://127.0.0.1:")
        runs = ask(address)["runs"]
        assert isinstance(runs, list)
        assert [(run["id"], run["step"]) for run in runs] == [("run", 3)]
        server.stdin.close()
        assert server.wait(timeout=60) == 0


@needs_packages
def test_a_run_is_shown_while_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with view.dashboard_process(str(tmp_path / "run")):
        address = capsys.readouterr().out.partition(" ")[0]
        assert ask(address)["runs"] == []  # the folder comes with the run
        write_run(tmp_path / "run", steps=2)
        assert len(ask(address)["runs"]) == 1  # type: ignore[arg-type]
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            ask(address)
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError("the server outlived the run")


def test_an_export_needs_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    write_group(folder, 5, 0)
    if not (Path(view.__file__).parents[1] / "view" / "static" / "index.html").is_file():
        pytest.skip("the page is not in this checkout")
    assert cli.main(["view", str(folder), "--export", str(tmp_path / "page.html")]) == 0
    assert "wrote" in capsys.readouterr().out
    assert "rollgraph-export" in (tmp_path / "page.html").read_text()


@needs_packages
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 2, "nowhere is not a folder"),
        (["--host", "0.0.0.0"], 2, "add --token"),
        (["--host", "0.0.0.0", "--token", "."], 2, "not a secret"),  # a folder that came after the option
        (["--host", "256.0.0.1", "--token"], 1, "256.0.0.1"),
        (["--port", "99999"], 1, "127.0.0.1"),
        (["--export", "page.html"], 2, "there is no run in"),
    ],
)
def test_an_invalid_argument_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["view", *words]) == code
    assert message in capsys.readouterr().err


def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(view, "PACKAGES", ("no_such_package",))
    assert cli.main(["view", str(tmp_path)]) == 1
    assert "pip install 'rollgraph[view]'" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(
        "data: {train: nowhere}\nmodel: {path: nowhere}\nreward: {functions: [{name: exact_match}]}\n"
    )
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--view"]) == 2
    assert "pip install 'rollgraph[view]'" in capsys.readouterr().err
