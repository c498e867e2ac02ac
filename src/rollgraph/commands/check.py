"""`rollgraph check`: captures a function under the sanitizer and prints what a graph of it would get wrong.

With `--exact` it does something else, for which see `exact_check.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.commands import exact_check
from rollgraph.commands.streams import printing_to_stderr

if TYPE_CHECKING:
    from rollgraph.graph import Findings

CLEAN, FOUND, BROKEN = 0, 1, 2
REPLAYS = 3
_MUST_RETURN = (
    "must return (callable, example_inputs), (model, step) or (model, step, example_inputs), or return None if it "
    "captures and replays by itself"
)


class TargetError(Exception):
    """The target cannot be checked, for a reason that has nothing to do with graphs."""


def add_to(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="find what a graph of a function would get wrong, or where generation and training differ",
        description="Capture a function under the sanitizer, compare its replays with eager, and report what a graph "
        f"of it would get wrong. The target is a function without arguments; it {_MUST_RETURN}. Exit code: {CLEAN} if "
        f"there are no findings, {FOUND} if there are, {BROKEN} if the target cannot be checked. "
        f"{exact_check.DESCRIPTION}",
    )
    check.add_argument(
        "target", help="package.module:function, or path/to/file.py:function; with --exact, the folder of a model"
    )
    replays = check.add_argument("--replays", type=_positive, help=f"number of replays (default: {REPLAYS})")
    backend = check.add_argument(
        "--backend", choices=("auto", "cuda", "tape"), help="default: auto, by the inputs' device"
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    exact_options = exact_check.add_to(check, _positive)
    check.set_defaults(run=run, of_graphs=(replays, backend), of_exact=exact_options)


def run(options: argparse.Namespace) -> int:
    try:
        _refuse(options, options.of_graphs if options.exact else options.of_exact)
        if options.exact:
            return exact_check.run(options)
        with printing_to_stderr():
            findings = run_check(options.target, options.replays or REPLAYS, options.backend or "auto")
    except TargetError as error:
        print(f"rollgraph check: {error}", file=sys.stderr)
        return BROKEN
    print(findings.to_json() if options.json else findings)
    return FOUND if len(findings) else CLEAN


def _refuse(options: argparse.Namespace, others: Sequence[argparse.Action]) -> None:
    """Stop if options of the other kind of check are given, which would have no effect."""
    for action in others:
        if getattr(options, action.dest) != action.default:
            kind = "cannot be combined with" if options.exact else "needs"
            raise TargetError(f"{action.option_strings[0]} {kind} --exact")


def run_check(target: str, replays: int = 3, backend: Any = "auto") -> Findings:
    """Build the target, then capture and replay what it returns, under the sanitizer."""
    import torch

    from rollgraph.graph import sanitize

    if backend == "cuda" and not torch.cuda.is_available():
        raise TargetError("--backend cuda needs a CUDA device, and there is none; use --backend tape")
    with _failures_of(f"importing {target}"):
        build = _load(target)
    built: Any = None  # stays None if the target captures by itself and a GraphError ends the block
    with sanitize() as findings:
        with _failures_of(target):
            built = build()
        if built is not None:
            function, inputs = _function_and_inputs(target, built)
            _capture_and_replay(function, inputs, replays, backend)
    if built is None and not findings.graphs and not len(findings):
        raise TargetError(f"{target} returned None and captured nothing; it {_MUST_RETURN}")
    return findings


def _capture_and_replay(function: Callable[..., Any], inputs: tuple[Any, ...], replays: int, backend: Any) -> None:
    from rollgraph.graph import capture
    from rollgraph.graph.errors import WarmupError

    try:
        graph = capture(function, inputs, backend=backend)
    except WarmupError as error:
        raise TargetError(f"the function itself fails, even without a graph: {error}") from error
    for replay in range(replays):
        with _failures_of("a replay"):
            graph(*_rolled_inputs(function, inputs, replay))


@contextlib.contextmanager
def _failures_of(what: str) -> Iterator[None]:
    """Turn whatever the target raises into a TargetError, except for the GraphErrors that the sanitizer explains."""
    from rollgraph.graph import GraphError

    try:
        yield
    except (GraphError, TargetError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise TargetError(f"{what} called sys.exit({error.code!r})") from error
    except Exception as error:
        raise TargetError(f"{what} raised {type(error).__name__}: {error}") from error


def _load(target: str) -> Callable[[], Any]:
    name, _, attribute = target.rpartition(":")
    if not name:
        raise TargetError(f"{target!r}: expected package.module:function or path/to/file.py:function")
    if name.endswith(".py"):
        found: Any = _import_file(os.path.abspath(name))
    else:
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise TargetError(f"cannot import {name}: {error}") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TargetError(f"{name} has no function {attribute!r}")
    function: Callable[[], Any] = found
    return function


def _import_file(path: str) -> Any:
    """Import a file as a module of its package, if it is in one. An error of its code stays what it is: it may be one
    that the sanitizer explains.
    """
    from rollgraph.rl.paths import import_file

    if not os.path.exists(path):
        raise TargetError(f"no such file: {path}")
    folder, name = os.path.split(path.removesuffix(".py"))
    if _is_package(folder):
        while _is_package(folder):
            folder, package = os.path.split(folder)
            name = f"{package}.{name}"
        sys.path.insert(0, folder)
        return importlib.import_module(name)
    sys.path.insert(0, folder)
    return import_file(Path(path))


def _is_package(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "__init__.py"))


def _function_and_inputs(target: str, built: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to capture, from the tuple that the target returned."""
    from torch import nn

    if isinstance(built, tuple) and len(built) in (2, 3) and callable(built[0]):
        inputs = _as_inputs(built[-1])
        if len(built) == 2 and inputs is not None:
            return built[0], inputs
        if isinstance(built[0], nn.Module) and callable(built[1]):
            if len(built) == 2:
                return built[1], ()
            if inputs is not None:
                return built[1], inputs
    raise TargetError(f"{target} returned a value of type {type(built).__name__}, but it {_MUST_RETURN}")


def _as_inputs(value: Any) -> tuple[Any, ...] | None:
    """Example inputs: a sequence, or a single tensor. None if the value is neither."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return None


def _rolled_inputs(function: Callable[..., Any], inputs: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    """The inputs with their rows rotated, so that each replay sees new ones; unchanged if the function rejects that."""
    from torch import Tensor

    from rollgraph.graph.transaction import Transaction

    rolled = []
    for value in inputs:
        if isinstance(value, Tensor) and value.dim() > 0:
            value = value.roll(by, 0)
        rolled.append(value)
    try:
        with Transaction(function) as transaction, transaction.undo_log.run(again=True):
            function(*rolled)
    except Exception:
        return inputs
    return tuple(rolled)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
