"""Loads algorithms: built-in ones by name, and those of users by import path.

Owns the checks before a run starts: of the name, of the settings, and that the algorithm has every method the trainer
calls. The names themselves are in `config/names.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

from rollgraph.config.names import ALGORITHM_PATHS, counterpart_of, counterpart_of_algorithm
from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.algorithms.base import Algorithm, PolicyGradient, Source, UnrewardedAlgorithm
from rollgraph.rl.paths import LoadError, load_object

__all__ = ["ALGORITHMS", "Algorithm", "PolicyGradient", "UnrewardedAlgorithm", "load_algorithm", "settings_of"]

AlgorithmFactory = Callable[..., Algorithm]

ALGORITHMS: dict[str, AlgorithmFactory] = {name: load_object(path) for name, path in ALGORITHM_PATHS.items()}

SOURCES: tuple[str, ...] = get_args(Source)
FLAGS = ("needs_rewards", "needs_reference", "needs_entropy", "needs_old_logprobs")
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # positional and keyword arguments of each method
    "keeps": (("group",), ()),
    "make_batch": (("rollouts",), ("minibatches", "seed")),
    "loss": (("streams",), ()),
}
POLICY_GRADIENT_METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # defined by its subclasses
    "advantages": (("rollouts", "rewards"), ()),
    "weights": (("lengths",), ()),
    "policy_term": (("streams",), ()),
}
UNREWARDED_METHODS = {"examine": (("rollouts",), ())}


def load_algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """Create an algorithm with these settings, by name ("grpo") or path ("package.module:Name", "file.py:Name").

    >>> load_algorithm("grpo", {"clip_high": 0.28})
    """
    factory = _find_factory(name)
    settings = settings or {}
    known = settings_of(factory)
    accepts_any = "**" in known
    for setting in settings:
        if setting not in known and not accepts_any:
            counterpart = counterpart_of(setting)  # if it is another framework's name for a setting
            hint = f"; {counterpart}" if counterpart else suggest(setting, known, cutoff=0.3)
            raise InvalidInput(f"algorithm {name!r} has no such setting{hint}", argument=setting)
    for setting, required in known.items():
        if required and setting not in settings:
            raise InvalidInput(f"required by algorithm {name!r}, but missing", argument=setting)
    algorithm = factory(**settings)
    _check_protocol(name, algorithm)
    return algorithm


def settings_of(factory: AlgorithmFactory) -> dict[str, bool]:
    """Whether each setting of an algorithm is required, by name; "**" stands for any setting."""
    settings = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            settings["**"] = False
        else:
            settings[parameter.name] = parameter.default is parameter.empty
    return settings


def _find_factory(name: str) -> AlgorithmFactory:
    if ":" not in name:
        if name not in ALGORITHMS:
            counterpart = counterpart_of_algorithm(name)
            hint = f"; it {counterpart.answer()}" if counterpart else suggest(name, ALGORITHMS, cutoff=0.3)
            known = f"built in are {', '.join(ALGORITHMS)}; your own is 'package.module:Name' or 'file.py:Name'"
            raise LoadError(f"there is no algorithm {name!r}{hint} ({known})")
        return ALGORITHMS[name]
    factory_object: Any = load_object(name)
    if not callable(factory_object):
        detail = f"is a {type(factory_object).__name__}, not a class or function that makes an algorithm"
        raise LoadError(detail, location=repr(name))
    factory: AlgorithmFactory = factory_object
    return factory


def _check_protocol(name: str, algorithm: object) -> None:
    """Check that the algorithm has every attribute and method the trainer uses, with the right signature."""
    source = getattr(algorithm, "source", None)
    if source not in SOURCES:
        raise LoadError(f"an algorithm must have `source`, one of {', '.join(SOURCES)}", location=repr(name))
    for attribute in FLAGS:
        if not isinstance(getattr(algorithm, attribute, None), bool):
            raise LoadError(f"an algorithm must have `{attribute}`, True or False", location=repr(name))
    methods = METHODS if algorithm.needs_rewards else {**METHODS, **UNREWARDED_METHODS}  # type: ignore[attr-defined]
    if isinstance(algorithm, PolicyGradient):
        methods = methods | POLICY_GRADIENT_METHODS
    for method, (positional, keyword_names) in methods.items():
        try:
            signature = inspect.signature(getattr(algorithm, method))
            signature.bind(*positional, **dict.fromkeys(keyword_names))
        except (AttributeError, TypeError) as error:
            arguments = ", ".join([*positional, *(f"{keyword_name}=" for keyword_name in keyword_names)])
            detail = f"an algorithm must have a method that can be called as {method}({arguments}): {error}"
            raise LoadError(detail, location=repr(name)) from error
