"""Safe reading of files that people name, and atomic writing of files that a run produces.

Only regular files are read, because a named pipe would block and a device would never end. Every other problem with a
file raises a `FileError` that names it. A written file appears completely or not at all, and never through a link.
Nothing here knows the purpose of a file. Importing this is instant.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rollgraph.errors import MachineError

MAX_NESTING = 100  # levels of nested lists and objects; code that walks them is recursive
TOO_DEEP = f"lists and objects are nested more than {MAX_NESTING} levels deep"
ESCAPE_SURROGATES = "backslashreplace"  # UTF-8 cannot encode lone surrogates; this handler writes them as JSON escapes
SHELL_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # pipes that the shell opened, so they have a writer
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
_LONG_NUMBER = re.compile(r"[0-9]{4301}")  # Python refuses to convert longer numbers


class FileError(ValueError):
    """A file that cannot be used, described in one line.

    >>> str(FileError("data.jsonl:3", "is not JSON", "Expecting value"))
    'data.jsonl:3: is not JSON: Expecting value'
    """

    def __init__(self, location: str | os.PathLike[str], problem: str, reason: str = "") -> None:
        self.location = str(location)  # the file, or a line of it as file:line
        self.problem = problem
        self.reason = reason
        self.detail = f"{problem}: {reason}" if reason else problem  # everything but the location
        super().__init__(f"{location}: {self.detail}")


class MissingFile(FileError):
    """The file does not exist."""


class DiskFull(MachineError, OSError):
    """No space is left for a file. The message names the file and, if known, the number of missing bytes."""


# -- reading ---------------------------------------------------------------------------------------


def check_regular_file(path: str | os.PathLike[str]) -> Path:
    """The path, if it is a regular file or a link to one, or a pipe that the shell opened; raises otherwise."""
    file_path = Path(check_path(path))
    try:
        mode = file_path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFile(file_path, "cannot be read", "No such file or directory") from None
    except OSError as error:
        raise FileError(file_path, "cannot be read", str(error.strerror)) from None
    if stat.S_ISREG(mode):
        return file_path
    kind = next((name for test, name in _KINDS if test(mode)), "something else")
    if kind != "a folder" and str(file_path).startswith(SHELL_PIPES):
        return file_path
    raise FileError(file_path, f"is {kind}, not a regular file")


def check_path(path: str | os.PathLike[str]) -> str:
    """The path as text; raises if no file can have this path."""
    text = os.fspath(path)
    if "\0" in text:
        raise FileError(f"{text!r:.200}", "a path cannot hold a NUL character")
    return text


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file to read bytes or lines. An `OSError` inside the block becomes a `FileError` about this file."""
    file_path = check_regular_file(path)
    try:
        with file_path.open("rb") as file:
            yield file
    except OSError as error:
        raise FileError(file_path, "cannot be read", error.strerror or str(error)) from None


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a file as UTF-8; line endings are kept."""
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


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object. Any other JSON value raises."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FileError(path, "does not hold a JSON object")
    return value


def parse_json(
    text: str | bytes,
    location: str,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON. `location` is the file that the text came from, or a line of it as file:line."""
    try:
        content = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(content, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise FileError(location, "cannot be read", TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise FileError(location, "is not JSON", str(error)) from None
    except UnicodeDecodeError as error:
        raise FileError(location, "is not JSON", f"not UTF-8, {error}") from None
    except ValueError as error:
        raise FileError(location, "cannot be read", _describe_long_number(content) or str(error)) from None
    if _is_too_deep(content, value):
        raise FileError(location, "cannot be read", TOO_DEEP)
    return value


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """The line number and value of each non-empty line. Duplicate keys of an object raise."""
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse_json(line, f"{path}:{number}", _refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for name, value in pairs:
        if name in entry:
            raise ValueError(f"duplicate key {name!r}")
        entry[name] = value
    return entry


def _describe_long_number(text: str) -> str:
    """A message about a number with thousands of digits; empty if there is none."""
    match = _LONG_NUMBER.search(text)
    if match is None:
        return ""
    if "\n" not in text.rstrip():
        return "a number has more than 4300 digits"
    line = text.count("\n", 0, match.start()) + 1
    return f"the number in line {line} has more than 4300 digits"


def _is_too_deep(text: str, value: Any) -> bool:
    """Whether more than DEEPEST lists and objects are nested; walked level by level, so that any depth is safe."""
    if text.count("[") + text.count("{") <= MAX_NESTING:  # nearly always
        return False
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        next_level: list[Any] = []
        for item in level:
            next_level += item.values() if isinstance(item, dict) else item
        level = next_level
    return True


# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def reporting_full_disk(path: str | os.PathLike[str], size: int) -> Iterator[None]:
    """Use this around writing `size` more bytes to a file. If the disk is full, raises DiskFull."""
    file = Path(path)
    before = _file_size(file)
    try:
        yield
    except Exception as error:
        number = _find_errno(error)
        if number not in _DISK_FULL_ERRNOS:
            raise
        text = f"{file} cannot be written: {os.strerror(number)}"
        with suppress(OSError):
            free = shutil.disk_usage(file.parent).free + _file_size(file) - before  # its new bytes are removed
            if free < size:
                text += f" (it takes {size:,} bytes and {free:,} are free: {size - free:,} are missing)"
        raise DiskFull(text) from error


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _find_errno(error: Exception) -> int:
    """The errno of an error, or 0. Libraries written in Rust report it only in their message."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = _RUST_ERRNO.search(str(error))
    return int(match[1]) if match else 0


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace a file so that it holds either its old content or all of `data`, even after a power failure.

    If the path is a link, the link is replaced and its target does not change.
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
    """Append a line of JSON to a small file atomically. Refuses a link."""
    target = Path(check_path(path))
    with open(open_for_writing(target, os.O_RDWR), "rb") as file:
        before = file.read()
    if before and not before.endswith(b"\n"):
        before += b"\n"
    write_atomically(target, before + f"{line}\n".encode(errors=ESCAPE_SURROGATES))


def write_new(path: Path, data: str | bytes = b"") -> None:
    """Create a file and wait until it is on disk.

    Anything that has its name, such as a link or a file of an interrupted run, is removed first.
    """
    path.unlink(missing_ok=True)
    content = data.encode("utf-8") if isinstance(data, str) else data
    with reporting_full_disk(path, len(content)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)


def open_for_writing(path: Path, flags: int) -> int:
    """Open a file for writing, creating it if necessary; returns its descriptor.

    Refuses anything but a regular file: the target of a link may belong to somebody else.
    """
    extra_flags = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | extra_flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FileError(path, "is a link; links are not written through", "remove it, or write elsewhere") from None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise FileError(path, "is not a regular file", "remove it, or write elsewhere")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
