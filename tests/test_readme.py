"""The README's tour names files that exist, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_named_files_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:src|examples|benchmarks|docs|tests)/[\w/.-]+)`", text) + re.findall(
        r"\]\(([\w/.-]+)\)", text
    )
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
