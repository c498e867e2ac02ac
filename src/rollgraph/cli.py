"""The `rollgraph` command. Each subcommand is a file in `commands/`.

PyTorch is imported when a subcommand runs, so `--help` is instant.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from rollgraph.commands import check, config, doctor, generate, init, plan, train, view
from rollgraph.commands.config_arguments import find_dashed_keys, sort_words


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
        for stream in (sys.stdout, sys.stderr):
            _forget_unread(stream)
        return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rollgraph", description="Post-train language models on captured graphs.")
    parser.add_argument("--version", action="version", version=f"rollgraph {sys.modules['rollgraph'].__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for command in (init, train, view, generate, plan, config, check, doctor):
        command.add_to(commands)
    options, rest = parser.parse_known_args(arguments)
    if problem := find_dashed_keys(options, rest, arguments):
        print(f"rollgraph {options.command}: {problem}", file=sys.stderr)
        return 2
    unknown = sort_words(options, rest)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    exit_code: int = options.run(options)
    return exit_code


def _forget_unread(stream: TextIO) -> None:
    """Send what a stream still holds nowhere if nobody reads it: Python would complain about it when it exits."""
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
