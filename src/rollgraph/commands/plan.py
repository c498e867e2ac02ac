"""`rollgraph plan`: estimate the memory of each phase, the time of a step, and layouts, without allocating anything."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rollgraph.commands.arguments import add_config_arguments
from rollgraph.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from rollgraph.plan.choose import Choice
    from rollgraph.plan.layout import Network
    from rollgraph.plan.report import Plan
    from rollgraph.plan.suggest import Scaling
    from rollgraph.plan.time import Floor, Speed


# -- tables for several ranks ----------------------------------------------------------------------

_LEFT_ALIGNED = ("where", "device", "host")  # cells that are left-aligned, like the first column


def format_communication(plan: Plan) -> list[str]:
    """The estimated time of a step on several ranks, with a row for each kind of communication."""
    from rollgraph.plan.memory import PHASES

    time = plan.choice.settings.time
    cells_by_name: dict[str, dict[str, str]] = {}  # name -> phase -> cell
    for exchange in time.communication:
        text = f"{format_seconds(exchange.exposed)} of {format_seconds(exchange.seconds)}"
        cells_by_name.setdefault(exchange.name, {})[exchange.phase] = text
    rows = [("estimated time of a step, s", *PHASES)]
    for name, cells in cells_by_name.items():
        rows.append((name, *(cells.get(phase, "") for phase in PHASES)))
    rows.append(("sum", *(format_seconds(time.of_phase(phase)) for phase in PHASES)))
    network = plan.layout.network
    inside, between = (
        f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us" for link in (network.inside, network.between)
    )
    note = f"communication: exposed time (not hidden by computation) of the total; {inside} inside a node"
    if plan.layout.nodes > 1:
        note += f", {between} between nodes"
    return [*format_table(rows), note]


def format_layouts(plan: Plan) -> list[str]:
    """A table of all layouts of the same ranks."""
    from rollgraph.plan.memory import PHASES, format_bytes

    is_size_known = plan.device_bytes is not None
    rows = [("layout", "needs", "fits", "step, s", *PHASES, "exposed")]
    for option in plan.layouts:
        needs = (option.layout.describe(), format_bytes(option.required_bytes))
        if not option.choice.fits:
            rows.append((*needs, "no", *[""] * (len(PHASES) + 2)))
            continue
        rows.append((*needs, "yes" if is_size_known else "", *_format_times(option.choice)))
    return format_table(rows)


def format_scaling(scaling: Scaling) -> list[str]:
    """A table with one row for each number of GPUs that the layout was scaled to."""
    from rollgraph.plan.memory import PHASES
    from rollgraph.plan.suggest import MAX_GPUS

    rows = [("GPUs", "nodes", "prompts", "step, s", *PHASES, "exposed", "efficiency")]
    for point in scaling.points:
        counts = (f"{point.layout.ranks:,}", str(point.layout.nodes), f"{point.prompts:,}")
        efficiency = scaling.efficiency(point)
        if efficiency is None:
            rows.append((*counts, "does not fit", *[""] * (len(PHASES) + 2)))
            continue
        rows.append((*counts, *_format_times(point.choice), f"{efficiency:.0%}"))
    last = scaling.points[-1].layout.ranks
    text = (
        "exposed: communication not hidden by computation; efficiency: per GPU, relative to the smallest run that fits"
    )
    more = [] if last >= MAX_GPUS else [f"more than {last:,} GPUs need more prompts in a step: see --scale grown"]
    return [*format_table(rows), text, *more]


def _format_times(choice: Choice) -> tuple[str, ...]:
    """The estimated time of a step, of each phase, and of exposed communication."""
    from rollgraph.plan.memory import PHASES

    time = choice.settings.time
    return (
        format_seconds(time.total),
        *(format_seconds(time.of_phase(phase)) for phase in PHASES),
        format_seconds(time.exposed),
    )


def format_seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def format_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Align rows in columns, each as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 or cell in _LEFT_ALIGNED else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# -- the command -----------------------------------------------------------------------------------

DONE, TOO_LARGE, WRONG = 0, 1, 2
GIB = 2**30


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="estimate the memory and the minimum time of a run, before it starts",
        description="Estimate the memory and time of a run. Reads only the configuration and the model's config.json, "
        "and allocates nothing. Without data.max_prompt_tokens, also reads the data if it is on this machine, to find "
        "the longest prompt. Shows the memory settings that the run would choose and why, and the memory of each "
        "phase. If the run does not fit, suggests changes that would make it fit, such as another layout of the ranks. "
        f"Exit code: {DONE} if it fits or that is unknown, {TOO_LARGE} if it does not fit, {WRONG} if the "
        "configuration is wrong.",
    )
    add_config_arguments(parser, "memory.cache_gib=20")
    parser.add_argument(
        "--ranks", type=int, help="number of processes (default: as in `cluster` with engine ray, else 1)"
    )
    parser.add_argument(
        "--nodes", type=int, help="number of nodes (default: as in `cluster`, else one for every 8 ranks)"
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="WHICH=GB/S,US",
        help="bandwidth of a rank in one direction and latency of a hop, `inside` a node or `between` nodes; can be "
        "repeated (default: inside=450,3 for NVLink and between=50,10 for InfiniBand, nominal)",
    )
    parser.add_argument("--layouts", action="store_true", help="compare all layouts of the ranks, even if the run fits")
    parser.add_argument(
        "--scale",
        nargs="?",
        const="fixed",
        choices=("fixed", "grown"),
        help="estimate a step on up to 1,024 GPUs; fixed: with the configured number of prompts; grown: with more "
        "prompts for more GPUs (--scale alone: fixed)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device to plan for (default: cuda); for cpu, the minimum time needs --tflops and --tb-per-second",
    )
    parser.add_argument("--device-gib", type=float, help="memory of the GPU (default: as on this machine)")
    parser.add_argument("--host-gib", type=float, help="host memory for each process (default: not limited)")
    parser.add_argument(
        "--tflops", type=float, help="speed of a bf16 GEMM (default: 785 for cuda, measured on an H200)"
    )
    parser.add_argument(
        "--tb-per-second", type=float, help="memory bandwidth (default: 4.28 for cuda, measured on an H200)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with bytes and seconds")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        config = load_config(options.config, options.overrides)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return WRONG
    from rollgraph.inputs.base_model import resolve_adapter
    from rollgraph.inputs.inputs import check_device, measure_prompt_lengths
    from rollgraph.plan.report import make_plan

    sizes = (options.device_gib, options.host_gib, options.tflops, options.tb_per_second)
    try:
        if any(value is not None and not 0 < value < math.inf for value in (options.ranks, options.nodes, *sizes)):
            raise ValueError(
                "--ranks, --nodes, --device-gib, --host-gib, --tflops and --tb-per-second must be positive and finite"
            )
        ranks, nodes = _ranks_and_nodes(options, config)
        check_device(config, options.device)
        plan = make_plan(
            resolve_adapter(config),
            prompt_lengths=measure_prompt_lengths(config),
            ranks=ranks,
            nodes=nodes,
            network=_parse_links(options.link),
            device_bytes=_device_bytes(options),
            host_bytes=None if options.host_gib is None else int(options.host_gib * GIB),
            device=options.device,
            speed=_device_speed(options),
            layouts=options.layouts,
            scale=options.scale,
        )
    except (ValueError, OSError) as error:
        print(f"rollgraph plan: {error}", file=sys.stderr)
        return WRONG
    print(json.dumps(plan.to_dict(), indent=2) if options.json else format_plan(plan))
    return TOO_LARGE if plan.fits is False else DONE


def _ranks_and_nodes(options: argparse.Namespace, config: Config) -> tuple[int, int]:
    """--ranks and --nodes, or else the numbers in the configuration's `cluster` section."""
    from rollgraph.plan.layout import infer_nodes

    cluster = config.cluster
    if options.ranks is None and cluster.engine == "ray":
        nodes = options.nodes or cluster.nodes
        return nodes * cluster.ranks_on_node, nodes
    ranks = options.ranks or 1
    return ranks, options.nodes or infer_nodes(ranks)


