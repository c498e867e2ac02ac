"""Loads reward functions, given by name, by path or as Python objects, and reads which arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.rewards.arguments import STANDARD_ARGUMENTS, RewardBatch
from rollgraph.rl.rewards.builtin import BUILT_IN, PENALTIES
from rollgraph.rl.rewards.process import short_repr

Function = Callable[..., Any]  # returns a list of rewards, or a coroutine of one
MAX_REWARD = 1e15  # absolute value: its square, and that of a gradient it scales, still fit into float32


@dataclass(frozen=True)
class RewardSpec:
    """An entry of `reward.functions`, or a Python function with its settings.

    >>> RewardSpec.read({"name": "numeric_match", "weight": 2.0, "options": {"tolerance": 0.01}})
    >>> RewardSpec.read("my_rewards.py:politeness")
    >>> RewardSpec.read({"name": "polite", "function": lambda completions, **_: [...], "weight": 0.1})
    """

    name: str  # a built-in reward, "package.module:function" or "path/to/file.py:function"; any name with `function`
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # key in `Rollout.rewards`; the function's name if empty
    function: Function | None = None  # called in place of the function that `name` refers to

    @classmethod
    def read(cls, entry: RewardSpec | str | Mapping[str, Any]) -> Self:
        if isinstance(entry, str):
            return cls(entry)
        values = vars(entry) if isinstance(entry, RewardSpec) else dict(entry)
        field_names = [spec_field.name for spec_field in fields(cls)]
        for key in values:
            if key not in field_names:
                hint = suggest(key, field_names)
                raise LoadError(f"a reward has no such key{hint} (it has {', '.join(field_names)})", argument=key)
        if not isinstance(values.get("name"), str):
            raise LoadError(f"a reward needs a name, got {values!r}", argument="name")
        weight = values.get("weight", 1.0)
        if not is_in_range(weight):
            detail = (
                f"reward {values['name']!r} needs a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, "
                f"got {short_repr(weight)}"
            )
            raise LoadError(detail, argument="weight")
        return cls(**values)


@dataclass(frozen=True)
class Reward:
    """A loaded function, and which arguments its signature accepts."""

    label: str
    weight: float
    function: Function
    accepts: frozenset[str] | None  # names of arguments; None: any
    needs: frozenset[str]  # columns of the data without which it cannot be called
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments for a user's function
    built_in: bool = False  # built-in functions get chats as text
    penalty: bool = False  # a built-in reward that is at most 0

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    def takes(self, name: str) -> bool:
        return self.accepts is None or name in self.accepts

    def select_arguments(self, batch: RewardBatch) -> RewardBatch:
        """The batch with only the lists that the function accepts."""
        return batch.select(filter(self.takes, batch.lists))


def is_in_range(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= MAX_REWARD  # False for NaN


def is_async(function: Any) -> bool:
    """Whether a call returns a coroutine; an object may have an async `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_reward(spec: RewardSpec) -> Reward:
    """Load the function of a spec, and check its name, options and signature. Errors name the field of the spec."""
    if spec.function is not None:
        return _load_user_function(spec, spec.function, spec.label or spec.name)
    if ":" in spec.name:
        return _load_user_function(spec, load_object(spec.name), spec.label or spec.name.rpartition(":")[2])
    if spec.name in BUILT_IN:
        return _load_built_in(spec)
    known = f"built in are {', '.join(BUILT_IN)}; your own is 'package.module:function' or 'file.py:function'"
    raise LoadError(f"there is no reward {spec.name!r}{suggest(spec.name, BUILT_IN)} ({known})", argument="name")


def _load_user_function(spec: RewardSpec, function: Any, label: str) -> Reward:
    if not callable(function):
        argument = "name" if spec.function is None else "function"
        raise LoadError(f"reward {spec.name!r} is {short_repr(function)}, not a function", argument=argument)
    bound = partial(function, **spec.options) if spec.options else function
    accepts, needs = _read_signature(bound, spec)
    return Reward(label, spec.weight, function, accepts, needs, spec.options)


def _load_built_in(spec: RewardSpec) -> Reward:
    factory = BUILT_IN[spec.name]
    options = _bind_options(factory, spec)
    function = _make_built_in(factory, spec)
    accepts, needs = _read_signature(function, spec)
    if "column" in options:
        needs |= {options["column"]}
    is_penalty = spec.name in PENALTIES
    return Reward(spec.label or spec.name, spec.weight, function, accepts, needs, built_in=True, penalty=is_penalty)


def _bind_options(factory: Callable[..., Function], spec: RewardSpec) -> dict[str, Any]:
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
    except TypeError as error:  # an option has the wrong type
        raise LoadError(f"reward {spec.name!r}: {error}", argument="options") from error


def _read_signature(function: Function, spec: RewardSpec) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The names of the arguments that a function accepts (None: any), and the columns it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # a function written in C, or one that does not take an option
        raise LoadError(f"the signature of reward {spec.name!r} cannot be used ({error})", argument="name") from error
    accepts: set[str] = set()
    needs: set[str] = set()
    accepts_any = False
    positional_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            accepts_any = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional_only = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            accepts.add(parameter.name)
            if parameter.default is parameter.empty:
                needs.add(parameter.name)
    if positional_only or not (accepts_any or "completions" in accepts):
        detail = (
            f"reward {spec.name!r} is called with keyword arguments, as f(prompts=..., completions=..., **columns), "
            f"but has the signature {signature}"
        )
        raise LoadError(detail, argument="name")
    return None if accepts_any else frozenset(accepts), frozenset(needs.difference(STANDARD_ARGUMENTS))
