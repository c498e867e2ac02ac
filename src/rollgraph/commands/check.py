"""`rollgraph check`: find errors that a CUDA graph of a function would have.

With `--exact`, it does something else: it checks whether generation and training of a model agree bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.commands.arguments import choose_device
from rollgraph.log.streams import note_to_stderr, redirect_stdout_to_stderr

if TYPE_CHECKING:
    from rollgraph.graph import Findings
    from rollgraph.policy.agreement import AgreementReport, OperationDifference
    from rollgraph.policy.microbatch import Limits


# -- --exact ---------------------------------------------------------------------------------------

AGREES, DIFFERS, UNCHECKED = 0, 1, 2
EXACT_DESCRIPTION = (
    "With --exact, check a model instead. The target is its folder, or its id on the Hugging Face Hub. Random "
    "sequences run twice: packed, as in scoring and training, and with the paged cache, as in generation. Every "
    "operation of every layer is compared bit for bit. Each operation gets the inputs of the packed run, so a "
    "difference does not hide later ones. Exit "
    f"code: {AGREES} if all agree, {DIFFERS} if not, {UNCHECKED} if the model cannot be checked."
)
# (rows, tokens, length). The longest sequence spans several tiles of attention and, on a GPU, several splits.
_GPU_SIZES = (64, 4096, 600)
_CPU_SIZES = (8, 512, 96)


class ModelError(Exception):
    """The model cannot be checked with these options."""


def add_exact_options(check: argparse.ArgumentParser, positive: Callable[[str], int]) -> list[argparse.Action]:
    """Add --exact and the options that need it. Returns the latter."""
    group = check.add_argument_group("generation against training")
    group.add_argument(
        "--exact", action="store_true", help="check whether generation and training of a model agree bit for bit"
    )
    sizes = list(zip(_GPU_SIZES, _CPU_SIZES, strict=True))
    texts = (
        ("--rows", "largest batch of a decode step; 1, 2, 4, ... rows are checked, too"),
        ("--tokens", "size of a microbatch in tokens, as train.microbatch_tokens"),
        ("--length", "longest sequence, prompt and completion together"),
    )
    exact_only = []
    for (option, text), (on_gpu, on_cpu) in zip(texts, sizes, strict=True):
        help_text = f"{text} (default: {on_gpu} on a GPU, {on_cpu} on a CPU)"
        exact_only.append(group.add_argument(option, type=positive, help=help_text))
    exact_only += [
        group.add_argument("--device", help="cuda or cpu (default: cuda if available)"),
        group.add_argument(
            "--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the weights (default: as stored)"
        ),
        group.add_argument(
            "--default-gemms",
            action="store_true",
            help="use the library's default GEMMs, without the autotuning that a run starts with",
        ),
    ]
    return exact_only


def run_exact(options: argparse.Namespace) -> int:
    try:
        with redirect_stdout_to_stderr():
            report, setting = _check_agreement(options)
    except (ModelError, ValueError, OSError) as error:
        print(f"rollgraph check: {error}", file=sys.stderr)
        return UNCHECKED
    if options.json:
        print(json.dumps(agreement_to_dict(report, setting), indent=2))
    else:
        print("\n".join(format_agreement(report, setting)))
    return AGREES if report.agrees else DIFFERS


def _check_agreement(options: argparse.Namespace) -> tuple[AgreementReport, str]:
    """The report, and a description of the model and device."""
    import torch

    from rollgraph.model import load_model
    from rollgraph.policy.agreement import MicrobatchTooSmall, check_agreement
    from rollgraph.rl.data.hub import model_folder

    device = choose_device(options.device)
    limits = _choose_limits(options, device.startswith("cuda"))
    dtype = getattr(torch, options.dtype) if options.dtype else None
    folder = model_folder(options.target, weights=True, note=note_to_stderr)
    # With checkpointing, the training forward keeps no activations. We run no backward pass.
    model = load_model(folder, dtype=dtype, device=device, checkpointing=True)
    weight = model.embed_tokens.weight
    name = torch.cuda.get_device_name(weight.device) if weight.is_cuda else "CPU"
    dtype_name = str(weight.dtype).removeprefix("torch.")
    try:
        report = check_agreement(model, limits, select_algos=not options.default_gemms)
    except MicrobatchTooSmall as error:
        raise ModelError(f"{error}; use a larger --tokens or a smaller --length") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of memory; try smaller --rows, --tokens or --length ({error})") from error
    return report, f"{model.architecture.family}, {model.architecture.layers} layers, {dtype_name}, {name}"


def _choose_limits(options: argparse.Namespace, on_gpu: bool) -> Limits:
    from rollgraph.policy.microbatch import Limits

    rows, tokens, length = _GPU_SIZES if on_gpu else _CPU_SIZES
    tokens = options.tokens or tokens
    length = options.length or min(length, max(2, tokens // 4))
    if length < 2:
        raise ModelError(f"--length {length}: must be at least 2, one token of a prompt and one of its completion")
    return Limits(max_length=length, rows=options.rows or rows, token_buckets=(tokens,))


# -- printing the report of --exact ----------------------------------------------------------------


def format_agreement(report: AgreementReport, setting: str) -> list[str]:
    from rollgraph.policy.agreement import FINAL_OPERATIONS, LAYER_OPERATIONS

    lines = [
        setting,
        f"packed: {report.tokens} tokens; prefill: {_join_numbers(report.prefill_sizes)} tokens; "
        f"decode: {_join_numbers(report.row_counts)} rows",
        "",
        *_matmul_lines(report),
        "",
    ]
    for operation in LAYER_OPERATIONS:
        equal = report.layers - report.differing_layers(operation)
        lines.append(f"{operation:<16} {equal} of {report.layers} layers equal")
    for operation in FINAL_OPERATIONS:
        lines.append(f"{operation:<16} {'different' if report.differing_layers(operation) else 'equal'}")
    lines.append("")
    for phase, counts in report.logprobs.items():
        line = (
            f"sampled tokens   {counts.tokens - counts.differing} of {counts.tokens} log-probabilities equal in {phase}"
        )
        if counts.differing:
            line += f", largest difference {counts.largest:.3g}"
        lines.append(line)
    return [*lines, "", _verdict(report)]


def _matmul_lines(report: AgreementReport) -> list[str]:
    """The GEMM algorithms by number of rows."""
    from rollgraph.policy.exactness import describe_exactness

    if report.gemm_report is None:
        return ["GEMMs: the library's default algorithms"]
    special = report.gemm_report.lines()
    if not special:
        lines = ["GEMMs: the library's default algorithms, for all numbers of rows"]
    else:
        lines = ["GEMM algorithms by number of rows (the library's default for all others):"]
        lines += [f"  {line}" for line in special]
    if not report.gemm_report.exact:
        lines.append(f"  {describe_exactness(report.gemm_report)}")
    return lines


def _verdict(report: AgreementReport) -> str:
    if report.agrees:
        return "Generation and training agree bit for bit."
    if not report.differences:
        return "Each operation agrees on its own, but log-probabilities differ end to end. Please report this."
    return f"First difference: {_format_difference(report.differences[0], report.layers)}"


def _format_difference(difference: OperationDifference, layers: int) -> str:
    layer = f"layer {difference.layer}, " if difference.layer < layers else ""
    rows = "1 row" if difference.rows == 1 else f"{difference.rows} rows"
    return (
        f"{layer}{difference.operation}, in {difference.phase} with {rows}, at position {difference.position}: "
        f"{difference.differing} of {difference.values} values differ, by at most {difference.largest:.3g}"
    )


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) or "no"


def agreement_to_dict(report: AgreementReport, setting: str) -> dict[str, Any]:
    """The report for JSON. For an operation after the last layer, `layer` is null."""
    differences: list[dict[str, Any]] = []
    for difference in report.differences:
        layer = difference.layer if difference.layer < report.layers else None
        differences.append({**difference._asdict(), "layer": layer})
    return {
        "agrees": report.agrees,
        "model": setting,
        "tokens": report.tokens,
        "rows": report.row_counts,
        "prefill": report.prefill_sizes,
        "products": None if report.gemm_report is None else report.gemm_report.lines(),
        "differences": differences,
        "logprobs": {phase: asdict(counts) for phase, counts in report.logprobs.items()},
    }


# -- a function under the sanitizer ----------------------------------------------------------------

CLEAN, HAS_FINDINGS, BROKEN = 0, 1, 2
REPLAYS = 3
_MUST_RETURN = (
    "must return (callable, example_inputs), (model, step) or (model, step, example_inputs), or return None if it "
    "captures and replays by itself"
)


class TargetError(Exception):
    """The target cannot be checked, for a reason unrelated to graphs."""


def add_parser(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="check a function for errors under graph capture, or whether generation and training agree",
        description="Capture a function under the sanitizer, compare its replays with eager execution, and report what "
        f"goes wrong. The target is a function without arguments. It {_MUST_RETURN}. Exit code: {CLEAN} if "
        f"there are no findings, {HAS_FINDINGS} if there are, {BROKEN} if the target cannot be checked. "
        f"{EXACT_DESCRIPTION}",
    )
    check.add_argument(
        "target", help="package.module:function or path/to/file.py:function; with --exact, a model's folder or hub id"
    )
    replays = check.add_argument("--replays", type=_positive_int, help=f"number of replays (default: {REPLAYS})")
    backend = check.add_argument(
        "--backend", choices=("auto", "cuda", "tape"), help="default: auto, by the inputs' device"
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    exact_options = add_exact_options(check, _positive_int)
    check.set_defaults(run=run, graph_options=(replays, backend), exact_only_options=exact_options)


def run(options: argparse.Namespace) -> int:
    try:
        _refuse_options(options, options.graph_options if options.exact else options.exact_only_options)
        if options.exact:
            return run_exact(options)
        with redirect_stdout_to_stderr():
            findings = run_check(options.target, options.replays or REPLAYS, options.backend or "auto")
    except TargetError as error:
        print(f"rollgraph check: {error}", file=sys.stderr)
        return BROKEN
    print(findings.to_json() if options.json else findings)
    return HAS_FINDINGS if len(findings) else CLEAN


def _refuse_options(options: argparse.Namespace, unused: Sequence[argparse.Action]) -> None:
    """Raise if an option is set that this kind of check does not use."""
    for action in unused:
        if getattr(options, action.dest) != action.default:
            kind = "cannot be combined with" if options.exact else "needs"
            raise TargetError(f"{action.option_strings[0]} {kind} --exact")


def run_check(target: str, replays: int = 3, backend: Any = "auto") -> Findings:
    """Call the target under the sanitizer, then capture and replay the function that it returns."""
    import torch

    from rollgraph.graph import sanitize

    if backend == "cuda" and not torch.cuda.is_available():
        raise TargetError("--backend cuda needs a CUDA device, and there is none; use --backend tape")
    with _as_target_errors(f"importing {target}"):
        build = _import_function(target)
    target_output: Any = None  # stays None if the target captures by itself and a GraphError ends the block
    with sanitize() as findings:
        with _as_target_errors(target):
            target_output = build()
        if target_output is not None:
            function, inputs = _function_and_inputs(target, target_output)
            _capture_and_replay(function, inputs, replays, backend)
    if target_output is None and not findings.graphs and not len(findings):
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
        with _as_target_errors("a replay"):
            graph(*_rolled_inputs(function, inputs, replay))


@contextlib.contextmanager
def _as_target_errors(what: str) -> Iterator[None]:
    """Turn any error of the target into a TargetError, except GraphErrors, which the sanitizer explains."""
    from rollgraph.graph import GraphError

    try:
        yield
    except (GraphError, TargetError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise TargetError(f"{what} called sys.exit({error.code!r})") from error
    except Exception as error:
        raise TargetError(f"{what} raised {type(error).__name__}: {error}") from error


def _import_function(target: str) -> Callable[[], Any]:
    name, _, attribute = target.rpartition(":")
    if not name:
        raise TargetError(f"{target!r}: expected package.module:function or path/to/file.py:function")
    if name.endswith(".py"):
        imported: Any = _import_file(os.path.abspath(name))
    else:
        sys.path.insert(0, os.getcwd())
        try:
            imported = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise TargetError(f"cannot import {name}: {error}") from error
    for part in attribute.split("."):
        imported = getattr(imported, part, None)
    if not callable(imported):
        raise TargetError(f"{name} has no function {attribute!r}")
    function: Callable[[], Any] = imported
    return function


def _import_file(path: str) -> Any:
    """Import a file, as a module of its package if it is in one.

    Errors of its code are not wrapped here, because the sanitizer may explain them.
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


