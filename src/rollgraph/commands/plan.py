"""`rollgraph plan`: the memory of each phase, the time of a step and the layout, before anything is allocated."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rollgraph.commands.config_arguments import add_words
from rollgraph.commands.plan_tables import describe_layouts, describe_phases, describe_scaling, seconds, table
from rollgraph.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from rollgraph.run.communication import Network
    from rollgraph.run.plan import Plan
    from rollgraph.run.step_floor import Floor, Speed

DONE, TOO_LARGE, WRONG = 0, 1, 2
GIB = 2**30


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="show the memory and the least time a run needs, before it starts",
        description="Reads the configuration and the model's config.json, and allocates nothing. Shows the settings of "
        "memory that the run would choose and why, what each phase needs, and, if the run does not fit, what would, "
        "another layout of the ranks among it. "
        f"Exit code: {DONE} if it fits or that is unknown, {TOO_LARGE} if it does not fit, {WRONG} if the "
        "configuration is wrong.",
    )
    add_words(parser, "memory.cache_gib=20")
    parser.add_argument(
        "--ranks", type=int, help="number of processes (default: those of `cluster` with engine ray, else 1)"
    )
    parser.add_argument(
        "--nodes", type=int, help="number of nodes (default: those of `cluster`, else one for every 8 ranks)"
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="WHICH=GB/S,US",
        help="bandwidth of a rank in one direction, and latency of a hop, `inside` a node or `between` nodes; "
        "may be repeated (default: inside=450,3 for NVLink and between=50,10 for InfiniBand, nominal)",
    )
    parser.add_argument("--layouts", action="store_true", help="compare all layouts of the ranks, even if the run fits")
    parser.add_argument(
        "--scale",
        nargs="?",
        const="fixed",
        choices=("fixed", "grown"),
        help="estimate a step with up to 1,024 GPUs: with the configured prompts, or `grown`, with more prompts for "
        "more GPUs",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device to plan for (default: cuda); the least time on a cpu needs --tflops and --tb-per-second",
    )
    parser.add_argument("--device-gib", type=float, help="memory of the GPU (default: that of this machine's GPU)")
    parser.add_argument("--host-gib", type=float, help="host memory for each process (default: not limited)")
    parser.add_argument(
        "--tflops", type=float, help="of a bf16 matrix product (default: 785 for cuda, measured on an H200)"
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
    from rollgraph.run.base_model import resolve_adapter
    from rollgraph.run.inputs import check_device
    from rollgraph.run.plan import make_plan

    given = (options.device_gib, options.host_gib, options.tflops, options.tb_per_second)
    try:
        if any(value is not None and not 0 < value < math.inf for value in (options.ranks, options.nodes, *given)):
            raise ValueError(
                "--ranks, --nodes, --device-gib, --host-gib, --tflops and --tb-per-second must be positive and finite"
            )
        ranks, nodes = _ranks_and_nodes(options, config)
        check_device(config, options.device)
        plan = make_plan(
            resolve_adapter(config),
            ranks=ranks,
            nodes=nodes,
            network=_network(options.link),
            device_bytes=_device_bytes(options),
            host_bytes=None if options.host_gib is None else int(options.host_gib * GIB),
            device=options.device,
            speed=_speed(options),
            layouts=options.layouts,
            scale=options.scale,
        )
    except (ValueError, OSError) as error:
        print(f"rollgraph plan: {error}", file=sys.stderr)
        return WRONG
    print(json.dumps(plan.to_dict(), indent=2) if options.json else describe(plan))
    return TOO_LARGE if plan.fits is False else DONE


def _ranks_and_nodes(options: argparse.Namespace, config: Config) -> tuple[int, int]:
    """What was given and, in place of what was not, what the configuration says about its cluster."""
    from rollgraph.run.layout import assumed_nodes

    cluster = config.cluster
    if options.ranks is None and cluster.engine == "ray":
        nodes = options.nodes or cluster.nodes
        return nodes * cluster.ranks_on_node, nodes
    ranks = options.ranks or 1
    return ranks, options.nodes or assumed_nodes(ranks)


def _network(given: list[str]) -> Network:
    """The links that were given, e.g. between=25,10: 25 GB/s and 10 microseconds."""
    from rollgraph.run.communication import Link, Network

    found: dict[str, Link] = {}
    for text in given:
        which, _, numbers = text.partition("=")
        bandwidth, _, latency = numbers.partition(",")
        try:
            if which not in ("inside", "between"):
                raise ValueError
            found[which] = Link(float(bandwidth) * 1e9, float(latency) * 1e-6)
        except ValueError:
            raise ValueError(
                f"--link {text}: expected inside=GB/S,US or between=GB/S,US with positive numbers, such as "
                "between=50,10 for 50 GB/s and 10 microseconds"
            ) from None
    return Network(**found)


def _speed(options: argparse.Namespace) -> Speed | None:
    """What was given and, for a GPU, the speed of an H200 in place of what was not."""
    from rollgraph.run.step_floor import TB_PER_SECOND, TFLOPS, Speed

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


def describe(plan: Plan) -> str:
    """What was chosen, a table of memory, whether it fits, and a table of time where the device's speed is known."""
    from rollgraph.run.plan_lines import PHASES, gib

    title = "memory of a rank"
    if plan.layout.ranks > 1:
        title = f"memory of one of {_ranks(plan)}"
    rows = [(title, "where", *PHASES)]
    for line in filter(lambda line: line.nbytes, plan.lines):
        cells = (gib(line.nbytes) if phase in line.phases else "" for phase in PHASES)
        rows.append((line.name, line.where, *cells))
    rows.append(("sum", "device", *(gib(plan.total(phase)) for phase in PHASES)))
    if plan.device != "cpu":
        rows.append(("sum", "host", *(gib(plan.total(phase, "host")) for phase in PHASES)))
    text = [*_describe_choice(plan), *table(rows), "", _verdict(plan)]
    if plan.proposal:
        text += [plan.proposal]
    if plan.floor is not None:
        text += ["", *_describe_floor(plan.floor)]
        if plan.layout.ranks > 1 and plan.choice.fits:
            text += ["", *describe_phases(plan)]
    if plan.layouts:
        text += ["", *describe_layouts(plan)]
    if plan.scaling is not None:
        text += ["", *describe_scaling(plan.scaling)]
    return "\n".join([*text, *(f"note: {note}" for note in plan.notes)])


