"""Algorithms by name: a registry anyone can read, and a path for what is not in it.

Owns what is checked before a run starts: names, settings, and that an algorithm can be called as the trainer will.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

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
from rollgraph.rl.paths import load_object

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
    unknown = [setting for setting in settings if setting not in known and "**" not in known]
    if unknown:
        raise ValueError(f"algorithm {name!r} has no setting {_named(unknown, known)}")
    missing = [setting for setting, needed in known.items() if needed and setting not in settings]
    if missing:
        raise ValueError("; ".join(f"{setting} is required by algorithm {name!r}" for setting in missing))
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
            raise ValueError(f"there is no algorithm {_named([name], ALGORITHMS)}; or use a path 'package.module:Name'")
        return ALGORITHMS[name]
    found: Any = load_object(name)
    if not callable(found):
        raise ValueError(f"algorithm {name!r} is a {type(found).__name__}, not a class or function that makes one")
    make: Callable[..., Algorithm] = found
    return make


def _check_protocol(name: str, algorithm: object) -> None:
    """Whether everything the trainer will call is there and takes what it will be given."""
    for attribute in ("needs_reference", "needs_entropy", "needs_old_logprobs"):
        if not isinstance(getattr(algorithm, attribute, None), bool):
            raise ValueError(f"algorithm {name!r} must have `{attribute}`, True or False")
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
            raise ValueError(f"algorithm {name!r} must have a method for the call {call}: {error}") from error


def _named(names: Iterable[str], known: Iterable[str]) -> str:
    """The names, each with the known one that is nearest; swapped letters are nearer than others."""

    def nearness(name: str, other: str) -> tuple[float, bool]:
        return SequenceMatcher(None, name, other).ratio(), sorted(name) == sorted(other)

    def spell(name: str) -> str:
        near = max(known, key=lambda other: nearness(name, other), default="")
        return f"{name!r}" + (f" (did you mean {near!r}?)" if nearness(name, near)[0] > 0.3 else "")

    return ", ".join(map(spell, names))