def _parse_links(texts: list[str]) -> Network:
    """The links of --link, e.g. between=25,10: 25 GB/s and 10 microseconds."""
    from rollgraph.plan.layout import Link, Network

    links: dict[str, Link] = {}
    for text in texts:
        which, _, numbers = text.partition("=")
        bandwidth, _, latency = numbers.partition(",")
        try:
            if which not in ("inside", "between"):
                raise ValueError
            links[which] = Link(float(bandwidth) * 1e9, float(latency) * 1e-6)
        except ValueError:
            raise ValueError(
                f"--link {text}: expected inside=GB/S,US or between=GB/S,US with positive numbers, such as "
                "between=50,10 for 50 GB/s and 10 microseconds"
            ) from None
    return Network(**links)


def _device_speed(options: argparse.Namespace) -> Speed | None:
    """--tflops and --tb-per-second. For a GPU, the defaults are the speed of an H200."""
    from rollgraph.plan.time import TB_PER_SECOND, TFLOPS, Speed

    if options.device == "cuda":
        return Speed(options.tflops or TFLOPS, options.tb_per_second or TB_PER_SECOND)
    if options.tflops is None or options.tb_per_second is None:
        return None
    return Speed(options.tflops, options.tb_per_second)


def _device_bytes(options: argparse.Namespace) -> int | None:
    if options.device == "cpu":
        return None
    if options.device_gib is not None:
        return int(options.device_gib * GIB)
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def format_plan(plan: Plan) -> str:
    """The chosen settings, a table of memory, whether it fits, and, if the device's speed is known, a table of time."""
    from rollgraph.plan.memory import PHASES, format_bytes

    title = "memory of a rank"
    if plan.layout.ranks > 1:
        title = f"memory of one of {_format_ranks(plan)}"
    rows = [(title, "where", *PHASES)]
    for line in filter(lambda line: line.nbytes, plan.lines):
        cells = (format_bytes(line.nbytes) if phase in line.phases else "" for phase in PHASES)
        rows.append((line.name, line.where, *cells))
    rows.append(("sum", "device", *(format_bytes(plan.total(phase)) for phase in PHASES)))
    if plan.device != "cpu":
        rows.append(("sum", "host", *(format_bytes(plan.total(phase, "host")) for phase in PHASES)))
    text = [*_format_choice(plan), *format_table(rows), "", _verdict(plan)]
    if plan.proposal:
        text += [plan.proposal]
    if plan.floor is not None:
        text += ["", *_format_floor(plan.floor)]
        if plan.layout.ranks > 1 and plan.choice.fits:
            text += ["", *format_communication(plan)]
    if plan.layouts:
        text += ["", *format_layouts(plan)]
    if plan.scaling is not None:
        text += ["", *format_scaling(plan.scaling)]
    return "\n".join([*text, *(f"note: {note}" for note in plan.notes)])


