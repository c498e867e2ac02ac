"""Reward functions by name or path: their options and signatures are checked when they are loaded.

Owns which arguments a function gets, and which columns it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.builtin_rewards import BUILT_IN, PENALTIES
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.worker_messages import show

Function = Callable[..., Sequence[float | None]]
Arguments = dict[str, list[Any]]  # by name, one entry per rollout
GIVEN = ("prompts", "completions", "completion_ids")  # what a function can ask for beside columns
LARGEST = 1e15  # the largest reward: its square, and that of a gradient it scales, still fit into float32


@dataclass(frozen=True)
class RewardSpec:
    """An entry of the configuration.

    >>> RewardSpec.read({"name": "numeric_match", "weight": 2.0, "options": {"tolerance": 0.01}})
    >>> RewardSpec.read("my_rewards.py:politeness")
    """

    name: str  # a built-in reward, or "package.module:function", or "path/to/file.py:function"
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # key in `Rollout.rewards`; the function's name if empty
    function: Any = None

    @classmethod
    def read(cls, entry: RewardSpec | str | Mapping[str, Any]) -> Self:
        if isinstance(entry, str):
            return cls(entry)
        values = vars(entry) if isinstance(entry, RewardSpec) else dict(entry)
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                near = suggest(key, known)
                raise LoadError(f"a reward has no such key{near} (it has {', '.join(known)})", argument=key)
        if not isinstance(values.get("name"), str):
            raise LoadError(f"a reward needs a name, got {values!r}", argument="name")
        weight = values.get("weight", 1.0)
        if not is_allowed(weight):
            detail = f"reward {values['name']!r} needs a number from -{LARGEST:g} to {LARGEST:g}, got {show(weight)}"
            raise LoadError(detail, argument="weight")
        return cls(**values)


@dataclass(frozen=True)
class Reward:
    """A function that was loaded, and what its signature says."""

    label: str
    weight: float
    function: Function
    accepts: frozenset[str] | None  # names of arguments; None: any
    needs: frozenset[str]  # columns it requires
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments for a function of the user's
    penalty: bool = False  # a built-in reward that is at most 0

    def choose(self, arguments: Arguments) -> Arguments:
        """The arguments that the function accepts."""
        if self.accepts is None:
            return dict(arguments)
        return {name: values for name, values in arguments.items() if name in self.accepts}


def is_allowed(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= LARGEST  # False for NaN


def load_reward(spec: RewardSpec) -> Reward:
    """Load the function of a spec and check its name, options and signature; errors name the field of the spec."""
    if ":" in spec.name:
        return _load_own(spec)
    if spec.name in BUILT_IN:
        return _load_built_in(spec)
    known = f"built in are {', '.join(BUILT_IN)}; your own is 'package.module:function' or 'file.py:function'"
    raise LoadError(f"there is no reward {spec.name!r}{suggest(spec.name, BUILT_IN)} ({known})", argument="name")


def _load_own(spec: RewardSpec) -> Reward:
    function = spec.function or load_object(spec.name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise LoadError(f"reward {spec.name!r} is {function!r:.80}, not a plain function", argument="name")
    bound = partial(function, **spec.options) if spec.options else function
    accepts, needs = _read_signature(bound, spec)
    label = spec.label or spec.name.rpartition(":")[2]
    return Reward(label, spec.weight, function, accepts, needs, spec.options)


def _load_built_in(spec: RewardSpec) -> Reward:
    factory = BUILT_IN[spec.name]
    options = _bind(factory, spec)
    function = _make_built_in(factory, spec)
    accepts, needs = _read_signature(function, spec)
    if "column" in options:
        needs |= {options["column"]}
    return Reward(spec.label or spec.name, spec.weight, function, accepts, needs, penalty=spec.name in PENALTIES)


def _bind(factory: Callable[..., Function], spec: RewardSpec) -> dict[str, Any]:
    """All options of a built-in reward, defaults included."""
    signature = inspect.signature(factory)
    for name in spec.options:
        if name not in signature.parameters:
            detail = f"reward {spec.name!r} has no such option; its signature is {spec.name}{signature}"
            raise LoadError(detail, argument=f"options.{name}")
    try:
        bound = signature.bind(**spec.options)
    except TypeError as error:
        detail = f"reward {spec.name!r}: {error}; its signature is {spec.name}{signature}"
        raise LoadError(detail, argument="options") from None
    bound.apply_defaults()
    return bound.arguments


def _make_built_in(factory: Callable[..., Function], spec: RewardSpec) -> Function:
    try:
        return factory(**spec.options)
    except InvalidInput as error:
        if error.argument is None:
            raise type(error)(error.detail, argument="options") from error
        raise error.renamed(lambda name: f"options.{name}") from error
    except TypeError as error:  # an option has a type that cannot be compared or counted with
        raise LoadError(f"reward {spec.name!r}: {error}", argument="options") from error


def _read_signature(function: Function, spec: RewardSpec) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The names of the arguments that a function accepts (None: any), and the columns it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # it is written in C, or does not take one of the options
        raise LoadError(f"the signature of reward {spec.name!r} cannot be used ({error})", argument="name") from error
    accepts: set[str] = set()
    needs: set[str] = set()
    takes_any = False
    positional_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional_only = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            accepts.add(parameter.name)
            if parameter.default is parameter.empty:
                needs.add(parameter.name)
    if positional_only or not (takes_any or "completions" in accepts):
        detail = (
            f"reward {spec.name!r} is called with keyword arguments, as f(prompts=..., completions=..., **columns), "
            f"but has the signature {signature}"
        )
        raise LoadError(detail, argument="name")
    return None if takes_any else frozenset(accepts), frozenset(needs.difference(GIVEN))
