"""Files that people hand to a run, and files that it leaves behind: how they are read, and how they are written.

What is read is a regular file, whatever its name says: a named pipe would block, a device would never end. Whatever
else is wrong with it is one `FileError` that names the file. What is written appears whole or not at all, and never in
a file that a link points to. Nothing here knows what the files are for; importing this is instant.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

DEEPEST = 100  # levels of lists and objects inside each other: whoever walks them calls itself
TOO_DEEP = f"lists and objects stand inside each other more than {DEEPEST} deep"
HANDED_OVER = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # opened by the shell: somebody writes into such a pipe
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_LONG_NUMBER = re.compile(r"[0-9]{4301}")  # which Python does not convert


class FileError(ValueError):
    """A file that cannot be read, in one line: which one or which line of it, what is wrong with it, and why."""

    def __init__(self, place: str | os.PathLike[str], what: str, why: str = "") -> None:
        self.place, self.what, self.why = str(place), what, why
        super().__init__(f"{place}: {what}: {why}" if why else f"{place}: {what}")


class MissingFile(FileError):
    """There is no such file."""


# -- reading ---------------------------------------------------------------------------------------


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path, of which links were followed to something that can be read to its end."""
    found = Path(check_path(path))
    try:
        mode = found.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFile(found, "cannot be read", "No such file or directory") from None
    except OSError as error:
        raise FileError(found, "cannot be read", str(error.strerror)) from None
    if stat.S_ISREG(mode):
        return found
    kind = next((name for test, name in _KINDS if test(mode)), "something else")
    if kind != "a folder" and str(found).startswith(HANDED_OVER):
        return found
    raise FileError(found, f"is {kind}, not a regular file")


def check_path(path: str | os.PathLike[str]) -> str:
    """The path as text; one that no file can have raises."""
    text = os.fspath(path)
    if "\0" in text:
        raise FileError(f"{text!r:.200}", "a path cannot hold a NUL character")
    return text


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to read bytes or lines from; inside, an `OSError` is about it."""
    found = regular_file(path)
    try:
        with found.open("rb") as file:
            yield file
    except OSError as error:
        raise FileError(found, "cannot be read", error.strerror or str(error)) from None


def read_text(path: str | os.PathLike[str]) -> str:
    """UTF-8, with line ends as they are."""
    with open_regular(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(path, "cannot be read", f"line {line} is not UTF-8, {error}") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    with open_regular(path) as file:
        content = file.read()
    return parse_json(content, str(path))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object; anything else raises."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FileError(path, "holds no JSON object")
    return value


def parse_json(
    text: str | bytes,
    place: str,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a text that stands at this place: a file, or a line of one."""
    try:
        content = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(content, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise FileError(place, "cannot be read", TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise FileError(place, "is not JSON", str(error)) from None
    except UnicodeDecodeError as error:
        raise FileError(place, "is not JSON", f"not UTF-8, {error}") from None
    except ValueError as error:
        raise FileError(place, "cannot be read", _long_number(content) or str(error)) from None
    if _is_deep(content, value):
        raise FileError(place, "cannot be read", TOO_DEEP)
    return value


def _long_number(text: str) -> str:
    """What is wrong with a number of thousands of digits, and in which line; empty where there is none."""
    found = _LONG_NUMBER.search(text)
    if found is None:
        return ""
    line = text.count("\n", 0, found.start()) + 1
    return f"the number in line {line} has more than 4300 digits"


def _is_deep(text: str, value: Any) -> bool:
    if text.count("[") + text.count("{") <= DEEPEST:  # so are nearly all lines of data
        return False
    level = [value]
    for _ in range(DEEPEST + 1):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
        level = inside
        if not level:
            return False
    return True


# -- writing ---------------------------------------------------------------------------------------


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """The file has what it had, or all of this, whenever the power fails. A link of that name is replaced, and what
    it points to stays as it is."""
    target = Path(check_path(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.incomplete")
    try:
        write_new(temporary, data)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(target.parent)


def write_new(path: Path, data: str | bytes = b"") -> None:
    """A file that was not there, on the disk. What had its name, such as a link or what an interrupted run left
    behind, is removed and not written into."""
    path.unlink(missing_ok=True)
    content = data.encode("utf-8") if isinstance(data, str) else data
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(handle)


def open_own(path: Path, flags: int) -> int:
    """A descriptor to write with, of a file that is made if it is not there. What has its name and is no regular file
    is refused: what a link points to is somebody else's."""
    more = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | more, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FileError(path, "is a link, and is not written through", "remove it, or write elsewhere") from None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise FileError(path, "is not a regular file", "remove it, or write elsewhere")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
