"""`rollgraph view`: a dashboard of runs, in a browser."""

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


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "view",
        help="look at runs in a browser",
        description="Serve a dashboard of the runs in these folders: curves, samples, graphs and possible problems. "
        "It is updated while runs are going on. It reads nothing but these folders. "
        f"Exit code: {DONE} when it is stopped or has written a file, {FAILED} if it cannot be served or written, "
        f"{WRONG} if an argument is wrong.",
    )
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="folder of a run, or a folder with runs in it (default: runs, or .)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, help="port to listen on (default: the first free port from 7117 on)")
    parser.add_argument(
        "--token",
        nargs="?",
        const="",
        help="require this secret, or a random one if TOKEN is omitted; needed if other machines can connect",
    )
    parser.add_argument("--export", metavar="FILE", help="write the dashboard as one page without a server, and exit")
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)  # for `train --view`
    parser.set_defaults(run=run)


def missing_packages() -> str:
    """A message that names the missing packages. Empty if the dashboard can be served."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed: pip install 'rollgraph[view]'" if missing else ""


def run(options: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in options.folders] or [Path("runs") if Path("runs").is_dir() else Path()]
    for folder in folders:
        if not folder.is_dir() and not options.until_stdin_ends:  # with `train --view`, the run makes its folder later
            print(f"rollgraph view: {folder} is not a folder", file=sys.stderr)
            return WRONG
    if options.export is not None:
        return _export(folders, options)
    if problem := missing_packages():
        print(f"rollgraph view: {problem}", file=sys.stderr)
        return FAILED
    return _serve(folders, options)


def _export(folders: list[Path], options: argparse.Namespace) -> int:
    from rollgraph.view.export import write_export
    from rollgraph.view.runs import Catalog

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
    from rollgraph.view.server import Access, access_url, is_local, open_listener, serve_dashboard

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
        listener = open_listener(options.host, options.port)
    except (OSError, OverflowError) as error:
        address = options.host if options.port is None else f"{options.host}, port {options.port}"
        print(f"rollgraph view: {address}: {error}", file=sys.stderr)
        return FAILED
    access = Access(options.host, listener.getsockname()[1], token or "")
    stop_pipe = sys.stdin.buffer if options.until_stdin_ends else None
    lifetime = "while the run goes on" if stop_pipe else "Ctrl-C ends it"
    print(f"{access_url(access)} shows {', '.join(map(str, folders))} ({lifetime})", flush=True)
    serve_dashboard(folders, access, listener, stop_pipe)
    return DONE


@contextmanager
def dashboard_process(folder: str) -> Iterator[None]:
    """Serve the dashboard of a run in another process.

    The server ends when its pipe closes, so it ends with this process, even if that is killed.
    """
    command = [sys.executable, "-m", "rollgraph", "view", "--until-stdin-ends", "--", folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        print(server.stdout.readline(), end="", flush=True)  # its address; empty if it failed and printed an error
        try:
            yield
        finally:
            server.stdin.close()
