"""`rollgraph init`: write the files of a run to start from. They are in `starters/`, a folder for each."""

from __future__ import annotations

import argparse
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rollgraph.files import FileError, check_path

DONE, FAILED, REFUSED = 0, 1, 2
STARTERS = {
    "quickstart": "a tiny model learns two-digit addition, in a few minutes on a laptop",
    "math": "a model learns to solve word problems as in GSM8K, with answers checked by math-verify",
    "tools": "a model learns to use a calculator, in several turns",
}


def add_to(commands: Any) -> None:
    described = "; ".join(f"{name}: {text}" for name, text in STARTERS.items())
    parser = commands.add_parser(
        "init",
        help="write a config, data and a reward to start from",
        description=f"Write a configuration, data, a reward and a short README into a folder. {described}. "
        f"Exit code: {DONE} if they were written, {FAILED} if they could not be, {REFUSED} if the folder is in use.",
    )
    parser.add_argument("starter", choices=tuple(STARTERS), help="what to start from")
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
    for file in list_files(folder):
        print(f"  {file.relative_to(folder)}")
    first = "trial.yaml" if (folder / "trial.yaml").exists() else "config.yaml"  # a trial is what a CPU can do
    print(f"next: cd {shlex.quote(str(folder))} && rollgraph train {first}")
    return DONE


def write_starter(name: str, folder: Path) -> None:
    """Copy the files of a starter, and let its own script make the data."""
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("rollgraph") / "starters" / name) as source:
        for file in sorted(source.iterdir()):
            if file.is_file():  # not what an installer compiled
                shutil.copyfile(file, folder / file.name)
    runpy.run_path(str(folder / "make_data.py"))["main"](folder / "data")


def list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
