"""`rollgraph.Trainer`: a run described by Python arguments instead of a file, for scripts and notebooks.

    trainer = Trainer(model="models/Qwen2.5-0.5B", train=rows, rewards=[exact], max_tokens=64, output="runs/mine")
    run = trainer.train(steps=200)

Adds no rules: arguments are configuration keys, and the run is the same as that of `rollgraph train`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from rollgraph.config import Config, config_from_keywords
from rollgraph.config.reader import BrokenRule
from rollgraph.errors import InvalidInput
from rollgraph.inputs.built_in_names import find_name_problems
from rollgraph.log.streams import survive_closed_terminal
from rollgraph.model.weights.peft_config import read_lora_config
from rollgraph.parallel.ranks.join import joined
from rollgraph.parallel.ranks.stop import StopRequest
from rollgraph.rl.data.python_objects import MODEL_FOLDER, PythonObjects, read_reward, read_rows
from rollgraph.rl.rewards.loading import is_async
from rollgraph.run.outcome import TrainedRun
from rollgraph.run.setup import Run
from rollgraph.train import open_run, take_steps

# -- callbacks of transformers ---------------------------------------------------------------------

VALIDATION, EVAL = "validation/", "eval_"


def is_trainer_callback(callback: Any) -> bool:
    return not callable(callback) and hasattr(callback, "on_step_end")


class StepEvents:
    """Calls the events of a step: `on_step_end`, `on_log` and, after a validation, `on_evaluate`.

    `on_train_begin` is called before the first step and `on_train_end` after the last. `args` has the few fields of
    TrainingArguments that a run knows. There is no `model`, because graphs hold its weights.
    """

    def __init__(self, callback: Any, config: Config) -> None:
        from transformers import TrainerControl, TrainerState

        self._callback = callback
        self._args = SimpleNamespace(
            output_dir=config.output, max_steps=config.steps, learning_rate=config.optimizer.lr, seed=config.seed
        )
        self._state = TrainerState(max_steps=config.steps, log_history=[])
        self._control = TrainerControl()
        self._began = False

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the callback asks to stop."""
        if not self._began:
            self._state.global_step = step
            self._call("on_train_begin")
            self._began = True
        self._state.global_step = step + 1
        self._call("on_step_end")
        self._state.log_history.append({**metrics, "step": step + 1})
        self._call("on_log", logs=metrics)
        evaluation_metrics = {
            EVAL + name.removeprefix(VALIDATION): value for name, value in metrics.items() if VALIDATION in name
        }
        if evaluation_metrics:
            self._call("on_evaluate", metrics=evaluation_metrics)
        stops = bool(self._control.should_training_stop)
        if stops or step + 1 == self._args.max_steps:
            self._call("on_train_end")
        return stops

    def _call(self, event: str, **values: Any) -> None:
        answer = getattr(self._callback, event)(self._args, self._state, self._control, **values)
        self._control = answer or self._control


# -- the trainer -----------------------------------------------------------------------------------

CHAT = "rollgraph.rl.chat:Chat"
Callback = Callable[[int, dict[str, float]], Any]  # (step, metrics)


class Step(NamedTuple):
    """A finished step.

    >>> Step(number=0, metrics={"reward": 0.25, "loss": 0.01})
    """

    number: int
    metrics: dict[str, float]  # on rank 0


