"""`rollgraph view`: look at runs in a browser."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollgraph.files import FileError, check_path

DONE, FAILED, WRONG = 0, 1, 2
PACKAGES = ("starlette", "uvicorn")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "view",
        help="look at runs in a browser",
        description="Serve a page that shows the runs in these folders: their curves, samples, graphs and what seems "
        "to be wrong with them. It follows runs that are still going on, and reads nothing else. "
        f"Exit code: {DONE} when it is stopped or has written a file, {FAILED} if it cannot be served or written, "
        f"{WRONG} if an argument is wrong.",
    )
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="*", help="folder of a run, or one that has runs in it (default: runs, or .)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, help="port to listen at (default: the first free one from 7117 on)")
    parser.add_argument(
        "--token",
        nargs="?",
        const="",
        help="ask everybody for this secret, or for one that is made up; needed where other machines can connect",
    )
    parser.add_argument("--export", metavar="FILE", help="write a page that needs no server to this file, and end")
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)  # for `train --view`
    parser.set_defaults(run=run)


def missing_packages() -> str:
    """What to install before a page can be served; empty if nothing is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed: pip install 'rollgraph[view]'" if missing else ""


def run(options: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in options.folders] or [Path("runs") if Path("runs").is_dir() else Path()]
    for folder in folders:
        if not folder.is_dir() and not options.until_stdin_ends:  # a run makes its folder when it begins
            print(f"rollgraph view: {folder} is not a folder", file=sys.stderr)
            return WRONG
    if options.export is not None:
        return _export(folders, options)
    if problem := missing_packages():
        print(f"rollgraph view: {problem}", file=sys.stderr)
        return FAILED
    return _serve(folders, options)


def _export(folders: list[Path], options: argparse.Namespace) -> int:
    from rollgraph.view.catalog import Catalog
    from rollgraph.view.export import write_export

    catalog = Catalog(folders)
    if not catalog.find():
        print(f"rollgraph view: there is no run in {', '.join(map(str, folders))}", file=sys.stderr)
        return WRONG
    try:
        write_export(catalog, Path(check_path(options.export)))
    except (FileError, OSError) as error:
        print(f"rollgraph view: --export {options.export}: {error}", file=sys.stderr)
        return FAILED
    print(f"wrote {options.export}")
    return DONE


def _serve(folders: list[Path], options: argparse.Namespace) -> int:
    from rollgraph.view.safety import Access, is_local
    from rollgraph.view.server import address_of, open_socket, serve

    token = options.token
    if token is None and not is_local(options.host):
        print(
            f"rollgraph view: --host {options.host}: other machines could read these runs; add --token", file=sys.stderr
        )
        return WRONG
    if token == "":
        token = secrets.token_urlsafe(18)
    if token is not None and os.path.exists(token):
        print(
            f"rollgraph view: --token {token}: this is a file or a folder, not a secret; name folders first",
            file=sys.stderr,
        )
        return WRONG
    try:
        listening = open_socket(options.host, options.port)
    except (OSError, OverflowError) as error:
        at = options.host if options.port is None else f"{options.host}, port {options.port}"
        print(f"rollgraph view: {at}: {error}", file=sys.stderr)
        return FAILED
    access = Access(options.host, listening.getsockname()[1], token or "")
    until = sys.stdin.buffer if options.until_stdin_ends else None
    ends = "while the run goes on" if until else "Ctrl-C ends it"
    print(f"{address_of(access)} shows {', '.join(map(str, folders))} ({ends})", flush=True)
    serve(folders, access, listening, until)
    return DONE


@contextmanager
def viewed(folder: str) -> Iterator[None]:
    """Serve the page of a run beside it. The server ends with this process, however that ends: it holds a pipe."""
    command = [sys.executable, "-m", "rollgraph", "view", "--until-stdin-ends", "--", folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        print(server.stdout.readline(), end="", flush=True)  # its address; nothing if it failed, which it says itself
        try:
            yield
        finally:
            server.stdin.close()
