"""`rollgraph check`: what a graph of a function would get wrong."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollgraph.commands.streams import printing_to_stderr

if TYPE_CHECKING:
    from rollgraph.graph import Findings

CLEAN, FOUND, BROKEN = 0, 1, 2
_RETURNS = (
    "return (callable, example_inputs), (model, step) or (model, step, example_inputs); or None, if it captures and "
    "replays by itself"
)


class TargetError(Exception):
    """The target cannot be checked, for a reason that has nothing to do with graphs."""


def add_to(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="find what a graph of a function would get wrong",
        description="Capture a function under the sanitizer, replay it beside eager, and tell what differs or would. "
        f"The target must {_RETURNS}. Exit code: {CLEAN} clean, {FOUND} findings, {BROKEN} it cannot be checked.",
    )
    check.add_argument("target", help="package.module:function, or path/to/file.py:function")
    check.add_argument("--replays", type=_positive, default=3, help="how often to replay (default: 3)")
    check.add_argument("--backend", choices=("auto", "cuda", "tape"), default="auto", help="default: by device")
    check.add_argument("--json", action="store_true", help="JSON on standard output")
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        with printing_to_stderr():
            findings = run_check(options.target, options.replays, options.backend)
    except TargetError as error:
        print(f"rollgraph check: {error}", file=sys.stderr)
        return BROKEN
    print(findings.to_json() if options.json else findings)
    return FOUND if len(findings) else CLEAN


def run_check(target: str, replays: int = 3, backend: Any = "auto") -> Findings:
    """Build the target and capture and replay what it returns, under the sanitizer."""
    import torch

    from rollgraph.graph import CaptureError, capture, sanitize

    if backend == "cuda" and not torch.cuda.is_available():
        raise TargetError("--backend cuda: there is no CUDA device here; use --backend tape")
    with _failures(f"importing {target}"):
        build = _load(target)
    built: Any = None  # also where the target itself captures, and a GraphError of that ends the block
    with sanitize() as findings:
        with _failures(target):
            built = build()
        if built is not None:
            function, inputs = _parts(target, built)
            try:
                graph = capture(function, inputs, backend=backend)
            except CaptureError as error:
                if str(error).startswith("warm-up") and error.__cause__ is not None:
                    raise TargetError(f"the function itself fails, without any graph: {error}") from error
                raise
            for replay in range(replays):
                with _failures("a replay"):
                    graph(*_rolled(function, inputs, replay))
    if built is None and not findings.graphs and not len(findings):
        raise TargetError(f"{target} returned None and captured nothing: {_RETURNS}")
    return findings


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Whatever the target raises, except for what the sanitizer is there for, means that it is broken."""
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
    return found


def _import_file(path: str) -> Any:
    """A file as the module that it is: part of a package, or under a name that nothing else has."""
    if not os.path.exists(path):
        raise TargetError(f"there is no file {path}")
    folder, name = os.path.split(path[:-3])
    if os.path.exists(os.path.join(folder, "__init__.py")):
        while os.path.exists(os.path.join(folder, "__init__.py")):
            folder, package = os.path.split(folder)
            name = f"{package}.{name}"
        sys.path.insert(0, folder)
        return importlib.import_module(name)
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"target of rollgraph check: {name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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


def _rolled(function: Callable[..., Any], inputs: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    """The same values in other places, if the function takes them: a replay should see inputs that are new."""
    from torch import Tensor

    from rollgraph.graph.transaction import Transaction

    rolled = tuple(t.roll(by, 0) if isinstance(t, Tensor) and t.dim() else t for t in inputs)
    try:
        with Transaction(function) as transaction, transaction.undo_log.run(again=True):
            function(*rolled)
    except Exception:
        return inputs
    return rolled


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
