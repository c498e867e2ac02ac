"""Lines of a file that another process is writing: the complete ones, each read once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollgraph.files import FileError, parse_json

BLOCK = 1 << 18  # bytes of one read


@dataclass
class Work:
    """What was done to answer, in units that do not depend on the machine."""

    bytes_read: int = 0
    lines_parsed: int = 0


class Line(NamedTuple):
    offset: int  # of its first byte
    content: bytes  # with its line end


def complete_lines(path: Path, offset: int, limit: int, work: Work) -> Iterator[Line]:
    """The lines from `offset` on whose end has been written, until `limit` bytes have been read.

    A line that is longer than the limit is given all the same. The last line of a file may be half written: it is
    left for the next time.
    """
    unfinished: list[bytes] = []  # blocks of a line whose end has not come
    taken = 0
    with path.open("rb") as file:
        file.seek(offset)
        while taken < limit or unfinished:
            block = file.read(BLOCK)
            if not block:
                return
            taken += len(block)
            work.bytes_read += len(block)
            whole, end, rest = block.rpartition(b"\n")
            if not end:
                unfinished.append(block)
                continue
            for content in b"".join([*unfinished, whole]).split(b"\n"):
                line = Line(offset, content + b"\n")
                offset += len(line.content)
                yield line
            if taken >= limit:
                return
            unfinished = [rest] if rest else []


def read_range(path: Path, offset: int, length: int, work: Work) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    work.bytes_read += len(content)
    return content


def finite(value: Any) -> float:
    """A number of a record; NaN for anything else, also for what is too large or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:  # a whole number with hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan


def parse_object(content: bytes, work: Work) -> dict[str, Any] | None:
    """The JSON object of a line, or None if it does not hold one."""
    work.lines_parsed += 1
    try:
        value = parse_json(content, "")
    except FileError:  # not JSON, not UTF-8, or nested too deeply
        return None
    return value if isinstance(value, dict) else None
