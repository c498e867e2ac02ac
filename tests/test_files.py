"""Reading files of any kind, and writing files atomically and never through a link."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path

import pytest

from rollgraph.files import (
    MAX_NESTING,
    FileError,
    MissingFile,
    open_regular,
    parse_json,
    read_json,
    read_json_object,
    read_text,
    write_atomically,
    write_new,
)


def test_text_is_read_without_newline_conversion(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é\r\nb\n".encode())
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "link") == "é\r\nb\n"


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "link to a pipe"])
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            monkeypatch.chdir(tmp_path)  # paths of sockets are limited in length
            server.bind("file")
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to("pipe")
        with pytest.raises(FileError, match=rf"^{re.escape(str(path))}: is a .*, not a regular file$"):
            read_text(path)


def test_a_pipe_of_the_shell_is_read() -> None:
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "w") as file:
            file.write("[1]")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert read_json(f"/dev/fd/{reader}") == [1]
    finally:
        thread.join()
        os.close(reader)


def test_impossible_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"a\\x00b.*a path cannot hold a NUL character"):
        read_text(tmp_path / "a\0b")
    with pytest.raises(FileError, match="a path cannot hold a NUL character"):
        write_atomically(tmp_path / "a\0b", "")
    with pytest.raises(MissingFile, match=r"/none: cannot be read: No such file or directory$"):
        read_text(tmp_path / "none")
    with pytest.raises(FileError, match="cannot be read: File name too long"):
        read_text(tmp_path / ("a" * 5000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[" * 100_000, "cannot be read: lists and objects are nested more than 100 levels deep"),
        ("[" * 101 + "1" + "]" * 101, "cannot be read: lists and objects are nested more than 100 levels deep"),
        ('{"a":\n' + "9" * 5000 + "}", "cannot be read: the number in line 2 has more than 4300 digits"),
        (b'{"a": "\xff"}', "is not JSON: not UTF-8, 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_bad_json_is_reported_in_one_line_with_its_location(text: str | bytes, message: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_json(text, "a.json:7")
    assert str(caught.value).startswith(f"a.json:7: {message}")
    assert "\n" not in str(caught.value)


def test_json_may_be_nested_up_to_the_limit() -> None:
    text = "[" * MAX_NESTING + "1" + "]" * MAX_NESTING
    value = parse_json(text, "a.json")
    for _ in range(MAX_NESTING):
        (value,) = value
    assert value == 1
    wide = [[number] for number in range(3 * MAX_NESTING)]
    assert parse_json(str(wide), "a.json") == wide


def test_read_object_refuses_other_values(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(FileError, match=rf"^{re.escape(str(tmp_path))}/a.json: does not hold a JSON object$"):
        read_json_object(tmp_path / "a.json")


def test_an_error_of_utf8_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(FileError, match=rf"^{re.escape(str(tmp_path))}/a: cannot be read: line 2 is not UTF-8"):
        read_text(tmp_path / "a")
    with open_regular(tmp_path / "a") as file:
        assert list(file) == [b"one\n", b"two\xff\n"]


@pytest.mark.parametrize("data", ["new é", b"new \xff"])
def test_writing_replaces_a_link_and_not_its_target(tmp_path: Path, data: str | bytes) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "ours").symlink_to("theirs")
    write_atomically(tmp_path / "ours", data)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "ours").is_symlink()
    assert (tmp_path / "ours").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    write_new(tmp_path / "ours", "again")
    assert (tmp_path / "ours").read_text() == "again"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("")
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "new")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "inside"]


def test_an_atomic_write_has_the_usual_file_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "ours", "new")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode
