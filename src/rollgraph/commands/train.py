"""`rollgraph train`, and `rollgraph eval` and `rollgraph export` for its checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.commands.arguments import add_config_arguments
from rollgraph.commands.view import dashboard_process, missing_packages
from rollgraph.config import Config, ConfigError, load_config
from rollgraph.errors import MachineError, user_line
from rollgraph.files import FileError, check_path
from rollgraph.inputs.built_in_names import find_name_problems
from rollgraph.log.streams import note_to_stderr, redirect_stdout_to_stderr
from rollgraph.parallel.ranks.failures import ExitCode, RankLost, StoppedInSetup, is_user_error

if TYPE_CHECKING:
    from rollgraph.run.model_source import ModelSource


# -- errors that end a command ---------------------------------------------------------------------
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


# -- the commands ----------------------------------------------------------------------------------


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
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model on a run's validation prompts",
        description="Evaluate the latest checkpoint in the configuration's output folder or, with --model, any other "
        "model, such as the base model. Prints the mean reward, accuracy and pass@k on data.validation as JSON. With "
        "torchrun, prompts are distributed over the ranks. Accuracy is the fraction of correct samples. pass@k is the "
        "fraction of prompts with at least one correct sample out of k = validation.samples, sampled at "
        "validation.temperature. A sample is correct if it has the highest reward that the weights of the reward "
        "functions allow. Penalties do not count.",
    )
    export = commands.add_parser(
        "export",
        help="write a checkpoint as a model folder or an adapter",
        description="Write a folder that transformers and other tools can load. For a run with an adapter, write the "
        "adapter alone, in PEFT's format or, with --merge, the model with the adapter merged into its weights. The "
        "run's folder is not changed.",
    )
    for parser, run in ((train, run_train), (evaluate, run_eval), (export, run_export)):
        add_config_arguments(parser, "optimizer.lr=1e-6")
        parser.set_defaults(run=run)
    export.add_argument("--to", required=True, help="folder to write; it must be empty or not exist")
    export.add_argument("--force", action="store_true", help="overwrite the model in a folder that is not empty")
    export.add_argument("--merge", action="store_true", help="merge the adapter into the model, and write the model")
    export.set_defaults(model=None)
    evaluate.add_argument(
        "--model",
        metavar="FOLDER",
        help="evaluate this model instead: a model folder, an id on the Hugging Face Hub, an adapter, a checkpoint, or "
        "the output folder of another run; data, rewards and sampling are still the configuration's, and so is "
        "tokenizer.path for a model or an adapter, while a checkpoint or a run has its own tokenizer",
    )
    train.add_argument("--view", action="store_true", help="serve a dashboard of the run, as `rollgraph view` does")
    train.add_argument(
        "--verbose", action="store_true", help="show more details, such as graph replays: log.verbose=true"
    )
    for parser in (evaluate, export):
        parser.add_argument("--which", choices=("latest", "best"), help="checkpoint of a run (default: latest)")


def _load_config(options: argparse.Namespace) -> Config | None:
    try:
        return load_config(options.config, options.overrides, find_name_problems)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return None


def run_train(options: argparse.Namespace) -> int:
    if options.verbose:
        options.overrides = [*options.overrides, "log.verbose=true"]
    config = _load_config(options)
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
        code = _run_and_report(options, run)
    terminated = code == ExitCode.FINISHED and unfinished and stop.by_termination
    return ExitCode.TERMINATED if terminated else code


def _train_on_cluster(options: argparse.Namespace, config: Config) -> int:
    from rollgraph.cluster.driver import ClusterOutcome, train_on_cluster
    from rollgraph.parallel.ranks.stop import StopRequest

    stop = StopRequest()
    outcomes: list[ClusterOutcome] = []
    with dashboard_process(config.output) if options.view else nullcontext():
        code = _run_and_report(options, lambda: outcomes.append(train_on_cluster(config, stop=stop)))
    for outcome in outcomes:
        code = outcome.code
        if outcome.verdict:
            print(f"rollgraph {options.command}: {outcome.verdict}", file=sys.stderr)
        if code == ExitCode.FINISHED and stop.by_termination:
            code = ExitCode.TERMINATED
    return code


def _run_and_report(options: argparse.Namespace, run: Callable[[], None]) -> int:
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


def run_eval(options: argparse.Namespace) -> int:
    """Validate a checkpoint. Rank 0 prints the metrics to stdout, as one line of JSON and nothing else."""
    results: list[str] = []  # one line on rank 0; none on other ranks, or after an error

    def act(run: Any, options: argparse.Namespace) -> None:
        metrics_json = json.dumps(_evaluate(run))
        if run.world.rank == 0:
            results.append(metrics_json)

    with redirect_stdout_to_stderr():  # reward functions and their modules may print
        code = _with_checkpoint(options, act)
    for result in results:
        print(result)
    return code


def run_export(options: argparse.Namespace) -> int:
    try:
        has_files = any(Path(check_path(options.to)).iterdir())
    except FileNotFoundError:
        has_files = False
    except OSError as error:
        print(f"rollgraph export: --to {options.to}: {error.strerror}", file=sys.stderr)
        return ExitCode.REFUSED
    except FileError as error:
        print(f"rollgraph export: --to {error}", file=sys.stderr)
        return ExitCode.REFUSED
    if has_files and not options.force:
        print(
            f"rollgraph export: --to {options.to}: is not empty; choose another folder, or overwrite it with --force",
            file=sys.stderr,
        )
        return ExitCode.REFUSED
    return _with_checkpoint(options, lambda run, options: run.export(Path(options.to), merge=options.merge))


def _evaluate(run: Any) -> dict[str, float]:
    from rollgraph.run.rollouts import evaluate_policy, summarize_reward_failures

    if not run.inputs.can_validate:
        raise ValueError("data.validation is not set, so there is nothing to evaluate on")
    metrics = evaluate_policy(run, "eval")
    for message in (*run.inputs.rewards.unread(), summarize_reward_failures(run.inputs)):
        if message:
            print(message, file=sys.stderr)
    return metrics


def _with_checkpoint(options: argparse.Namespace, act: Callable[[Any, argparse.Namespace], None]) -> int:
    """Load the checkpoint, or the model of --model, and call `act` with the run."""
    config = _load_config(options)
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

    return _run_and_report(options, run)


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