def _format_choice(plan: Plan) -> list[str]:
    if not plan.choice.reasons:
        return []
    title = "chosen" if plan.choice.fits else "needs least"
    estimate = f"estimated step: {format_seconds(plan.choice.settings.time.total)} s"
    return [f"{title}:", *(f"  {line}" for line in plan.choice.describe()), estimate, ""]


def _format_floor(floor: Floor) -> list[str]:
    from rollgraph.plan.time import TB_PER_SECOND, TFLOPS

    rows = [
        ("least time of a step, s", "repeated prompts", "shared prompts"),
        *((name, format_seconds(slow), format_seconds(floor.shared[name])) for name, slow in floor.repeated.items()),
        ("sum", *(format_seconds(sum(parts.values())) for parts in (floor.repeated, floor.shared))),
    ]
    speed = (floor.speed.tflops, floor.speed.tb_per_second)
    named = " (measured on an H200)" if speed == (TFLOPS, TB_PER_SECOND) else ""
    return [*format_table(rows), f"at {speed[0]:g} TFLOP/s and {speed[1]:g} TB/s{named}"]


def _verdict(plan: Plan) -> str:
    from rollgraph.plan.memory import format_bytes

    peak = format_bytes(plan.peak)
    if plan.device == "cpu":
        return f"peak {peak} in {plan.peak_phase}, without the process itself and its libraries"
    if plan.device_bytes is None:
        return f"peak {peak} in {plan.peak_phase}; give --device-gib to see whether it fits"
    if not plan.choice.fits:
        return f"it does not fit: {plan.misfit}"
    reserve = format_bytes(plan.choice.budget.reserve)
    available = f"the device has {format_bytes(plan.device_bytes)}, {reserve} of them in reserve"
    return f"needs {peak} in {plan.peak_phase}; {available}: it fits"


def _format_ranks(plan: Plan) -> str:
    layout = plan.layout
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes"
    return f"{layout.ranks} ranks on {nodes}, {layout.describe()}"