class Trainer:
    """Trains a model with reinforcement learning.

    - `model`: a model folder, a hub id, a (model, tokenizer) pair of transformers, or the configuration section `model`
      as a mapping.
    - `train`, `validation`: a path, a hub id, a `datasets.Dataset`, a `pandas.DataFrame`, or any iterable of mappings
      with a `prompt`.
    - `rewards`: reward functions or names of built-in ones. Each is a function or name, a tuple (reward, weight) or
      (reward, weight, options), or a mapping with `function` or `name`, `weight`, `options` and `label`.
    - `algorithm`: the name or the import path of an algorithm, its class, or the section `algorithm` as a mapping.
    - `callbacks` are called after each step, on rank 0, with the step and its metrics. If one returns True, the run
      saves and ends after this step. A `TrainerCallback` of transformers gets the events of a step.
    - `episode`: a class with the state of one rollout, for a chat environment. To set other options of the environment
      too, pass `environment={"name": Chat, "options": {"episode": ...}}`.
    - Every other argument is a configuration key: `max_tokens` is `rollout.max_tokens`, `lr` is `optimizer.lr`, and
      `checkpoint_every` is `checkpoint.every`. A whole section works too, as in `graph={"impl": "none"}`. `environment`
      may be a class or a function, and so may values of its options.

    A bad argument raises ConfigError or InvalidInput here, both ValueErrors, before anything is loaded.
    """

    def __init__(
        self,
        model: Any,
        train: Any = None,
        *,
        validation: Any = None,
        rewards: Any = (),
        algorithm: str | Callable[..., Any] | Mapping[str, Any] = "grpo",
        callbacks: Callback | Iterable[Callback] = (),
        episode: type | str | None = None,
        **settings: Any,
    ) -> None:
        self._callbacks = [_check_callback(callback) for callback in _as_list(callbacks, "callbacks")]
        self._settings = settings
        settings.setdefault("output", "runs/default")
        if episode is not None:
            if settings.get("environment") is not None:
                raise InvalidInput(
                    "is an option of the environment, but `environment` is set as well", argument="episode"
                )
            settings["environment"] = {"name": CHAT, "options": {"episode": episode}}
        if isinstance(settings.get("tokenizer"), str | os.PathLike):
            settings["tokenizer_path"] = settings.pop("tokenizer")
        if hasattr(settings.get("adapter"), "peft_type"):
            settings["adapter"] = read_lora_config(settings["adapter"])
        model_object, tokenizer = _read_model(model, settings)
        rows = {}
        data = {}
        for key, source in (("train", train), ("validation", validation)):
            if source is not None:
                data[key], row_list = read_rows(source, key)
                if row_list is not None:
                    rows[data[key]] = row_list
        entries = [read_reward(entry) for entry in _as_list(rewards, "rewards")]
        functions = {index: function for index, (_, function) in enumerate(entries) if function is not None}
        self._sections: dict[str, Any] = {
            "data": data,
            "algorithm": algorithm if isinstance(algorithm, Mapping) else {"name": algorithm},
        }
        if entries:
            self._sections["reward"] = {"functions": [spec for spec, _ in entries]}
        self._objects = PythonObjects(rows, functions, model_object, tokenizer)
        self._run: TrainedRun | None = None
        self._stop: StopRequest | None = None  # of the open run
        self.config = self._configure(None)

    # -- training ----------------------------------------------------------------------------------

    def train(self, steps: int | None = None) -> TrainedRun:
        """Take the remaining steps and return the trained run.

        A run that was stopped, or that now has more `steps`, continues where it ended.
        """
        for _ in self._take_steps(steps):
            pass
        return self.run

    def __iter__(self) -> Iterator[Step]:
        """Take the remaining steps one at a time. Leaving the loop early stops the run, after saving."""
        yield from self._take_steps(None)

    def stop(self) -> None:
        """Save and end the run after the current step. May be called from any thread."""
        if self._stop is not None:
            self._stop.request()

    @contextmanager
    def open(self, steps: int | None = None) -> Iterator[tuple[Run, range]]:
        """Yields the run and its remaining steps, for your own training loop; docs/python_api.md has an example."""
        self.close()
        config = self._configure(steps)
        with (
            joined(config.ranks) as world,
            self._stoppable() as stop,
            open_run(config, world, self._objects, stop=stop) as (run, first_step),
        ):
            if run is None or first_step is None:
                raise RuntimeError(f"{config.output} has no steps left: raise `steps`, or choose another output")
            yield run, range(first_step, config.steps)

    @property
    def run(self) -> TrainedRun:
        """The run after its last step."""
        if self._run is None:
            raise RuntimeError("the run has not ended yet: call train(), or take all steps")
        return self._run

    def close(self) -> None:
        """Free the model and the graphs of the last run."""
        if self._run is not None:
            self._run.close()
        self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_steps(self, steps: int | None) -> Iterator[Step]:
        self.close()
        config = self._configure(steps)
        latest: dict[str, float] = {}
        callbacks = [
            StepEvents(callback, config) if is_trainer_callback(callback) else callback for callback in self._callbacks
        ]

        def on_step(number: int, metrics: dict[str, float]) -> None:
            latest.clear()
            latest.update(metrics)
            for callback in callbacks:
                if _is_true(callback(number, dict(metrics))):
                    self.stop()

        with ExitStack() as connection:
            world = connection.enter_context(joined(config.ranks))
            try:
                with (
                    self._stoppable() as stop,
                    open_run(config, world, self._objects, on_step=on_step, stop=stop, stays_open=True) as run_and_step,
                ):
                    run, first_step = run_and_step
                    if run is not None and first_step is not None:
                        with closing(take_steps(run, first_step)) as numbers:
                            for number in numbers:
                                yield Step(number, dict(latest))
            except GeneratorExit:  # the caller left its loop; the run is saved and closed
                return
            self._run = TrainedRun(config, world, self._objects, run, connection.pop_all())

    @contextmanager
    def _stoppable(self) -> Iterator[StopRequest]:
        """Makes `stop()` stop this run, from its set-up to its end. A closed terminal stops it, too."""
        previous_stop = self._stop
        self._stop = StopRequest()
        try:
            with survive_closed_terminal():
                yield self._stop
        finally:
            self._stop = previous_stop

    def _configure(self, steps: int | None) -> Config:
        arguments = {**self._settings, **self._sections}
        for name in self._settings.keys() & self._sections.keys():  # e.g. other keys of `data` beside the paths
            if isinstance(self._settings[name], Mapping):
                arguments[name] = {**self._settings[name], **self._sections[name]}
        if steps is not None:
            arguments["steps"] = steps
        return config_from_keywords(arguments, find_name_problems, _cluster_rules)


