"""`rollgraph eval`, and loading the checkpoint or model that `eval` and `export` are about."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.commands.arguments import add_config_arguments
from rollgraph.commands.reporting import load_or_report, run_and_report
from rollgraph.config import Config
from rollgraph.log.streams import note_to_stderr, redirect_stdout_to_stderr
from rollgraph.parallel.ranks.failures import ExitCode

if TYPE_CHECKING:
    from rollgraph.run.model_source import ModelSource


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="evaluate a model on a run's validation prompts",
        description="Evaluate the latest checkpoint in the configuration's output folder or, with --model, any other "
        "model, such as the base model. Prints the mean reward, accuracy and pass@k on data.validation as JSON. With "
        "torchrun, prompts are distributed over the ranks. Accuracy is the fraction of correct samples. pass@k is the "
        "fraction of prompts with at least one correct sample out of k = validation.samples, sampled at "
        "validation.temperature. A sample is correct if it has the highest reward that the weights of the reward "
        "functions allow. Penalties do not count.",
    )
    add_config_arguments(parser, "optimizer.lr=1e-6")
    parser.set_defaults(run=run_eval)
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="evaluate this model instead: a model folder, an id on the Hugging Face Hub, an adapter, a checkpoint, or "
        "the output folder of another run; data, rewards and sampling are still the configuration's, and so is "
        "tokenizer.path for a model or an adapter, while a checkpoint or a run has its own tokenizer",
    )
    parser.add_argument("--which", choices=("latest", "best"), help="checkpoint of a run (default: latest)")


def run_eval(options: argparse.Namespace) -> int:
    """Validate a checkpoint. Rank 0 prints the metrics to stdout, as one line of JSON and nothing else."""
    results: list[str] = []  # one line on rank 0; none on other ranks, or after an error

    def act(run: Any, options: argparse.Namespace) -> None:
        metrics_json = json.dumps(_evaluate(run))
        if run.world.rank == 0:
            results.append(metrics_json)

    with redirect_stdout_to_stderr():  # reward functions and their modules may print
        code = with_checkpoint(options, act)
    for result in results:
        print(result)
    return code


def _evaluate(run: Any) -> dict[str, float]:
    from rollgraph.run.rollouts import summarize_reward_failures
    from rollgraph.run.validation import evaluate_policy

    if not run.inputs.can_validate:
        raise ValueError("data.validation is not set, so there is nothing to evaluate on")
    metrics = evaluate_policy(run, "eval")
    for message in (*run.inputs.rewards.unread(), summarize_reward_failures(run.inputs)):
        if message:
            print(message, file=sys.stderr)
    return metrics


def with_checkpoint(options: argparse.Namespace, act: Callable[[Any, argparse.Namespace], None]) -> int:
    """Load the checkpoint, or the model of --model, and call `act` with the run."""
    config = load_or_report(options)
    if config is None:
        return ExitCode.REFUSED
    from rollgraph.parallel.ranks.join import joined
    from rollgraph.parallel.ranks.world import World
    from rollgraph.rl.data.hub_pins import share_model_folder
    from rollgraph.run.model_source import CHECKPOINTS, ModelSource, configure_model, identify_source
    from rollgraph.run.setup import make_run

    def run() -> None:
        with joined(config.ranks) as world:
            load_and_act(world)

    def load_and_act(world: World) -> None:
        if options.command == "export" and options.merge and config.adapter is None:
            raise ValueError("--merge: the run has no adapter (adapter: null), so all its weights are exported anyway")
        if options.model is not None:
            source = identify_source(share_model_folder(options.model, world, note_to_stderr), options.which)
            run = make_run(configure_model(config, source), world, writes=False)
        else:
            if not (Path(config.output) / CHECKPOINTS).is_dir():
                raise ValueError(f"{config.output} has no checkpoint{_checkpoint_hint(options, config)}")
            source = ModelSource("run", Path(config.output))
            run = make_run(config, world, writes=False)
        try:
            source_text = _load_weights(run, source, options.which)
            if world.rank == 0:
                print(source_text, file=sys.stderr)
            act(run, options)
        finally:
            run.close()

    return run_and_report(options, run)


def _checkpoint_hint(options: argparse.Namespace, config: Config) -> str:
    """A hint for a missing checkpoint: the working directory may be wrong, or the user wants to evaluate a baseline."""
    output = Path(config.output)
    folder_hint = "" if output.is_absolute() or output.exists() else f": there is no such folder in {Path.cwd()}"
    if options.command != "eval" or config.model.path is None:
        return folder_hint
    return f"{folder_hint}; for the model that training begins with, add --model {config.model.path}"


def _load_weights(run: Any, source: ModelSource, which: str | None) -> str:
    """Load the weights of a checkpoint, and return a description of the source. A model folder is loaded already.

    We choose a run's checkpoint now and not before graph capture, because an active run deletes old ones meanwhile.
    """
    from rollgraph.run.model_source import no_checkpoint_error, verify_checkpoint

    if source.kind in ("model", "adapter"):
        return str(source.path)
    if source.kind == "checkpoint":
        run.load_weights(verify_checkpoint(source.path))
        return str(source.path)
    checkpoints = run.checkpoints
    saved = checkpoints.best() if which == "best" else checkpoints.latest()
    for problem in checkpoints.new_problems():
        print(problem, file=sys.stderr)
    if saved is None:
        raise no_checkpoint_error(source.path, unscored=bool(checkpoints.complete()), broken=bool(checkpoints.broken))
    run.load_weights(saved)
    return f"step {saved.step} of {source.path}"