def _function_and_inputs(target: str, output: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to capture and its example inputs, from the target's return value."""
    from torch import nn

    if isinstance(output, tuple) and len(output) in (2, 3) and callable(output[0]):
        inputs = _as_inputs(output[-1])
        if len(output) == 2 and inputs is not None:
            return output[0], inputs
        if isinstance(output[0], nn.Module) and callable(output[1]):
            if len(output) == 2:
                return output[1], ()
            if inputs is not None:
                return output[1], inputs
    raise TargetError(f"{target} returned a value of type {type(output).__name__}, but it {_MUST_RETURN}")


def _as_inputs(value: Any) -> tuple[Any, ...] | None:
    """Example inputs from a sequence or a single tensor. None if the value is neither."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return None


def _rolled_inputs(function: Callable[..., Any], inputs: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    """Rotate the rows of the inputs, so that each replay gets new values. Unchanged if the function rejects that."""
    from torch import Tensor

    from rollgraph.graph.state.transaction import Transaction

    rolled = []
    for value in inputs:
        if isinstance(value, Tensor) and value.dim() > 0:
            value = value.roll(by, 0)
        rolled.append(value)
    try:
        with Transaction(function) as transaction, transaction.undo_log.run(is_rerun=True):
            function(*rolled)
    except Exception:
        return inputs
    return tuple(rolled)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