def _cluster_rules(config: Config) -> list[BrokenRule]:
    """Python objects such as rows and functions live in this process, out of reach of cluster ranks."""
    if config.cluster.engine == "none":
        return []
    problem = f"{config.cluster.engine} starts ranks on a cluster, which a script cannot: use `rollgraph train`"
    return [("cluster_by_command", "cluster.engine", problem)]


def _read_model(model: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Add the model's key to the settings; returns the model and tokenizer if they are Python objects."""
    if isinstance(model, str | os.PathLike):
        settings["model_path"] = model
        return None, None
    if isinstance(model, Mapping):
        settings["model"] = model
        return None, None
    model_and_tokenizer: Sequence[Any] = model if isinstance(model, tuple | list) else ()
    if len(model_and_tokenizer) != 2 or not all(hasattr(part, "save_pretrained") for part in model_and_tokenizer):
        detail = f"expected a folder, a hub id, a (model, tokenizer) of transformers or a mapping, got {model!r:.80}"
        raise InvalidInput(detail, argument="model")
    if hasattr(model_and_tokenizer[0], "peft_config"):
        detail = 'has adapters of PEFT: save them, and give the base model and adapter={"path": folder}, or merge them'
        raise InvalidInput(detail, argument="model")
    settings["model_path"] = str(Path(str(settings["output"])) / MODEL_FOLDER)
    return model_and_tokenizer[0], model_and_tokenizer[1]


def _as_list(entries: Any, name: str) -> list[Any]:
    """A list of entries; a single reward or callback becomes a list of one."""
    if isinstance(entries, str | Mapping) or callable(entries) or is_trainer_callback(entries):
        return [entries]
    if not isinstance(entries, Iterable):
        raise InvalidInput(f"expected a list of {name}, got {entries!r:.80}", argument=name)
    return list(entries)


def _check_callback(callback: Any) -> Any:
    """Check now that a callback can be called: otherwise it would end the run after its first step."""
    if is_trainer_callback(callback):
        return callback
    problem = "it is async" if is_async(callback) else ""
    try:
        inspect.signature(callback).bind(0, {})
    except TypeError as error:
        problem = str(error)
    except ValueError:  # some C functions have no signature
        pass
    if problem:
        detail = f"expected a function of (step, metrics), got {callback!r:.80} ({problem})"
        raise InvalidInput(detail, argument="callbacks")
    return callback


def _is_true(answer: Any) -> bool:
    """Whether an answer is True, or the True of a NumPy or PyTorch comparison."""
    return answer is True or (str(getattr(answer, "dtype", "")).endswith("bool") and bool(answer))
