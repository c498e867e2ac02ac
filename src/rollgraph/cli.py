"""The `rollgraph` command. Each subcommand is a file in `commands/`.

PyTorch is imported when a subcommand runs, so `--help` is instant.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from rollgraph.commands import check, config, doctor, generate, plan, train
from rollgraph.commands.config_arguments import sort_words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollgraph", description="Post-train language models on captured graphs.")
    parser.add_argument("--version", action="version", version=f"rollgraph {sys.modules['rollgraph'].__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for command in (train, generate, plan, config, check, doctor):
        command.add_to(commands)
    options, rest = parser.parse_known_args(arguments)
    unknown = sort_words(options, rest)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        exit_code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return exit_code
