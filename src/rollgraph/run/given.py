"""Python objects that a program gives to a run in place of files: rows, reward functions, a model of transformers.

The configuration holds a name for each of them, so that a run can be described and resumed like any other.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.errors import InvalidInput
from rollgraph.rl.rows import DataError, Row, load_rows, make_rows
from rollgraph.run.hub_cache import HELD_OUT, TRAIN, data_files
from rollgraph.run.key_errors import about
from rollgraph.run.shared_work import work_on_some

MODEL_FOLDER = "initial_model"  # in the run's folder: a model that was given as an object
IN_PYTHON = "python:"  # begins the names of rows that were given as objects


@dataclass(frozen=True)
class Given:
    """What a program gave; whatever it did not give is read from the files that the configuration names."""

    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # by the name in the configuration
    rewards: Mapping[int, Callable[..., Any]] = field(default_factory=dict)  # by place in `reward.functions`
    model: Any = None  # of transformers
    tokenizer: Any = None  # of transformers

    def read(self, name: str, splits: Sequence[str]) -> Sequence[Row]:
        """The rows of a data key. Of a dataset of the hub, the first of these splits that it has."""
        if name in self.rows:
            return self.rows[name]
        if name.startswith(IN_PYTHON):
            detail = "a Python program gave these rows: run it again, or name a file that holds the same rows"
            raise DataError(detail, place=name)
        return load_rows(*data_files(name, splits))

    def write_model(self, folder: Path) -> None:
        """Write the given model and tokenizer, for runs of one rank or more to read."""
        for part in (self.model, self.tokenizer):
            if part is not None:
                part.save_pretrained(folder)


NOTHING = Given()


def write_given_model(config: Config, world: World, given: Given, *, fresh: bool) -> None:
    """Put a model that was given as an object into the run's folder. A resumed run keeps the one it began with."""
    if given.model is None and given.tokenizer is None:
        return
    folder = Path(config.output) / MODEL_FOLDER

    def write() -> str:
        if fresh or not folder.exists():
            incomplete = folder.with_name(f"{MODEL_FOLDER}.incomplete")
            for left_over in (incomplete, folder):
                shutil.rmtree(left_over, ignore_errors=True)
            given.write_model(incomplete)
            incomplete.rename(folder)
        return ""

    work_on_some(world, world.rank == 0, write)


def read_training_rows(config: Config, given: Given) -> Sequence[Row]:
    with about("data.train"):
        return given.read(config.data.train, TRAIN)


def read_held_out_rows(config: Config, given: Given) -> Sequence[Row] | None:
    """The first rows of the validation data; None if there is none."""
    if config.data.validation is None:
        return None
    with about("data.validation"):
        return given.read(config.data.validation, HELD_OUT)[: config.validation.max_prompts]


def read_rows(source: Any, name: str) -> tuple[str, list[Row] | None]:
    """The value of a data key, and the rows that stand behind it; None: it is the path of a file.

    `source` is a path, a `datasets.Dataset`, a `pandas.DataFrame`, or any other iterable of mappings.
    """
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), None
    if isinstance(source, Mapping):
        keys = ", ".join(repr(key) for key in source) or "nothing"
        are_columns = "prompt" in source or "messages" in source
        hint = "give a list with one dict for each row" if are_columns else "choose one of them"
        raise DataError(f"expected rows, got a mapping with {keys}; {hint}", argument=name)
    if hasattr(source, "itertuples"):  # pandas: a loop over a table goes through the names of its columns
        source = source.to_dict("records")
    if not isinstance(source, Iterable):
        detail = f"expected a path, or rows such as a list of dicts, got a {type(source).__name__}"
        raise DataError(detail, argument=name)
    rows = make_rows(source, name)
    if not rows:
        raise DataError("there are no rows", argument=name)
    return f"{IN_PYTHON}{name}", rows


def read_reward(entry: Any) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """An entry of `reward.functions`, and the function that stands behind it; None: the configuration names it.

    `entry` is a name or a function, alone, with its weight, or with its weight and its options:
    `exact`, `("length", 0.1)`, `("length", 0.1, {"limit": 64})`, or a mapping as in a file.
    """
    if isinstance(entry, Mapping):
        spec = dict(entry)
        what = spec.pop("function", None) or spec.pop("name", None)
    elif isinstance(entry, tuple | list):
        if not 1 <= len(entry) <= 3:
            raise InvalidInput(f"expected (reward, weight, options), got {len(entry)} values", argument="rewards")
        what = entry[0]
        spec = dict(zip(("weight", "options"), entry[1:], strict=False))
    else:
        what = entry
        spec = {}
    if isinstance(what, str):
        return {**spec, "name": what}, None
    if not callable(what):
        detail = f"expected the name of a reward, or a function, got {what!r:.80}"
        raise InvalidInput(detail, argument="rewards")
    return {"label": _label_of(what), **spec, "name": path_of(what)}, what


def path_of(function: Callable[..., Any]) -> str:
    """Where a function is defined, as an import path."""
    named = _definition(function)
    return f"{named.__module__}:{named.__qualname__}"


def _label_of(function: Callable[..., Any]) -> str:
    name: str = _definition(function).__name__
    return "reward" if name == "<lambda>" else name


def _definition(function: Any) -> Any:
    """What a program wrote: the function that a partial calls, or the class of an object that can be called."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function)
