"""`rollgraph.Trainer`: a run described by Python arguments instead of a file, for scripts and notebooks.

    trainer = Trainer(model="models/Qwen2.5-0.5B", train=rows, rewards=[exact], max_tokens=64, output="runs/mine")
    run = trainer.train(steps=200)

Owns no rule of its own: arguments are the keys of the configuration, and the run is the one of `rollgraph train`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from rollgraph.config import Config, config_from_keywords
from rollgraph.config.reader import BrokenRule
from rollgraph.distributed.attempt import joined
from rollgraph.errors import InvalidInput
from rollgraph.rl.reward_loading import is_async
from rollgraph.run.built_in_names import wrong_names
from rollgraph.run.given import MODEL_FOLDER, Given, read_reward, read_rows
from rollgraph.run.setup import Run
from rollgraph.run.stop import StopRequest
from rollgraph.run.trained_run import TrainedRun
from rollgraph.train import open_run, take_steps

Callback = Callable[[int, dict[str, float]], Any]  # is given the number of a step and its metrics


class Step(NamedTuple):
    """A step that was taken."""

    number: int
    metrics: dict[str, float]  # on rank 0


class Trainer:
    """Trains a model with reinforcement learning.

    - `model`: a model folder, a hub id, a pair of a model and a tokenizer of transformers, or the section `model` of a
      configuration as a mapping.
    - `train`, `validation`: a path, a hub id, a `datasets.Dataset`, a `pandas.DataFrame`, or any iterable of mappings
      with a `prompt`.
    - `rewards`: functions, or names of built-in ones, each alone, as (reward, weight), as (reward, weight, options) or
      as a mapping with `function` or `name`, `weight`, `options` and `label`.
    - `algorithm`: the name or the import path of an algorithm, or the section `algorithm` as a mapping.
    - `callbacks` are called after each step, on rank 0, with its number and its metrics. One that returns True ends the
      run after this step, saved.
    - Every other argument is a key of the configuration: `max_tokens` is `rollout.max_tokens`, `lr` is `optimizer.lr`,
      and `checkpoint_every` is `checkpoint.every`. A section can also be given whole, as in `graph={"impl": "none"}`.

    What is wrong with an argument raises ConfigError or InvalidInput here, both ValueErrors, before anything is loaded.
    """

    def __init__(
        self,
        model: Any,
        train: Any,
        *,
        validation: Any = None,
        rewards: Any = (),
        algorithm: str | Mapping[str, Any] = "grpo",
        callbacks: Callback | Iterable[Callback] = (),
        **settings: Any,
    ) -> None:
        self._callbacks = [_check_callback(callback) for callback in _as_list(callbacks, "callbacks")]
        self._settings = settings
        settings.setdefault("output", "runs/default")
        if isinstance(settings.get("tokenizer"), str | os.PathLike):
            settings["tokenizer_path"] = settings.pop("tokenizer")
        given_model, tokenizer = _read_model(model, settings)
        rows = {}
        data = {}
        for key, source in (("train", train), ("validation", validation)):
            if source is not None:
                data[key], read = read_rows(source, key)
                if read is not None:
                    rows[data[key]] = read
        entries = [read_reward(entry) for entry in _as_list(rewards, "rewards")]
        functions = {place: function for place, (_, function) in enumerate(entries) if function is not None}
        self._sections: dict[str, Any] = {
            "data": data,
            "algorithm": algorithm if isinstance(algorithm, Mapping) else {"name": algorithm},
        }
        if entries:
            self._sections["reward"] = {"functions": [spec for spec, _ in entries]}
        self._given = Given(rows, functions, given_model, tokenizer)
        self._run: TrainedRun | None = None
        self._stop: StopRequest | None = None  # of the run that is open
        self.config = self._configure(None)

    # -- training ----------------------------------------------------------------------------------

    def train(self, steps: int | None = None) -> TrainedRun:
        """Take the steps that are left, and return what was trained.

        A run that was stopped, or that is given more `steps` than before, goes on where it was.
        """
        for _ in self._take_steps(steps):
            pass
        return self.run

    def __iter__(self) -> Iterator[Step]:
        """Take the steps that are left one at a time. A loop that is left early is a run that was stopped, saved."""
        yield from self._take_steps(None)

    def stop(self) -> None:
        """End the run after the step under way, saved. May be called from any thread."""
        if self._stop is not None:
            self._stop.request()

    @contextmanager
    def open(self, steps: int | None = None) -> Iterator[tuple[Run, range]]:
        """The parts of the run and the steps that are left, for a loop of your own; docs/python_api.md has one."""
        self.close()
        config = self._configure(steps)
        with (
            joined(config.ranks) as world,
            self._stoppable() as stop,
            open_run(config, world, self._given, stop=stop) as (run, first_step),
        ):
            if run is None or first_step is None:
                raise RuntimeError(f"{config.output} has no steps left: raise `steps`, or choose another output")
            yield run, range(first_step, config.steps)

    @property
    def run(self) -> TrainedRun:
        """The run after its last step."""
        if self._run is None:
            raise RuntimeError("the run has not come to its end yet: call train(), or take all steps")
        return self._run

    def close(self) -> None:
        """Free the model and the graphs of the run that was trained last."""
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

        def on_step(number: int, metrics: dict[str, float]) -> None:
            latest.clear()
            latest.update(metrics)
            for callback in self._callbacks:
                if _is_true(callback(number, dict(metrics))):
                    self.stop()

        with ExitStack() as connection:
            world = connection.enter_context(joined(config.ranks))
            try:
                with (
                    self._stoppable() as stop,
                    open_run(config, world, self._given, on_step=on_step, stop=stop, stays_open=True) as opened,
                ):
                    run, first_step = opened
                    if run is not None and first_step is not None:
                        with closing(take_steps(run, first_step)) as numbers:
                            for number in numbers:
                                yield Step(number, dict(latest))
            except GeneratorExit:  # the loop was left, and the run is saved and closed
                return
            self._run = TrainedRun(config, world, self._given, run, connection.pop_all())

    @contextmanager
    def _stoppable(self) -> Iterator[StopRequest]:
        """What `stop()` asks to stop, from the set-up of a run to its end."""
        before = self._stop
        self._stop = StopRequest()
        try:
            yield self._stop
        finally:
            self._stop = before

    def _configure(self, steps: int | None) -> Config:
        arguments = {**self._settings, **self._sections}
        for name in self._settings.keys() & self._sections.keys():  # for example more of `data` than the paths
            if isinstance(self._settings[name], Mapping):
                arguments[name] = {**self._settings[name], **self._sections[name]}
        if steps is not None:
            arguments["steps"] = steps
        return config_from_keywords(arguments, wrong_names, _cluster_rules)


def _cluster_rules(config: Config) -> list[BrokenRule]:
    """What a script holds, such as rows and functions, is in this process, and ranks of a cluster are not."""
    if config.cluster.engine == "none":
        return []
    wrong = f"{config.cluster.engine} starts ranks on a cluster, which a script cannot: use `rollgraph train`"
    return [("cluster_by_command", "cluster.engine", wrong)]


def _read_model(model: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Add the key of a model to the settings; return the model and the tokenizer that were given as objects."""
    if isinstance(model, str | os.PathLike):
        settings["model_path"] = model
        return None, None
    if isinstance(model, Mapping):
        settings["model"] = model
        return None, None
    pair: Sequence[Any] = model if isinstance(model, tuple | list) else ()
    if len(pair) != 2 or not all(hasattr(part, "save_pretrained") for part in pair):
        detail = f"expected a folder, a hub id, a (model, tokenizer) of transformers or a mapping, got {model!r:.80}"
        raise InvalidInput(detail, argument="model")
    if hasattr(pair[0], "peft_config"):
        detail = 'has adapters of PEFT: save them, and give the base model and adapter={"path": folder}, or merge them'
        raise InvalidInput(detail, argument="model")
    settings["model_path"] = str(Path(str(settings["output"])) / MODEL_FOLDER)
    return pair[0], pair[1]


def _as_list(entries: Any, name: str) -> list[Any]:
    """One reward or callback may stand alone."""
    if isinstance(entries, str | Mapping) or callable(entries):
        return [entries]
    if not isinstance(entries, Iterable):
        raise InvalidInput(f"expected a list of {name}, got {entries!r:.80}", argument=name)
    return list(entries)


def _check_callback(callback: Any) -> Callback:
    """A callback that can be called; one that cannot would end the run after its first step."""
    problem = "it is async" if is_async(callback) else ""
    try:
        inspect.signature(callback).bind(0, {})
    except TypeError as error:
        problem = str(error)
    except ValueError:  # some functions that are written in C have no signature
        pass
    if problem:
        detail = f"expected a function of (step, metrics), got {callback!r:.80} ({problem})"
        raise InvalidInput(detail, argument="callbacks")
    found: Callback = callback
    return found


def _is_true(answer: Any) -> bool:
    """Whether an answer is True, or a True of NumPy or PyTorch, which a comparison of theirs gives."""
    return answer is True or (str(getattr(answer, "dtype", "")).endswith("bool") and bool(answer))
