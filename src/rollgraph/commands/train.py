"""`rollgraph train`, and `rollgraph eval` and `rollgraph export` for what it made."""

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

from rollgraph.commands.config_arguments import add_words
from rollgraph.commands.streams import print_to_stderr, printing_to_stderr
from rollgraph.commands.view import missing_packages, viewed
from rollgraph.config import Config, ConfigError, load_config
from rollgraph.distributed.exit_codes import ExitCode, is_users
from rollgraph.errors import UserError
from rollgraph.files import FileError, check_path
from rollgraph.run.built_in_names import wrong_names

if TYPE_CHECKING:
    from rollgraph.run.model_source import ModelSource


def add_to(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="post-train a model",
        description="Run a YAML configuration, from its last checkpoint if there is one. With several processes: "
        "torchrun --nproc-per-node N -m rollgraph train FILE. SIGTERM ends the run after the current step, saved, with "
        "exit code 143. Ctrl-C does the same with exit code 130; press it again to end at once. Before the first step, "
        "either ends the run at once. Exit code 2 means that something given cannot be used, and 75 that another rank "
        "was lost; start the run again to go on from its last checkpoint.",
    )
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model on a run's validation prompts",
        description="Evaluate the latest checkpoint in the configuration's output folder, or with --model any other "
        "model, such as the one that training begins with. Print the mean reward, accuracy and pass@k on "
        "data.validation as JSON. With torchrun, ranks divide the prompts among themselves. Accuracy is the share of "
        "samples that are right; pass@k is the share of prompts with at least one right sample out of "
        "k = validation.samples, drawn at validation.temperature. A sample is right if its reward is the best that the "
        "weights of the reward functions allow; penalties do not count.",
    )
    export = commands.add_parser(
        "export",
        help="write a checkpoint as a model folder or an adapter",
        description="Write a folder that transformers and other tools can load. Of a run with adapters, write the "
        "adapter alone, in PEFT's format, or with --merge the model with the adapter added to its weights. The run's "
        "folder is only read.",
    )
    for parser, run in ((train, run_train), (evaluate, run_eval), (export, run_export)):
        add_words(parser, "optimizer.lr=1e-6")
        parser.set_defaults(run=run)
    export.add_argument("--to", required=True, help="folder to write; it must be empty or not exist")
    export.add_argument("--force", action="store_true", help="overwrite the model in a folder that is not empty")
    export.add_argument("--merge", action="store_true", help="write the model with its adapter, instead of the adapter")
    export.set_defaults(model=None)
    evaluate.add_argument(
        "--model",
        metavar="FOLDER",
        help="evaluate this instead: a model folder, or an id of the Hugging Face Hub (a baseline), an adapter, a "
        "checkpoint, or the output folder of another run, with its tokenizer; data, rewards, sampling and, for a model "
        "folder or an adapter, tokenizer.path are the configuration's",
    )
    train.add_argument("--view", action="store_true", help="serve a page that shows the run, as `rollgraph view` does")
    for parser in (evaluate, export):
        parser.add_argument("--which", choices=("latest", "best"), help="checkpoint of a run (default: latest)")


def _load(options: argparse.Namespace) -> Config | None:
    try:
        return load_config(options.config, options.overrides, wrong_names)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return None


def run_train(options: argparse.Namespace) -> int:
    config = _load(options)
    if config is None:
        return ExitCode.REFUSED
    if options.view and (problem := missing_packages()):
        print(f"rollgraph train: --view: {problem}", file=sys.stderr)
        return ExitCode.REFUSED
    if config.cluster.engine != "none":
        return _train_on_cluster(options, config)
    from rollgraph.distributed.attempt import joined
    from rollgraph.run.stop import SIGTERM, StopRequest, sigterm_ignored_at_the_end, sigterm_restored
    from rollgraph.train import train

    stop = StopRequest()
    unfinished = False

    def run() -> None:
        nonlocal unfinished
        with joined(config.ranks) as world, sigterm_ignored_at_the_end(world):
            shown = viewed(config.output) if options.view and world.rank == 0 else nullcontext()
            with shown:
                trained = train(config, world, stop=stop)
        unfinished = trained is not None and trained.progress.taken < config.steps

    with sigterm_restored():
        code = _told(options, run)
    terminated = code == ExitCode.FINISHED and unfinished and stop.asked_by == SIGTERM
    return ExitCode.TERMINATED if terminated else code


def _train_on_cluster(options: argparse.Namespace, config: Config) -> int:
    from rollgraph.cluster.launch import Ending, train_on_cluster
    from rollgraph.run.stop import SIGTERM, StopRequest

    stop = StopRequest()
    endings: list[Ending] = []
    with viewed(config.output) if options.view else nullcontext():
        code = _told(options, lambda: endings.append(train_on_cluster(config, stop=stop)))
    for ending in endings:
        code = ending.code
        if ending.verdict:
            print(f"rollgraph {options.command}: {ending.verdict}", file=sys.stderr)
        if code == ExitCode.FINISHED and stop.asked_by == SIGTERM:
            code = ExitCode.TERMINATED
    return code


def _told(options: argparse.Namespace, run: Callable[[], None]) -> int:
    """Run, and report an error in one line. Returns the exit code."""
    from rollgraph.distributed.attempt import end_process
    from rollgraph.distributed.lost_ranks import StoppedInSetup

    try:
        run()
    except (UserError, ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("ROLLGRAPH_TRACEBACK"):
            traceback.print_exc()
        else:
            print(f"rollgraph {options.command}: {error}\n(ROLLGRAPH_TRACEBACK=1 shows where)", file=sys.stderr)
        return end_process(exit_code_of(error))
    except StoppedInSetup as stopped:
        print(f"rollgraph {options.command}: {stopped}; saved checkpoints are whole", file=sys.stderr)
        return end_process(ExitCode.TERMINATED)
    except KeyboardInterrupt:
        print(f"rollgraph {options.command}: interrupted; saved checkpoints are whole", file=sys.stderr)
        return end_process(ExitCode.INTERRUPTED)
    return ExitCode.FINISHED


def exit_code_of(error: BaseException) -> ExitCode:
    from rollgraph.distributed.lost_ranks import RankLost

    if isinstance(error, RankLost):
        return ExitCode.REFUSED if error.loss.refused else ExitCode.RANK_LOST
    return ExitCode.REFUSED if is_users(error) else ExitCode.FAILED


def run_eval(options: argparse.Namespace) -> int:
    answers: list[str] = []

    def act(run: Any, options: argparse.Namespace) -> None:
        found = json.dumps(_evaluated(run))
        if run.world.rank == 0:
            answers.append(found)

    with printing_to_stderr():  # reward functions and their modules may print
        code = _with_checkpoint(options, act)
    for answer in answers:
        print(answer)
    return code


def run_export(options: argparse.Namespace) -> int:
    try:
        full = any(Path(check_path(options.to)).iterdir())
    except FileNotFoundError:
        full = False
    except OSError as error:
        print(f"rollgraph export: --to {options.to}: {error.strerror}", file=sys.stderr)
        return ExitCode.REFUSED
    except FileError as error:
        print(f"rollgraph export: --to {error}", file=sys.stderr)
        return ExitCode.REFUSED
    if full and not options.force:
        print(
            f"rollgraph export: --to {options.to}: is not empty; choose another folder, or overwrite it with --force",
            file=sys.stderr,
        )
        return ExitCode.REFUSED
    return _with_checkpoint(options, lambda run, options: run.export(Path(options.to), merge=options.merge))


def _evaluated(run: Any) -> dict[str, float]:
    from rollgraph.run.failures import summarize_reward_failures
    from rollgraph.run.rollouts import evaluate

    if not run.inputs.can_validate:
        raise ValueError("data.validation is not set, so there is nothing to evaluate on")
    found = evaluate(run, "eval")
    for message in (*run.inputs.rewards.unread(), summarize_reward_failures(run.inputs)):
        if message:
            print(message, file=sys.stderr)
    return found


def _with_checkpoint(options: argparse.Namespace, act: Callable[[Any, argparse.Namespace], None]) -> int:
    """Load a checkpoint, or the model of --model, and act on it."""
    config = _load(options)
    if config is None:
        return ExitCode.REFUSED
    from rollgraph.distributed.attempt import joined
    from rollgraph.distributed.world import World
    from rollgraph.run.hub_pins import share_model_folder
    from rollgraph.run.model_source import CHECKPOINTS, ModelSource, recognize, with_model
    from rollgraph.run.setup import make_run

    def run() -> None:
        with joined(config.ranks) as world:
            look(world)

    def look(world: World) -> None:
        if options.command == "export" and options.merge and config.adapter is None:
            raise ValueError("--merge: the run has no adapter (adapter: null), so all its weights are exported anyway")
        if options.model is not None:
            source = recognize(share_model_folder(options.model, world, print_to_stderr), options.which)
            run = make_run(with_model(config, source), world, writes=False)
        else:
            if not (Path(config.output) / CHECKPOINTS).is_dir():
                raise ValueError(f"{config.output} has no checkpoint{_checkpoint_hint(options, config)}")
            source = ModelSource("run", Path(config.output))
            run = make_run(config, world, writes=False)
        try:
            loaded = _load_weights(run, source, options.which)
            if world.rank == 0:
                print(loaded, file=sys.stderr)
            act(run, options)
        finally:
            run.close()

    return _told(options, run)


def _checkpoint_hint(options: argparse.Namespace, config: Config) -> str:
    """What may help where there is no checkpoint: another folder to start in, or a baseline."""
    output = Path(config.output)
    absent = "" if output.is_absolute() or output.exists() else f": there is no such folder in {Path.cwd()}"
    if options.command != "eval" or config.model.path is None:
        return absent
    return f"{absent}; for the model that training begins with, add --model {config.model.path}"


def _load_weights(run: Any, source: ModelSource, which: str | None) -> str:
    """Load what the run's model is to be, and say what that is. A model folder has been loaded already.

    A checkpoint of a run is chosen now rather than before the captures, because a run that is alive deletes old ones.
    """
    from rollgraph.run.model_source import check_checkpoint, none_found

    if source.kind in ("model", "adapter"):
        return str(source.path)
    if source.kind == "checkpoint":
        run.load_weights(check_checkpoint(source.path))
        return str(source.path)
    checkpoints = run.checkpoints
    saved = checkpoints.best() if which == "best" else checkpoints.latest()
    for problem in checkpoints.unread():
        print(problem, file=sys.stderr)
    if saved is None:
        raise none_found(source.path, unscored=bool(checkpoints.complete()), broken=bool(checkpoints.broken))
    run.load_weights(saved)
    return f"step {saved.step} of {source.path}"
