"""Algorithms by name: a registry anyone can read, and a path for what is not in it.

Owns what is checked before a run starts: names, settings, and that an algorithm can be called as the trainer will.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.algorithms.algorithm import Algorithm
from rollgraph.rl.algorithms.cispo import CISPO
from rollgraph.rl.algorithms.dapo import DAPO
from rollgraph.rl.algorithms.dr_grpo import DrGRPO
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.algorithms.gspo import GSPO
from rollgraph.rl.algorithms.policy_gradient import PolicyGradient
from rollgraph.rl.algorithms.reinforce_pp import ReinforcePP
from rollgraph.rl.algorithms.rloo import RLOO
from rollgraph.rl.algorithms.sft import SFT
from rollgraph.rl.paths import LoadError, load_object

__all__ = ["ALGORITHMS", "Algorithm", "PolicyGradient", "load_algorithm", "settings_of"]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "sft": SFT,
}


def load_algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of a name, or of a path "package.module:Name" or "path/file.py:Name", with these settings.

    >>> load_algorithm("grpo", {"clip_high": 0.28})
    """
    make, settings = _find(name), settings or {}
    known = settings_of(make)
    for setting in settings:
        if setting not in known and "**" not in known:
            near = suggest(setting, known, cutoff=0.3)
            raise InvalidInput(f"algorithm {name!r} has no such setting{near}", argument=setting)
    for setting, required in known.items():
        if required and setting not in settings:
            raise InvalidInput(f"is required by algorithm {name!r}", argument=setting)
    algorithm = make(**settings)
    _check_protocol(name, algorithm)
    return algorithm


def settings_of(make: Callable[..., Algorithm]) -> dict[str, bool]:
    """The settings an algorithm takes, and whether it cannot do without; "**" if it takes any."""
    parameters = inspect.signature(make).parameters.values()
    return {
        "**" if p.kind is p.VAR_KEYWORD else p.name: p.default is p.empty and p.kind is not p.VAR_KEYWORD
        for p in parameters
    }


def _find(name: str) -> Callable[..., Algorithm]:
    if ":" not in name:
        if name not in ALGORITHMS:
            near = suggest(name, ALGORITHMS, cutoff=0.3)
            known = f"built in are {', '.join(ALGORITHMS)}; your own is 'package.module:Name' or 'file.py:Name'"
            raise LoadError(f"there is no algorithm {name!r}{near} ({known})")
        return ALGORITHMS[name]
    found: Any = load_object(name)
    if not callable(found):
        raise LoadError(
            f"is a {type(found).__name__}, not a class or function that makes an algorithm", place=repr(name)
        )
    make: Callable[..., Algorithm] = found
    return make


def _check_protocol(name: str, algorithm: object) -> None:
    """Whether everything the trainer will call is there and takes what it will be given."""
    for attribute in ("needs_reference", "needs_entropy", "needs_old_logprobs"):
        if not isinstance(getattr(algorithm, attribute, None), bool):
            raise LoadError(f"an algorithm must have `{attribute}`, True or False", place=repr(name))
    calls: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
        "keeps": (("group",), {}),
        "make_batch": (("rollouts",), {"minibatches": 1, "seed": 0}),
        "loss": (("streams",), {}),
    }
    for method, (args, kwargs) in calls.items():
        call = f"{method}({', '.join([*args, *(f'{key}=' for key in kwargs)])})"
        try:
            inspect.signature(getattr(algorithm, method)).bind(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            raise LoadError(
                f"an algorithm must have a method for the call {call}: {error}", place=repr(name)
            ) from error
