"""`rollgraph train`: in this process, as a rank of torchrun, or on a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Any

from rollgraph.commands.arguments import add_config_arguments
from rollgraph.commands.reporting import load_or_report, run_and_report
from rollgraph.commands.view import dashboard_process, missing_packages
from rollgraph.config import Config
from rollgraph.parallel.ranks.failures import ExitCode


def add_parser(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="post-train a model",
        description="Train with a YAML configuration. If its output folder has a checkpoint, resume from the last one. "
        "For several processes: torchrun --nproc-per-node N -m rollgraph train FILE. To stop, press Ctrl-C, send "
        "SIGTERM or close the terminal: the run finishes the current step, saves it, and exits. Press Ctrl-C again to "
        "stop at once. Before the first step, a run always stops at once. Exit code: 130 after Ctrl-C; 143 after "
        "SIGTERM or a closed terminal; 2 if the configuration or other input cannot be used; 75 if another rank was "
        "lost, and then the same command resumes from the last checkpoint.",
    )
    add_config_arguments(train, "optimizer.lr=1e-6")
    train.set_defaults(run=run_train)
    train.add_argument("--view", action="store_true", help="serve a dashboard of the run, as `rollgraph view` does")
    train.add_argument(
        "--verbose", action="store_true", help="show more details, such as graph replays: log.verbose=true"
    )


def run_train(options: argparse.Namespace) -> int:
    if options.verbose:
        options.overrides = [*options.overrides, "log.verbose=true"]
    config = load_or_report(options)
    if config is None:
        return ExitCode.REFUSED
    if options.view and (problem := missing_packages()):
        print(f"rollgraph train: --view: {problem}", file=sys.stderr)
        return ExitCode.REFUSED
    if config.cluster.engine != "none":
        return _train_on_cluster(options, config)
    from rollgraph.parallel.ranks.join import joined
    from rollgraph.parallel.ranks.stop import StopRequest, ignore_terminations_at_exit, restore_termination_handlers
    from rollgraph.train import train

    stop = StopRequest()
    unfinished = False

    def run() -> None:
        nonlocal unfinished
        with joined(config.ranks) as world, ignore_terminations_at_exit(world):
            dashboard = dashboard_process(config.output) if options.view and world.rank == 0 else nullcontext()
            with dashboard:
                trained = train(config, world, stop=stop)
        unfinished = trained is not None and trained.progress.finished_steps < config.steps

    with restore_termination_handlers():
        code = run_and_report(options, run)
    terminated = code == ExitCode.FINISHED and unfinished and stop.by_termination
    return ExitCode.TERMINATED if terminated else code


def _train_on_cluster(options: argparse.Namespace, config: Config) -> int:
    from rollgraph.cluster.driver import ClusterOutcome, train_on_cluster
    from rollgraph.parallel.ranks.stop import StopRequest

    stop = StopRequest()
    outcomes: list[ClusterOutcome] = []
    with dashboard_process(config.output) if options.view else nullcontext():
        code = run_and_report(options, lambda: outcomes.append(train_on_cluster(config, stop=stop)))
    for outcome in outcomes:
        code = outcome.code
        if outcome.verdict:
            print(f"rollgraph {options.command}: {outcome.verdict}", file=sys.stderr)
        if code == ExitCode.FINISHED and stop.by_termination:
            code = ExitCode.TERMINATED
    return code
