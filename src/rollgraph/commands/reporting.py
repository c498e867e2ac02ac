"""How a command ends with an error: one line for what the user can mend, a traceback for a bug, and the exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable

from rollgraph.config import Config, ConfigError, load_config
from rollgraph.errors import MachineError, user_line
from rollgraph.inputs.built_in_names import find_name_problems
from rollgraph.parallel.ranks.failures import ExitCode, RankLost, StoppedInSetup, is_user_error

# A user's error is about their input, or their own code raised it; then the message names the line. A machine error
# means that something outside of the program failed. All other errors are bugs of rollgraph, which deserve a traceback
# and a report.

_ONE_LINE = (RuntimeError, ValueError)  # rollgraph's own errors with a useful message; others show a traceback
HINT = "(ROLLGRAPH_TRACEBACK=1 shows where)"


def report_error(command: str, error: Exception) -> bool:
    """Print an error in one or two lines. Returns False if the caller should raise it again, for its traceback."""
    if os.environ.get("ROLLGRAPH_TRACEBACK"):
        traceback.print_exception(error)
        return True
    text = str(error)
    if line := user_line(error):
        text = f"{line}: {line.function} raised {type(error).__name__}: {error}"
    elif line := user_line(error.__cause__):
        text += f" ({line})" if str(line) not in text else ""
    elif is_user_error(error) or isinstance(error, MachineError | OSError):
        pass  # the message says enough
    elif isinstance(error, _ONE_LINE):
        text += f"\n{HINT}"
    else:
        return False
    print(f"rollgraph {command}: {text}", file=sys.stderr)
    return True


def load_or_report(options: argparse.Namespace) -> Config | None:
    """Load the configuration of a command; None after printing what is wrong with it."""
    try:
        return load_config(options.config, options.overrides, find_name_problems)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return None


def run_and_report(options: argparse.Namespace, run: Callable[[], None]) -> int:
    """Run a command and report its error, if any. Returns the exit code."""
    from rollgraph.parallel.ranks.join import end_process

    try:
        run()
    except Exception as error:
        if not report_error(options.command, error):
            raise
        return end_process(exit_code_of(error))
    except StoppedInSetup as stopped:
        print(f"rollgraph {options.command}: {stopped}; saved checkpoints are whole", file=sys.stderr)
        return end_process(ExitCode.TERMINATED)
    except KeyboardInterrupt:
        print(f"rollgraph {options.command}: interrupted; saved checkpoints are whole", file=sys.stderr)
        return end_process(ExitCode.INTERRUPTED)
    return ExitCode.FINISHED


def exit_code_of(error: BaseException) -> ExitCode:
    if isinstance(error, RankLost):
        return ExitCode.REFUSED if error.loss.refused else ExitCode.RANK_LOST
    return ExitCode.REFUSED if is_user_error(error) else ExitCode.FAILED
