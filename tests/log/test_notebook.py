"""The progress display in the kernel of a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollgraph
from rollgraph.log.live_display import make_display

RUN_CELL = """
from rollgraph.log import make_display
with make_display("auto", 100) as view:
    for done in range(500):
        view.phase("capture for training", done, 500, "train 4096")
    view.end_phase()
    view.note("a [note] that stays")
    for step in range(100):
        view.phase("train", 8, 8)
        view.step(step, {"reward": 0.01 * step}, {"train": 1.0})
"""


def run_notebook(source: str) -> list[dict[str, Any]]:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs: list[dict[str, Any]] = notebook.cells[0].outputs
    return outputs


@pytest.mark.slow
def test_a_notebook_updates_one_panel_and_shows_notes_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(Path(rollgraph.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, *sys.path]))
    picture, note = run_notebook(RUN_CELL)
    assert note["text"] == "a [note] that stays\n"
    text = picture["data"]["text/plain"]
    assert "100/100" in text
    assert "reward 0.99" in text
    assert "capture" not in text
    assert picture["data"]["text/html"].startswith("<pre")
    assert "\x1b" not in text + picture["data"]["text/html"]


def test_ipython_outside_of_a_kernel_is_no_notebook() -> None:
    """The module may be imported anywhere, and a shell in a terminal has no outputs to update."""
    pytest.importorskip("IPython")
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance()\n"
        "from rollgraph.log import make_display\n"
        "print(type(make_display('auto', 1)).__name__)\n"
    )
    source = Path(rollgraph.__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=source, text=True) == "PlainDisplay\n"


def test_a_kernel_is_recognised_by_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        pass

    class ColabShell(ZMQInteractiveShell):
        pass

    class IPython:
        @staticmethod
        def get_ipython() -> object:
            return ColabShell()

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert type(make_display("auto", 1)).__name__ == "NotebookDisplay"
    assert type(make_display("plain", 1)).__name__ == "PlainDisplay"
