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

from rollgraph.commands import check, config, doctor, eval, export, generate, init, plan, samples, train, view
from rollgraph.commands.arguments import collect_overrides, explain_dashed_keys
from rollgraph.log.streams import survive_closed_terminal


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        with survive_closed_terminal():
            try:
                return _run(sys.argv[1:] if arguments is None else arguments)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        for stream in (sys.stdout, sys.stderr):
            _discard_unread_output(stream)
        return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rollgraph", description="Post-train language models on captured graphs.")
    parser.add_argument("--version", action="version", version=f"rollgraph {sys.modules['rollgraph'].__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for command in (init, train, eval, export, samples, view, generate, plan, config, check, doctor):
        command.add_parser(commands)
    options, unknown_arguments = parser.parse_known_args(arguments)
    if problem := explain_dashed_keys(options, unknown_arguments, arguments):
        print(f"rollgraph {options.command}: {problem}", file=sys.stderr)
        return 2
    unrecognized = collect_overrides(options, unknown_arguments)
    if unrecognized:
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    exit_code: int = options.run(options)
    return exit_code


def _discard_unread_output(stream: TextIO) -> None:
    """Discard buffered output that nobody reads: otherwise Python reports an error at exit."""
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
