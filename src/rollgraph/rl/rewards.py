"""Rewards: plain functions in TRL's signature, found by name or path, called for all rollouts of a step.

    def near(prompts, completions, answer, **columns):      # lists of the same length
        return [1.0 if text.strip() == wanted else 0.0 for text, wanted in zip(completions, answer)]

Owns which arguments a function gets, which values are rewards, and what becomes of a function that fails: its rollouts
are given a fixed value, the failure is counted, and the run goes on. Where functions run (here or in workers.py) makes
no other difference.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.builtin_rewards import BUILT_IN
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.workers import Failure, WorkerPool, describe, leave_if_forked, show
from rollgraph.types import Rollout

Function = Callable[..., Sequence[float | None]]
Arguments = dict[str, list[Any]]  # by name, one entry for each rollout
Score = float | None | Failure
ENVIRONMENT = "environment"  # the label of what an environment gave
MOST_MESSAGES = 5  # that people are told of
LARGEST = 1e15  # of a reward: up to here its square, and that of a gradient it scales, have room in float32
_GIVEN = frozenset({"prompts", "completions", "completion_ids"})  # what a function can ask for beside columns


@dataclass(frozen=True)
class RewardSpec:
    """An entry of the config.

    >>> RewardSpec.read({"name": "numeric_match", "weight": 2.0, "options": {"tolerance": 0.01}})
    >>> RewardSpec.read("my_rewards.py:politeness")
    """

    name: str  # a built-in one, or "package.module:function", or "path/to/file.py:function"
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # in `Rollout.rewards`; the function's name if empty

    @classmethod
    def read(cls, entry: RewardSpec | str | Mapping[str, Any]) -> Self:
        if isinstance(entry, str):
            return cls(entry)
        values = vars(entry) if isinstance(entry, RewardSpec) else dict(entry)
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = suggest(key, known)
                raise LoadError(f"a reward has no such key{near} (it has {', '.join(known)})", argument=key)
        if not isinstance(values.get("name"), str):
            raise LoadError(f"a reward needs a name, got {values!r}", argument="name")
        weight = values.get("weight", 1.0)
        if not _is_allowed(weight):
            detail = f"reward {values['name']!r} needs a number from -{LARGEST:g} to {LARGEST:g}, got {show(weight)}"
            raise LoadError(detail, argument="weight")
        return cls(**values)


@dataclass(frozen=True)
class Reward:
    """A function that was loaded, and what its signature says."""

    label: str
    weight: float
    function: Function
    accepts: frozenset[str] | None  # names of arguments; None is any
    needs: frozenset[str]  # columns it cannot do without
    options: Mapping[str, Any] = field(default_factory=dict)  # of a function of the user's, which gets them as well

    def choose(self, arguments: Arguments) -> Arguments:
        return {name: v for name, v in arguments.items() if self.accepts is None or name in self.accepts}


class RewardFunctions:
    """Scores rollouts with several functions: `reward` is the weighted sum of what each of them says.

    With `workers` they run in that many processes, `timeout` seconds at most for each call, and may hang or crash;
    without, they run here and may not. A call is for `batch_size` rollouts, or for as many as spread a batch evenly
    over the workers. What fails counts as `on_failure`: `failures` has the number of rollouts of each kind (raised,
    timeout, died, wrong_type, wrong_length, not_finite, too_large, unscored), `messages` the first message of each,
    `unread()` the first few that differ, and `unrewarded` the number of rollouts that no function had a reward for.
    With `adds` the sum includes what a rollout has already, from its environment.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec | str | Mapping[str, Any]],
        *,
        workers: int = 0,
        timeout: float = 30.0,
        on_failure: float = 0.0,
        batch_size: int | None = None,
        adds: bool = False,
    ) -> None:
        if not functions and not adds:
            raise LoadError("there are no reward functions", argument="functions")
        if workers < 0:
            raise InvalidInput(f"must be at least 0, got {workers}", argument="workers")
        if timeout <= 0:
            raise InvalidInput(f"must be more than 0 seconds, got {timeout}", argument="timeout")
        if batch_size is not None and batch_size < 1:
            raise InvalidInput(f"must be at least 1, got {batch_size}", argument="batch_size")
        if not _is_allowed(on_failure):
            detail = f"expected a number from -{LARGEST:g} to {LARGEST:g}, got {show(on_failure)}"
            raise InvalidInput(detail, argument="on_failure")
        specs: list[RewardSpec] = []
        self._rewards: list[Reward] = []
        for index, entry in enumerate(functions):
            with _naming_entry(index):
                spec = RewardSpec.read(entry)
                reward = load_reward(spec)
                if any(reward.label == other.label for other in self._rewards):
                    detail = f"two rewards are called {reward.label!r}; give one of them another label"
                    raise LoadError(detail, argument="label")
            specs.append(spec)
            self._rewards.append(reward)
        self._workers, self._batch_size, self._on_failure = workers, batch_size, on_failure
        self.failures: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self.unrewarded = 0
        self._adds, self._seen, self._unread = adds, set[str](), list[str]()
        self._pool = None
        if workers:
            self._pool = WorkerPool(workers, "rollgraph.rl.rewards:make_caller", (specs,), timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; there are none afterwards."""
        if self._pool is not None:
            self._pool.close()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise if a function needs a column that the data does not have."""
        present = sorted(columns)
        for index, reward in enumerate(self._rewards):
            for missing in sorted(reward.needs.difference(present)):
                near = suggest(missing, present)
                detail = f"reward {reward.label!r} needs the column {missing!r}{near} (the data has {present})"
                raise LoadError(detail, argument=f"functions[{index}]")

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Fill in `rewards` and `reward` of each."""
        size = self._batch_size or -(-len(rollouts) // max(self._workers, 1)) or 1
        batches = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        arguments = [_make_arguments(batch) for batch in batches]
        calls = [(i, reward.choose(a)) for i, reward in enumerate(self._rewards) for a in arguments]
        if self._pool is None:
            results: list[Any] = [call_reward(self._rewards[i], chosen) for i, chosen in calls]
        else:
            results = self._pool.run(calls)
        self._rewarded = set[int]()
        for rollout in rollouts:
            rollout.rewards = {}
            self._begin(rollout)
        each = iter(results)
        for reward in self._rewards:
            for batch in batches:
                self._take(reward, batch, next(each))
        for rollout in rollouts:
            self._finish(rollout)
        self.unrewarded += sum(id(rollout) not in self._rewarded for rollout in rollouts)

    def _begin(self, rollout: Rollout) -> None:
        """What the sum begins with: nothing, or the environment's own reward."""
        given = _check_score(rollout.reward) if self._adds else None
        if isinstance(given, Failure):
            self._count(given.kind, f"{ENVIRONMENT}: {given.message} ({_name(rollout)})")
            given = self._on_failure
        elif given is not None:
            self._rewarded.add(id(rollout))
        rollout.reward = given or 0.0
        if given is not None:
            rollout.rewards[ENVIRONMENT] = given

    def _take(self, reward: Reward, batch: Sequence[Rollout], result: list[Score] | Failure) -> None:
        scores = [result] * len(batch) if isinstance(result, Failure) else result
        for rollout, score in zip(batch, scores, strict=True):
            if isinstance(score, Failure):
                of_one = f" ({_name(rollout)})" if score.kind in _OF_ONE else ""
                self._count(score.kind, f"{reward.label}: {score.message}{of_one}")
                score = self._on_failure
            elif score is not None:
                self._rewarded.add(id(rollout))
            if score is not None:  # None: this function has nothing to say about it
                rollout.rewards[reward.label] = score
                rollout.reward += reward.weight * score

    def _finish(self, rollout: Rollout) -> None:
        """What the sum is worth: `on_failure` where nothing was added up, or more than a reward can be."""
        if not rollout.rewards:
            self._count("unscored", f"no function has a reward for {_name(rollout)}")
            rollout.reward = self._on_failure
        elif not abs(rollout.reward) <= LARGEST:  # weights can do this; NaN is infinity minus infinity
            parts = ", ".join(rollout.rewards)
            self._count(
                "too_large", f"the weighted sum of {parts} is {rollout.reward:g}, beyond {LARGEST:g} ({_name(rollout)})"
            )
            rollout.reward = self._on_failure
            self._rewarded.discard(id(rollout))

    def _count(self, kind: str, message: str) -> None:
        self.hear({kind: 1}, {kind: message})

    def hear(self, failures: Mapping[str, int], messages: Mapping[str, str]) -> None:
        """Add failures to those that are known: of this process, or of another one that scores for the same run."""
        self.failures.update(failures)
        for kind, message in messages.items():
            self.messages.setdefault(kind, message)
            if message not in self._seen and len(self._seen) < MOST_MESSAGES:
                self._seen.add(message)
                self._unread.append(message)

    def unread(self) -> list[str]:
        """Messages that differ from all before, each given once, and only the first few of a run."""
        unread, self._unread = self._unread, []
        return unread


@contextmanager
def _naming_entry(index: int) -> Iterator[None]:
    """Say which entry of `functions` an error is about."""
    try:
        yield
    except InvalidInput as error:
        named = error if error.argument else type(error)(error.detail, argument="name", place=error.place)
        raise named.renamed(lambda name: f"functions[{index}].{name}") from error


def load_reward(spec: RewardSpec) -> Reward:
    """The function of a spec, with its name, options and signature checked; errors name the field of the spec."""
    options: Mapping[str, Any] = {}
    needs: frozenset[str] = frozenset()
    if ":" in spec.name:
        function = load_object(spec.name)
        label = spec.label or spec.name.rpartition(":")[2]
        options = spec.options
    elif spec.name in BUILT_IN:
        factory = BUILT_IN[spec.name]
        bound = _bind(factory, spec)
        function = _make_built_in(factory, spec)
        label = spec.label or spec.name
        if "column" in bound:
            needs = frozenset({bound["column"]})
    else:
        known = f"built in are {', '.join(BUILT_IN)}; your own is 'package.module:function' or 'file.py:function'"
        raise LoadError(f"there is no reward {spec.name!r}{suggest(spec.name, BUILT_IN)} ({known})", argument="name")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise LoadError(f"reward {spec.name!r} is {function!r:.80}, not a plain function", argument="name")
    accepts, required = _read_signature(partial(function, **options) if options else function, spec)
    return Reward(label, spec.weight, function, accepts, needs | required, options)


def _make_built_in(factory: Callable[..., Function], spec: RewardSpec) -> Function:
    try:
        return factory(**spec.options)
    except InvalidInput as error:
        if error.argument is None:
            raise type(error)(error.detail, argument="options") from error
        raise error.renamed(lambda name: f"options.{name}") from error
    except TypeError as error:  # an option of a type that it cannot compare or count with
        raise LoadError(f"reward {spec.name!r}: {error}", argument="options") from error


def make_caller(specs: Sequence[RewardSpec]) -> Callable[[int, Arguments], list[Score]]:
    """What a worker does: the same as this process would."""
    rewards = [load_reward(spec) for spec in specs]
    return lambda index, arguments: call_reward(rewards[index], arguments)


def call_reward(reward: Reward, arguments: Arguments) -> list[Score]:
    """The scores of a batch. One that raises is repeated for each rollout, so that a bad one costs no other."""
    count, pid = len(next(iter(arguments.values()))), os.getpid()
    try:
        # Copies, because a function may sort or empty what it is given.
        returned = reward.function(**copy_value({**reward.options, **arguments}))
        if isinstance(returned, _UNORDERED):
            kind = type(returned).__name__
            return [Failure("wrong_type", f"returned a {kind} instead of a list of numbers")] * count
        scores = list(returned)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and the panics of libraries in Rust, are no Exceptions
        if count > 1:
            singles = [{name: [values[i]] for name, values in arguments.items()} for i in range(count)]
            return [score for single in singles for score in call_reward(reward, single)]
        return [describe(error)]
    finally:
        leave_if_forked(pid)
    if len(scores) != count:
        return [Failure("wrong_length", f"{len(scores)} rewards for {count} completions")] * count
    return [_check_score(score) for score in scores]


_UNORDERED = (Mapping, Set, str, bytes, bytearray, memoryview)  # iterable, but no list of numbers
_TEXT = (str, bytes, bytearray)  # float() would read a number in it
_OF_ONE = ("not_finite", "too_large")  # kinds of failure that are about one value, and so one rollout


def _check_score(score: Any) -> Score:
    if score is None:
        return None
    try:
        number = math.nan if isinstance(score, _TEXT) else float(score)  # numpy's and torch's scalars, too
    except OverflowError:  # an integer or a fraction that no float can hold
        return Failure("too_large", f"{show(score)} is beyond {LARGEST:g}")
    except Exception:  # whatever an object of somebody's own making raises
        number = math.nan
    if not math.isfinite(number):
        return Failure("not_finite", f"{show(score)} is no finite number")
    if not _is_allowed(number):
        return Failure("too_large", f"{show(score)} is beyond {LARGEST:g}")
    return number


def _is_allowed(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= LARGEST  # False for NaN


def _name(rollout: Rollout) -> str:
    return f"a sample of prompt {rollout.prompt.id}"


def copy_value(value: Any) -> Any:
    """A copy that shares nothing that can be changed; of what JSON can hold, faster than `deepcopy`."""
    kind = type(value)
    if kind is str or kind is int or kind is float:
        return value
    if kind is list:
        return [copy_value(inner) for inner in value]
    if kind is dict:
        return {key: copy_value(inner) for key, inner in value.items()}
    return copy.deepcopy(value)


def _make_arguments(batch: Sequence[Rollout]) -> Arguments:
    names = dict.fromkeys(name for rollout in batch for name in rollout.prompt.columns)
    columns = {name: [rollout.prompt.columns.get(name) for rollout in batch] for name in names}
    return columns | {
        "prompts": [rollout.prompt.text for rollout in batch],
        "completions": [rollout.text for rollout in batch],
        "completion_ids": [[t for t, own in zip(r.tokens, r.sampled, strict=True) if own] for r in batch],
    }


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


def _read_signature(function: Function, spec: RewardSpec) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The names of arguments that a function accepts (None: any) and the columns it needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:  # written in C, or an option that it does not take
        raise LoadError(f"the signature of reward {spec.name!r} cannot be used ({error})", argument="name") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    accepts = frozenset(p.name for p in named)
    if any(p.kind == p.POSITIONAL_ONLY for p in parameters) or not (takes_any or "completions" in accepts):
        detail = (
            f"reward {spec.name!r} is called with keyword arguments, as f(prompts=..., completions=..., **columns), "
            f"but has the signature {inspect.signature(function)}"
        )
        raise LoadError(detail, argument="name")
    required = frozenset(p.name for p in named if p.default is p.empty) - _GIVEN
    return None if takes_any else accepts, required
