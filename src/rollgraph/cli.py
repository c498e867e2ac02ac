"""The `rollgraph` command. Each sub-command is a file of `commands/`; PyTorch is imported when one runs.

So `--help` is instant.
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
    parser = argparse.ArgumentParser(prog="rollgraph", description="Post-training on captured graphs.")
    parser.add_argument("--version", action="version", version=f"rollgraph {sys.modules['rollgraph'].__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for command in (train, generate, plan, config, check, doctor):
        command.add_to(commands)
    options, rest = parser.parse_known_args(arguments)
    if left := sort_words(options, rest):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    try:
        exit_code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return exit_code
