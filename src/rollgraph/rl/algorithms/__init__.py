"""Built-in algorithms by name, and your own by import path.

Owns what is checked before a run starts: the name, the settings, and that the trainer can call the algorithm. The names
themselves are listed in `config/algorithm_names.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

from rollgraph.config.algorithm_names import ALGORITHM_PATHS
from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.algorithms.algorithm import Algorithm, Source, UnrewardedAlgorithm
from rollgraph.rl.algorithms.policy_gradient import PolicyGradient
from rollgraph.rl.paths import LoadError, load_object

__all__ = ["ALGORITHMS", "Algorithm", "PolicyGradient", "UnrewardedAlgorithm", "load_algorithm", "settings_of"]

MakeAlgorithm = Callable[..., Algorithm]

ALGORITHMS: dict[str, MakeAlgorithm] = {name: load_object(path) for name, path in ALGORITHM_PATHS.items()}

SOURCES: tuple[str, ...] = get_args(Source)
FLAGS = ("needs_rewards", "needs_reference", "needs_entropy", "needs_old_logprobs")
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # positional and keyword arguments of each method
    "keeps": (("group",), ()),
    "make_batch": (("rollouts",), ("minibatches", "seed")),
    "loss": (("streams",), ()),
}
EXAMINE = {"examine": (("rollouts",), ())}  # of an algorithm that needs no rewards


def load_algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """Make the algorithm of this name, or of a path "package.module:Name" or "file.py:Name", with these settings.

    >>> load_algorithm("grpo", {"clip_high": 0.28})
    """
    make = _find(name)
    settings = settings or {}
    known = settings_of(make)
    for setting in settings:
        if setting not in known and "**" not in known:
            near = suggest(setting, known, cutoff=0.3)
            raise InvalidInput(f"algorithm {name!r} has no such setting{near}", argument=setting)
    for setting, required in known.items():
        if required and setting not in settings:
            raise InvalidInput(f"required by algorithm {name!r}, but missing", argument=setting)
    algorithm = make(**settings)
    _check_protocol(name, algorithm)
    return algorithm


def settings_of(make: MakeAlgorithm) -> dict[str, bool]:
    """The settings an algorithm takes, and whether each is required; "**" if it takes any."""
    settings = {}
    for parameter in inspect.signature(make).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            settings["**"] = False
        else:
            settings[parameter.name] = parameter.default is parameter.empty
    return settings


def _find(name: str) -> MakeAlgorithm:
    if ":" not in name:
        if name not in ALGORITHMS:
            near = suggest(name, ALGORITHMS, cutoff=0.3)
            known = f"built in are {', '.join(ALGORITHMS)}; your own is 'package.module:Name' or 'file.py:Name'"
            raise LoadError(f"there is no algorithm {name!r}{near} ({known})")
        return ALGORITHMS[name]
    found: Any = load_object(name)
    if not callable(found):
        detail = f"is a {type(found).__name__}, not a class or function that makes an algorithm"
        raise LoadError(detail, place=repr(name))
    make: MakeAlgorithm = found
    return make


def _check_protocol(name: str, algorithm: object) -> None:
    """Check that everything the trainer will call is there and accepts what it will be given."""
    source = getattr(algorithm, "source", None)
    if source not in SOURCES:
        raise LoadError(f"an algorithm must have `source`, one of {', '.join(SOURCES)}", place=repr(name))
    for attribute in FLAGS:
        if not isinstance(getattr(algorithm, attribute, None), bool):
            raise LoadError(f"an algorithm must have `{attribute}`, True or False", place=repr(name))
    calls = CALLS if algorithm.needs_rewards else {**CALLS, **EXAMINE}  # type: ignore[attr-defined]
    for method, (positional, keywords) in calls.items():
        try:
            signature = inspect.signature(getattr(algorithm, method))
            signature.bind(*positional, **dict.fromkeys(keywords))
        except (AttributeError, TypeError) as error:
            arguments = ", ".join([*positional, *(f"{keyword}=" for keyword in keywords)])
            detail = f"an algorithm must have a method that can be called as {method}({arguments}): {error}"
            raise LoadError(detail, place=repr(name)) from error
