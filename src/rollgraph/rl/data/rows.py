"""Rows of data, read from .jsonl or .parquet files or made in Python, and checked one by one.

Owns the types that a row may hold. Columns become JSON types, because they travel to other ranks and into checkpoints.
"""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollgraph.errors import InvalidInput
from rollgraph.files import FileError, MissingFile, check_regular_file, read_json_lines
from rollgraph.rl.paths import import_extra
from rollgraph.rl.rewards.arguments import STANDARD_ARGUMENTS
from rollgraph.tokenizer import Message


class DataError(InvalidInput):
    """A file or a row that cannot be used; `location` is the file, or file:line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the data: a prompt, which is text or a chat, and all other columns.

    >>> Row("7+", {"answer": "42"}, "train.jsonl:3")
    """

    prompt: str | list[Message]
    columns: Mapping[str, Any]
    location: str  # file:line, for messages


def load_rows(*paths: str | os.PathLike[str]) -> list[Row]:
    """Read rows from .jsonl files, with one object per line, or .parquet files, one file after the other."""
    rows: list[Row] = []
    for path in paths:
        rows += _load_file(path)
    return rows


def _load_file(path: str | os.PathLike[str]) -> list[Row]:
    file = Path(path)
    if file.suffix not in READERS:
        detail = "expected a .jsonl file, with one JSON object per line, or a .parquet file"
        raise DataError(detail, location=str(file))
    try:
        check_regular_file(file)
    except MissingFile:
        raise DataError("no such file", location=str(file)) from None
    except FileError as error:
        raise DataError(error.detail, location=error.location) from None
    rows = [_make_row(entry, f"{file}:{line}") for line, entry in READERS[file.suffix](file)]
    if not rows:
        raise DataError("has no rows", location=str(file))
    return rows


def make_rows(entries: Iterable[Mapping[str, Any]], name: str = "row") -> list[Row]:
    """Make rows from dicts as a file has them: {"prompt": ..., "answer": ...}."""
    return [_make_row(entry, f"{name}:{line}") for line, entry in enumerate(entries, 1)]


def read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) for each nonempty line: JSON in UTF-8, without duplicate keys."""
    try:
        yield from read_json_lines(file)
    except FileError as error:
        raise DataError(error.detail, location=error.location) from error


def _read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    parquet = import_extra("pyarrow.parquet", extra="parquet")
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for entry in batch.to_pylist():
                number += 1
                yield number, entry
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise DataError(f"cannot be read as Parquet ({error})", location=str(file)) from error


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": _read_parquet,
}


def _make_row(entry: Any, location: str) -> Row:
    if not isinstance(entry, Mapping):
        raise DataError(f"expected an object with a 'prompt', got a {type(entry).__name__}", location=location)
    for name in STANDARD_ARGUMENTS:
        if name in entry:
            detail = f"the column {name!r} has the name of an argument that every reward function gets; rename it"
            raise DataError(detail, location=location)
    source = _find_prompt(entry, location)
    prompt = entry[source]
    if isinstance(prompt, np.ndarray | tuple):  # lists from Parquet through pandas
        prompt = _to_plain(prompt, source, location)
    if source == "prompt" and not isinstance(prompt, list) and not (is_text(prompt) and prompt):
        raise DataError(f"'prompt' must be text or a list of messages, got {prompt!r:.80}", location=location)
    if (source == "messages" or isinstance(prompt, list)) and not is_chat(prompt):
        detail = f"'{source}' must be a list of {{role, content}}, both text, got {prompt!r:.80}"
        raise DataError(detail, location=location)
    columns = {}
    for name, value in entry.items():
        if not isinstance(name, str):
            raise DataError(f"the name of a column must be text, got {name!r:.80}", location=location)
        if name not in ("prompt", "messages"):
            columns[name] = _to_plain(value, name, location)
    return Row(prompt, columns, location)


def _find_prompt(entry: Mapping[str, Any], location: str) -> str:
    """The name of the column with the prompt. Parquet has nulls for missing columns."""
    present = [name for name in ("prompt", "messages") if name in entry]
    non_null = [name for name in present if entry[name] is not None]
    if len(non_null) > 1:
        raise DataError("expected either 'prompt' or 'messages', got both", location=location)
    if not present:
        columns = ", ".join(map(repr, entry)) or "nothing"
        raise DataError(f"expected either 'prompt' or 'messages', got {columns}", location=location)
    return non_null[0] if non_null else present[0]


def _to_plain(value: Any, name: str, location: str) -> Any:
    """The value as JSON types, as if it had been written to JSON and read again."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "M":  # dates and times
            value = value.astype(str)
        value = value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_to_plain(inner, name, location) for inner in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _to_plain(inner, f"{name}.{key}", location) for key, inner in value.items()}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    kind = type(value).__name__
    detail = f"the column {name!r} holds {kind} ({value!r:.40}); convert it to text or numbers, or leave it out"
    raise DataError(detail, location=location)


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages, each with a role and a content."""
    return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and is_text(value.get("role")) and is_text(value.get("content"))


def is_text(value: Any) -> bool:
    """Whether a value is a string that can be encoded: JSON can hold half of a surrogate pair, which has no tokens."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
