"""The `rollgraph` command. PyTorch is imported by the commands that need it, so that `--help` is instant."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollgraph.graph import Findings

CLEAN, FOUND, BROKEN = 0, 1, 2
_RETURNS = (
    "return (callable, example_inputs), (model, step) or (model, step, example_inputs); or None, if it captures and "
    "replays by itself"
)


class TargetError(Exception):
    """The target cannot be checked, for a reason that has nothing to do with graphs."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollgraph", description="Post-training on captured graphs.")
    parser.add_argument("--version", action="version", version=f"rollgraph {sys.modules['rollgraph'].__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="find what a graph of a function would get wrong",
        description="Capture a function under the sanitizer, replay it beside eager, and tell what differs or would. "
        f"The target must {_RETURNS}. Exit code: {CLEAN} clean, {FOUND} findings, {BROKEN} the target is broken.",
    )
    check.add_argument("target", help="package.module:function, or path/to/file.py:function")
    check.add_argument("--replays", type=_positive, default=3, help="how often to replay (default: 3)")
    check.add_argument("--backend", choices=("auto", "cuda", "tape"), default="auto", help="default: by device")
    check.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parser.parse_args(arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the target prints is not the report
            findings = run_check(options.target, options.replays, options.backend)
    except TargetError as error:
        print(f"rollgraph check: {error}", file=sys.stderr)
        return BROKEN
    print(findings.to_json() if options.json else findings)
    return FOUND if len(findings) else CLEAN


def run_check(target: str, replays: int = 3, backend: Any = "auto") -> Findings:
    """Build the target and capture and replay what it returns, under the sanitizer."""
    from rollgraph.graph import CaptureError, GraphError, capture, sanitize

    build = _load(target)
    with sanitize() as findings:
        try:
            built = build()
        except GraphError:
            raise
        except Exception as error:
            raise TargetError(f"{target} raised {type(error).__name__}: {error}") from error
        if built is not None:
            function, inputs = _parts(target, built)
            try:
                graph = capture(function, inputs, backend=backend)
            except CaptureError as error:
                if str(error).startswith("warm-up") and error.__cause__ is not None:
                    raise TargetError(f"the function itself fails, without any graph: {error}") from error
                raise
            for replay in range(replays):
                graph(*_rolled(inputs, replay))
    if built is None and not findings.graphs and not len(findings):
        raise TargetError(f"{target} returned None and captured nothing: {_RETURNS}")
    return findings


def _load(target: str) -> Callable[[], Any]:
    name, _, attribute = target.rpartition(":")
    if not name:
        raise TargetError(f"{target!r}: expected package.module:function or path/to/file.py:function")
    folder, module = os.path.split(name[:-3]) if name.endswith(".py") else ("", name)
    sys.path.insert(0, os.path.abspath(folder))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise TargetError(f"cannot import {name}: {error}") from error
    except Exception as error:
        raise TargetError(f"importing {name} raised {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TargetError(f"{name} has no function {attribute!r}")
    return found


def _parts(target: str, built: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from torch import Tensor, nn

    if isinstance(built, tuple) and len(built) in (2, 3) and callable(built[0]):
        last = built[-1]
        inputs = (last,) if isinstance(last, Tensor) else tuple(last) if isinstance(last, (tuple, list)) else None
        if len(built) == 2 and inputs is not None:
            return built[0], inputs
        if isinstance(built[0], nn.Module) and callable(built[1]) and (len(built) == 2 or inputs is not None):
            return built[1], inputs or ()
    raise TargetError(f"{target} returned a {type(built).__name__} that is not understood: {_RETURNS}")


def _rolled(inputs: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    """The same values in other places, so that a replay sees inputs that are new and still valid."""
    from torch import Tensor

    return tuple(t.roll(by, 0) if isinstance(t, Tensor) and t.dim() else t for t in inputs)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least one")
    return number
