"""Reading files that people hand to a run, and writing files that a run leaves behind.

Only regular files are read, because a named pipe would block and a device would never end. Anything else that is wrong
with a file is a `FileError` that names it. A written file appears whole or not at all, and never through a link.
Nothing here knows what the files are for. Importing this is instant.
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

DEEPEST = 100  # levels of nested lists and objects: code that walks them is recursive
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} levels deep"
SURROGATES = "backslashreplace"  # UTF-8 has no halves of surrogate pairs; these errors write them as JSON escapes them
HANDED_OVER = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # pipes that the shell opened, so that they have a writer
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_LONG_NUMBER = re.compile(r"[0-9]{4301}")  # Python refuses to convert these


class FileError(ValueError):
    """A file that cannot be used, described in one line."""

    def __init__(self, place: str | os.PathLike[str], what: str, why: str = "") -> None:
        self.place = str(place)  # the file, or one line of it as file:line
        self.what = what
        self.why = why
        self.detail = f"{what}: {why}" if why else what  # everything but the place
        super().__init__(f"{place}: {self.detail}")


class MissingFile(FileError):
    """The file does not exist."""


# -- reading ---------------------------------------------------------------------------------------


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path, if it leads, through links or not, to a file that can be read to its end; raises otherwise."""
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
    """The path as text; raises if no file can have it."""
    text = os.fspath(path)
    if "\0" in text:
        raise FileError(f"{text!r:.200}", "a path cannot hold a NUL character")
    return text


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file to read bytes or lines; an `OSError` raised inside the block is reported as one about this file."""
    found = regular_file(path)
    try:
        with found.open("rb") as file:
            yield file
    except OSError as error:
        raise FileError(found, "cannot be read", error.strerror or str(error)) from None


def read_text(path: str | os.PathLike[str]) -> str:
    """Decode a file as UTF-8; line ends are kept as they are."""
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
    """Read a JSON object; any other JSON value raises."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FileError(path, "does not hold a JSON object")
    return value


def parse_json(
    text: str | bytes,
    place: str,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON; `place` names the file, or the line of one, that the text came from."""
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


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """The number and the value of each line that is not empty. A key that an object gives twice is an error."""
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse_json(line, f"{path}:{number}", _refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for name, value in pairs:
        if name in entry:
            raise ValueError(f"the key {name!r} is given twice")
        entry[name] = value
    return entry


def _long_number(text: str) -> str:
    """What to say about a number with thousands of digits; empty if there is none."""
    found = _LONG_NUMBER.search(text)
    if found is None:
        return ""
    if "\n" not in text.rstrip():
        return "a number has more than 4300 digits"
    line = text.count("\n", 0, found.start()) + 1
    return f"the number in line {line} has more than 4300 digits"


def _is_deep(text: str, value: Any) -> bool:
    """Whether more than DEEPEST lists and objects are nested; walked level by level, so that any depth is safe."""
    if text.count("[") + text.count("{") <= DEEPEST:  # true of nearly all lines of data
        return False
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        inside: list[Any] = []
        for item in level:
            inside += item.values() if isinstance(item, dict) else item
        level = inside
    return True


# -- writing ---------------------------------------------------------------------------------------


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace a file so that it holds either its old content or all of `data`, even if the power fails.

    If the path is a link, the link is replaced and the file it points to stays as it is.
    """
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


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Add a line of JSON to a small file: it holds either its old lines or these and the new one. A link is refused."""
    target = Path(check_path(path))
    with open(open_own(target, os.O_RDWR), "rb") as file:
        before = file.read()
    if before and not before.endswith(b"\n"):
        before += b"\n"
    write_atomically(target, before + f"{line}\n".encode(errors=SURROGATES))


def write_new(path: Path, data: str | bytes = b"") -> None:
    """Create a file and wait until it is on the disk.

    Whatever had its name, such as a link or what an interrupted run left behind, is removed rather than written into.
    """
    path.unlink(missing_ok=True)
    content = data.encode("utf-8") if isinstance(data, str) else data
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(handle)


def open_own(path: Path, flags: int) -> int:
    """A descriptor for writing to a file, which is created if it does not exist.

    Anything but a regular file is refused: the target of a link belongs to somebody else.
    """
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
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
