"""`rollgraph check --exact`: tells whether generation and training agree, bit for bit, for a model on this device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rollgraph.commands.devices import choose_device
from rollgraph.commands.streams import print_to_stderr, printing_to_stderr

if TYPE_CHECKING:
    from rollgraph.policy.agreement_check import AgreementReport, OperationDifference
    from rollgraph.policy.limits import Limits

AGREES, DIFFERS, BROKEN = 0, 1, 2
DESCRIPTION = (
    "With --exact, the target is the folder of a model, or its id on the Hugging Face Hub: random sequences run "
    "packed, as for scoring and training, and through the paged cache, as for generation, and every operation of "
    "every layer is compared, bit for bit. An "
    "operation gets the inputs that it has in the packed run, so one that differs does not hide those after it. Exit "
    f"code: {AGREES} if all agree, {DIFFERS} if not, {BROKEN} if the model cannot be checked."
)
# Rows, tokens and length. The longest sequence has several of attention's tiles and, on a GPU, several of its parts.
_ON_GPU = (64, 4096, 600)
_ON_CPU = (8, 512, 96)


class ModelError(Exception):
    """The model cannot be checked with these options."""


def add_to(check: argparse.ArgumentParser, positive: Callable[[str], int]) -> list[argparse.Action]:
    """Add --exact, and the options that only it has, which are returned."""
    group = check.add_argument_group("generation against training")
    group.add_argument(
        "--exact", action="store_true", help="check whether generation and training agree for the model of a folder"
    )
    sizes = list(zip(_ON_GPU, _ON_CPU, strict=True))
    texts = (
        ("--rows", "most rows of a decode step; 1, 2, 4, ... are checked too"),
        ("--tokens", "tokens of a microbatch, train.microbatch_tokens of a run"),
        ("--length", "longest sequence, a prompt with its completion"),
    )
    added = []
    for (option, text), (on_gpu, on_cpu) in zip(texts, sizes, strict=True):
        whole = f"{text} (default: {on_gpu} on a GPU, {on_cpu} on a CPU)"
        added.append(group.add_argument(option, type=positive, help=whole))
    added += [
        group.add_argument("--device", help="cuda or cpu (default: cuda if available)"),
        group.add_argument(
            "--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the weights (default: as stored)"
        ),
        group.add_argument(
            "--no-routes",
            action="store_true",
            help="leave matrix products to the library, to see what differs without the probe of a run's start",
        ),
    ]
    return added


def run(options: argparse.Namespace) -> int:
    try:
        with printing_to_stderr():
            report, setting = _check(options)
    except (ModelError, ValueError, OSError) as error:
        print(f"rollgraph check: {error}", file=sys.stderr)
        return BROKEN
    if options.json:
        print(json.dumps(to_json(report, setting), indent=2))
    else:
        print("\n".join(lines_of(report, setting)))
    return AGREES if report.agrees else DIFFERS


def _check(options: argparse.Namespace) -> tuple[AgreementReport, str]:
    """The report, and in words what was checked."""
    import torch

    from rollgraph.model import load_model
    from rollgraph.policy.agreement_check import check_agreement
    from rollgraph.policy.agreement_layout import MicrobatchTooSmall
    from rollgraph.run.hub_cache import model_folder

    device = choose_device(options.device)
    limits = _limits(options, device.startswith("cuda"))
    dtype = getattr(torch, options.dtype) if options.dtype else None
    folder = model_folder(options.target, weights=True, note=print_to_stderr)
    # Checkpointing: the training forward keeps no activations, because nothing here has a backward.
    model = load_model(folder, dtype=dtype, device=device, checkpointing=True)
    weight = model.embed.weight
    name = torch.cuda.get_device_name(weight.device) if weight.is_cuda else "CPU"
    dtype_name = str(weight.dtype).removeprefix("torch.")
    try:
        report = check_agreement(model, limits, routed=not options.no_routes)
    except MicrobatchTooSmall as error:
        raise ModelError(f"{error}; use a larger --tokens or a smaller --length") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of memory; try smaller --rows, --tokens or --length ({error})") from error
    return report, f"{model.architecture.family}, {model.architecture.layers} layers, {dtype_name}, {name}"


def _limits(options: argparse.Namespace, on_gpu: bool) -> Limits:
    from rollgraph.policy.limits import Limits

    rows, tokens, length = _ON_GPU if on_gpu else _ON_CPU
    tokens = options.tokens or tokens
    length = options.length or min(length, max(2, tokens // 4))
    if length < 2:
        raise ModelError(f"--length {length}: must be at least 2, one token of a prompt and one of its completion")
    return Limits(max_length=length, rows=options.rows or rows, token_buckets=(tokens,))


# -- what is printed ---------------------------------------------------------------------------------------------------


def lines_of(report: AgreementReport, setting: str) -> list[str]:
    from rollgraph.policy.agreement_check import AFTER_THE_LAYERS, OF_A_LAYER

    lines = [
        setting,
        f"packed: {report.tokens} tokens; prefill: {_listed(report.prefill_sizes)} tokens; "
        f"decode: {_listed(report.row_counts)} rows",
        "",
        *_product_lines(report),
        "",
    ]
    for operation in OF_A_LAYER:
        equal = report.layers - report.differing_layers(operation)
        lines.append(f"{operation:<16} {equal} of {report.layers} layers equal")
    for operation in AFTER_THE_LAYERS:
        lines.append(f"{operation:<16} {'different' if report.differing_layers(operation) else 'equal'}")
    lines.append("")
    for phase, found in report.logprobs.items():
        line = f"sampled tokens   {found.tokens - found.differing} of {found.tokens} log-probabilities equal in {phase}"
        if found.differing:
            line += f", largest difference {found.largest:.3g}"
        lines.append(line)
    return [*lines, "", _verdict(report)]


def _product_lines(report: AgreementReport) -> list[str]:
    """How matrix products are computed."""
    from rollgraph.policy.exactness import describe

    if report.products is None:
        return ["products: left to the library"]
    special = report.products.lines()
    if not special:
        lines = ["products: the library's own, at all numbers of rows"]
    else:
        lines = ["products, by number of rows (the library's own where none is given):"]
        lines += [f"  {line}" for line in special]
    if not report.products.exact:
        lines.append(f"  {describe(report.products)}")
    return lines


def _verdict(report: AgreementReport) -> str:
    if report.agrees:
        return "Generation and training agree bit for bit."
    if not report.differences:
        return "Every operation agrees on its own, but log-probabilities differ from end to end. Please report this."
    return f"First difference: {_spell(report.differences[0], report.layers)}"


def _spell(difference: OperationDifference, layers: int) -> str:
    place = f"layer {difference.layer}, " if difference.layer < layers else ""
    rows = "1 row" if difference.rows == 1 else f"{difference.rows} rows"
    return (
        f"{place}{difference.operation}, in {difference.phase} with {rows}, at position {difference.position}: "
        f"{difference.differing} of {difference.values} values differ, by at most {difference.largest:.3g}"
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) or "no"


def to_json(report: AgreementReport, setting: str) -> dict[str, Any]:
    """`layer` of a difference is null after the layers."""
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
        "products": None if report.products is None else report.products.lines(),
        "differences": differences,
        "logprobs": {phase: asdict(found) for phase, found in report.logprobs.items()},
    }
