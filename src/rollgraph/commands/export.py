"""`rollgraph export`: a checkpoint as a model folder or an adapter, for other tools."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rollgraph.commands.arguments import add_config_arguments
from rollgraph.commands.eval import with_checkpoint
from rollgraph.files import FileError, check_path
from rollgraph.parallel.ranks.failures import ExitCode


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as a model folder or an adapter",
        description="Write a folder that transformers and other tools can load. For a run with an adapter, write the "
        "adapter alone, in PEFT's format or, with --merge, the model with the adapter merged into its weights. The "
        "run's folder is not changed.",
    )
    add_config_arguments(parser, "optimizer.lr=1e-6")
    parser.set_defaults(run=run_export, model=None)
    parser.add_argument("--to", required=True, help="folder to write; it must be empty or not exist")
    parser.add_argument("--force", action="store_true", help="overwrite the model in a folder that is not empty")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into the model, and write the model")
    parser.add_argument("--which", choices=("latest", "best"), help="checkpoint of a run (default: latest)")


def run_export(options: argparse.Namespace) -> int:
    try:
        has_files = any(Path(check_path(options.to)).iterdir())
    except FileNotFoundError:
        has_files = False
    except OSError as error:
        print(f"rollgraph export: --to {options.to}: {error.strerror}", file=sys.stderr)
        return ExitCode.REFUSED
    except FileError as error:
        print(f"rollgraph export: --to {error}", file=sys.stderr)
        return ExitCode.REFUSED
    if has_files and not options.force:
        print(
            f"rollgraph export: --to {options.to}: is not empty; choose another folder, or overwrite it with --force",
            file=sys.stderr,
        )
        return ExitCode.REFUSED
    return with_checkpoint(options, lambda run, options: run.export(Path(options.to), merge=options.merge))