def _describe_choice(plan: Plan) -> list[str]:
    if not plan.choice.reasons:
        return []
    title = "chosen" if plan.choice.fits else "needs least"
    estimate = f"estimated step: {seconds(plan.choice.settings.time.total)} s"
    return [f"{title}:", *(f"  {line}" for line in plan.choice.describe()), estimate, ""]


def _describe_floor(floor: Floor) -> list[str]:
    from rollgraph.run.step_floor import TB_PER_SECOND, TFLOPS

    rows = [
        ("least time of a step, s", "repeated prompts", "shared prompts"),
        *((name, seconds(slow), seconds(floor.shared[name])) for name, slow in floor.repeated.items()),
        ("sum", *(seconds(sum(parts.values())) for parts in (floor.repeated, floor.shared))),
    ]
    speed = (floor.speed.tflops, floor.speed.tb_per_second)
    named = " (measured on an H200)" if speed == (TFLOPS, TB_PER_SECOND) else ""
    return [*table(rows), f"at {speed[0]:g} TFLOP/s and {speed[1]:g} TB/s{named}"]


def _verdict(plan: Plan) -> str:
    from rollgraph.run.plan_lines import gib

    peak = gib(plan.peak)
    if plan.device == "cpu":
        return f"peak {peak} in {plan.peak_phase}, beside the process itself and its libraries"
    if plan.device_bytes is None:
        return f"peak {peak} in {plan.peak_phase}; give --device-gib to see whether it fits"
    if not plan.choice.fits:
        return f"it does not fit: {plan.misfit}"
    reserve = gib(plan.choice.budget.reserve)
    available = f"the device has {gib(plan.device_bytes)}, {reserve} of them in reserve"
    return f"needs {peak} in {plan.peak_phase}; {available}: it fits"


def _ranks(plan: Plan) -> str:
    layout = plan.layout
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes"
    return f"{layout.ranks} ranks on {nodes}, {layout.describe()}"
