"""Suggested commands can be pasted into the shell that started rollgraph."""

from __future__ import annotations

import shutil
import sys

import pytest

from rollgraph.log.streams import command_line


def test_a_suggested_command_starts_rollgraph_as_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: f"/somewhere/{program}")
    monkeypatch.setattr(sys, "argv", ["/somewhere/rollgraph", "train"])
    assert command_line("rollgraph", "samples", "my run") == "rollgraph samples 'my run'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/rollgraph/__main__.py"])
    assert command_line("pip", "install", "it") == f"{sys.executable} -m pip install it"
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(sys, "argv", ["/elsewhere/rollgraph", "train"])
    assert command_line("rollgraph", "samples") == f"{sys.executable} -m rollgraph samples"
