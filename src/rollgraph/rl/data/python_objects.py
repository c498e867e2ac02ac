"""Python objects that a program passes to a run in place of files: rows, reward functions, a transformers model.

The configuration has a name for each object, so that such a run can be described and resumed like any other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollgraph.config import Config
from rollgraph.config.fields import import_path_of, unwrap_callable
from rollgraph.errors import InvalidInput
from rollgraph.parallel.data.together import run_on_some_ranks
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.data.rows import DataError, Row, make_rows

MODEL_FOLDER = "initial_model"  # in the run's folder: a model that was passed as an object
MAX_UNSIZED_ROWS = 1_000_000  # for an iterable without a length, which may be endless
PYTHON_PREFIX = "python:"  # of the names of rows that were passed as objects


@dataclass(frozen=True)
class PythonObjects:
    """The objects that a program passed; all else is read from the files that the configuration names.

    >>> PythonObjects(rows={"python:train": rows}, rewards={0: exact}, model=AutoModelForCausalLM.from_pretrained(...))
    """

    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # by their name in the configuration
    rewards: Mapping[int, Callable[..., Any]] = field(default_factory=dict)  # by index in `reward.functions`
    model: Any = None  # a transformers model
    tokenizer: Any = None  # a transformers tokenizer

    def save_model(self, folder: Path) -> None:
        """Write the model and the tokenizer to a folder, from which all ranks load them."""
        for part in (self.model, self.tokenizer):
            if part is not None:
                part.save_pretrained(folder)


NO_OBJECTS = PythonObjects()


def write_model_object(config: Config, world: World, objects: PythonObjects, *, fresh: bool) -> None:
    """Write a model object into the run's folder. A resumed run keeps the model it began with."""
    if objects.model is None and objects.tokenizer is None:
        return
    folder = Path(config.output) / MODEL_FOLDER

    def write() -> str:
        if fresh or not folder.exists():
            incomplete = folder.with_name(f"{MODEL_FOLDER}.incomplete")
            for stale in (incomplete, folder):
                shutil.rmtree(stale, ignore_errors=True)
            objects.save_model(incomplete)
            incomplete.rename(folder)
        return ""

    run_on_some_ranks(world, world.rank == 0, write)


def read_rows(source: Any, name: str) -> tuple[str, list[Row] | None]:
    """The value of a data key for the configuration, and its rows; None if the value is a path.

    `source` is a path, a `datasets.Dataset`, a `pandas.DataFrame`, or any other iterable of mappings.
    """
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), None
    if isinstance(source, Mapping):
        keys = ", ".join(repr(key) for key in source) or "nothing"
        are_columns = "prompt" in source or "messages" in source
        hint = "give a list with one dict for each row" if are_columns else "choose one of them"
        raise DataError(f"expected rows, got a mapping with {keys}; {hint}", argument=name)
    if hasattr(source, "itertuples"):  # pandas: iterating over a table yields the names of its columns
        source = source.to_dict("records")
    if not isinstance(source, Iterable):
        detail = f"expected a path, or rows such as a list of dicts, got a {type(source).__name__}"
        raise DataError(detail, argument=name)
    rows = make_rows(source if isinstance(source, Sized) else _limit_rows(source, name), name)
    if not rows:
        raise DataError("there are no rows", argument=name)
    return f"{PYTHON_PREFIX}{name}", rows


def _limit_rows(source: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the entries of a source without a length; raises if there are more than MAX_UNSIZED_ROWS."""
    for number, entry in enumerate(source):
        if number == MAX_UNSIZED_ROWS:
            detail = f"no end after {number:,} rows, and a run reads all of them before it begins"
            raise DataError(f"{detail}: give itertools.islice(rows, n) or, if all are meant, a list", argument=name)
        yield entry


def read_reward(argument: Any) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """The entry of `reward.functions` for one of a program's rewards, and its function; None if it was named.

    `argument` is a name or a function, alone or with a weight and options: `exact`, `("length", 0.1)`,
    `("length", 0.1, {"limit": 64})`, or a mapping as in a configuration file.
    """
    if isinstance(argument, Mapping):
        spec = dict(argument)
        reward = spec.pop("function", None) or spec.pop("name", None)
    elif isinstance(argument, tuple | list):
        if not 1 <= len(argument) <= 3:
            raise InvalidInput(f"expected (reward, weight, options), got {len(argument)} values", argument="rewards")
        reward = argument[0]
        spec = dict(zip(("weight", "options"), argument[1:], strict=False))
    else:
        reward = argument
        spec = {}
    if isinstance(reward, str):
        return {**spec, "name": reward}, None
    if not callable(reward):
        detail = f"expected the name of a reward, or a function, got {reward!r:.80}"
        raise InvalidInput(detail, argument="rewards")
    return {"label": _label_of(reward), **spec, "name": import_path_of(reward)}, reward


def _label_of(function: Callable[..., Any]) -> str:
    name: str = unwrap_callable(function).__name__
    return "reward" if name == "<lambda>" else name
