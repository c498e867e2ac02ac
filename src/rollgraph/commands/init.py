"""`rollgraph init`: write the files of a first run. They come from `starters/`, which has a folder for each."""

from __future__ import annotations

import argparse
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from rollgraph.files import FileError, check_path
from rollgraph.log.streams import command_line

DONE, FAILED, REFUSED = 0, 1, 2


class Starter(NamedTuple):
    """One choice of `rollgraph init`."""

    purpose: str
    config_file: str  # the configuration to run first; a CPU can run it
    extra: str | None = None  # the extra of rollgraph that this configuration needs


STARTERS = {
    "quickstart": Starter("a tiny model learns two-digit addition, in a minute or two on a laptop", "config.yaml"),
    "math": Starter(
        "a model learns to solve word problems as in GSM8K, with answers checked by math-verify", "trial.yaml", "math"
    ),
    "tools": Starter("a model learns to use a calculator, in several turns", "trial.yaml"),
}


def add_parser(commands: Any) -> None:
    choices = "; ".join(f"{name}: {starter.purpose}" for name, starter in STARTERS.items())
    parser = commands.add_parser(
        "init",
        help="write a config, data and a reward to start from",
        description=f"Write a configuration, data, a reward and a short README into a folder. {choices}. "
        f"Exit code: {DONE} if the files were written, {FAILED} if they could not be, {REFUSED} if the folder is not "
        "empty or cannot be used.",
    )
    parser.add_argument("starter", choices=tuple(STARTERS), help="the example to start from")
    parser.add_argument("folder", metavar="DIR", help="folder to write; it must be empty or not exist")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        folder = Path(check_path(options.folder))
        if folder.exists() and any(folder.iterdir()):
            problem = "is not empty, and nothing is overwritten; choose another folder"
            print(f"rollgraph init: {folder}: {problem}", file=sys.stderr)
            return REFUSED
        write_starter(options.starter, folder)
    except FileError as error:
        print(f"rollgraph init: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"rollgraph init: {error.filename or options.folder}: {error.strerror}", file=sys.stderr)
        return FAILED
    print(f"wrote to {folder}:")
    for file in list_starter_files(folder):
        print(f"  {file.relative_to(folder)}")
    print(f"next: {' && '.join(_next_commands(STARTERS[options.starter], folder))}")
    return DONE


def _next_commands(starter: Starter, folder: Path) -> Iterator[str]:
    yield f"cd {shlex.quote(str(folder))}"
    if starter.extra is not None:
        yield command_line("pip", "install", f"rollgraph[{starter.extra}]")
    yield command_line("rollgraph", "train", starter.config_file)


def write_starter(name: str, folder: Path) -> None:
    """Copy the files of a starter, then run its script that makes the data."""
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("rollgraph") / "starters" / name) as source:
        for file in sorted(source.iterdir()):
            if file.is_file():  # skips the folder of compiled files that an installer may make
                shutil.copyfile(file, folder / file.name)
    runpy.run_path(str(folder / "make_data.py"))["main"](folder / "data")


def list_starter_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
