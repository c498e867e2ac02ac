"""Files of JSON lines that grow step by step, and lose what a resumed run will write again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rollgraph.files import SURROGATES, open_own, write_new

Note = Callable[[str], None]
MAX_REPORTED = 5  # damaged lines of a file that are shown; of the others, only their number


def tell(text: str) -> None:
    print(text, file=sys.stderr)


def open_to_append(path: Path) -> IO[str]:
    """Open a file that grows line by line. A link is refused, because what it points to belongs to somebody else."""
    return open(open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8", errors=SURROGATES)


def truncate_jsonl(path: Path, step: int, note: Note = tell) -> int:
    """Remove the lines of steps after `step`, and damaged lines; return how many lines that were.

    Damaged lines are reported by number: the last one was torn by a crash, others by a failing disk. The file is
    replaced atomically, so after a crash in here it is either the old one or the new one.
    """
    if not path.exists():
        return 0
    open_to_append(path).close()  # refuses a link
    dropped = 0
    damaged: list[str] = []
    temporary = path.with_name(f".{path.name}.tmp")
    write_new(temporary)
    # Read bytes, because a torn line may end inside a character.
    with path.open("rb") as old, temporary.open("r+b") as new:
        for number, line in enumerate(old, start=1):
            found = _step_of(line)
            if found is not None and found <= step:
                new.write(line)
                continue
            dropped += 1
            if found is None:
                damaged.append(f"{path}:{number}: {_described(line)}")
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)
    for text in damaged[:MAX_REPORTED]:
        note(text)
    if len(damaged) > MAX_REPORTED:
        note(f"{path}: {len(damaged) - MAX_REPORTED} more damaged lines were removed")
    return dropped


def _step_of(line: bytes) -> int | None:
    """The step of a line, or None if the line does not hold one."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _described(line: bytes) -> str:
    """What is wrong with a line that is removed, and how it begins."""
    what = "this line is damaged" if line.endswith(b"\n") else "the last line was cut off"
    text = line.decode("utf-8", "backslashreplace").strip()
    more = " and so on" if len(text) > 100 else ""
    return f"{what}, and was removed: {text[:100]!r}{more}"
