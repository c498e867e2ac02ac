"""Hooks and guards: user code that runs around a graph and is never part of it.

Hooks get the same arguments in warm-up, capture and replay, and can be paused. Guards are checks before every replay,
and cannot be paused. The guards of one callable run after its hooks, because a hook may make the replay valid, and run
again before its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rollgraph.graph.errors import CaptureError, HookError

Moment = Literal["warmup", "capture", "replay"]
PreForward = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
PostForward = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
BackwardHook = Callable[[Any], None]  # gets no tensors, so that it cannot keep activations alive
Guard = Callable[[], str | None]  # returns why a replay would be wrong, or None

_MOMENTS = get_args(Moment)
_KINDS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


@dataclass
class GraphHooks:
    """The hooks of one callable; each list runs in order.

    The signatures are pre_forward(callable, args, kwargs), post_forward(callable, args, kwargs, output) with the raw
    output, pre_backward(callable) and post_backward(callable). `when` lists the moments in which hooks run, for all
    kinds or by kind; the default is warm-up and capture.
    """

    pre_forward: Sequence[PreForward] = ()
    post_forward: Sequence[PostForward] = ()
    pre_backward: Sequence[BackwardHook] = ()
    post_backward: Sequence[BackwardHook] = ()
    when: Sequence[Moment] | Mapping[str, Sequence[Moment]] = ("warmup", "capture")
    _pauses: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.when, Mapping) and not set(self.when) <= set(_KINDS):
            raise ValueError(f"when={self.when!r}: expected moments for some of {', '.join(_KINDS)}")
        lists = self.when.values() if isinstance(self.when, Mapping) else (self.when,)
        for moments in lists:
            if isinstance(moments, str) or any(moment not in _MOMENTS for moment in moments):
                raise ValueError(f"when={self.when!r}: expected a sequence of {', '.join(_MOMENTS)}")
        for kind in _KINDS:
            hooks = getattr(self, kind)
            if callable(hooks):
                raise TypeError(f"{kind} takes a list of functions, got one function")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no hook runs. Pauses can be nested."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def runs_at(self, kind: str, moment: Moment) -> bool:
        """Whether hooks of this kind run at this moment."""
        if isinstance(self.when, Mapping):
            return moment in self.when.get(kind, ())
        return moment in self.when

    @property
    def runs_at_replay(self) -> bool:
        """Whether hooks of any kind run at replay."""
        return any(self.runs_at(kind, "replay") for kind in _KINDS)

    def run(self, kind: str, moment: Moment, *arguments: Any) -> None:
        """Run the hooks of one kind, if they run at this moment and are not paused."""
        if self._pauses or not self.runs_at(kind, moment):
            return
        for hook in getattr(self, kind):
            _run(hook, kind, moment, arguments)


NO_HOOKS = GraphHooks()


def hooks_per_callable(hooks: GraphHooks | Sequence[GraphHooks | None] | None, callables: int) -> list[GraphHooks]:
    """Return one GraphHooks per callable. Raise CaptureError if the numbers differ."""
    if hooks is None:
        return [NO_HOOKS] * callables
    if isinstance(hooks, GraphHooks):
        if callables != 1:
            raise CaptureError(f"one GraphHooks for {callables} callables: pass a list, one for each")
        return [hooks]
    if len(hooks) != callables:
        raise CaptureError(f"{len(hooks)} GraphHooks for {callables} callables")
    return [NO_HOOKS if h is None else h for h in hooks]


def guards_per_callable(
    guards: Sequence[Guard] | Sequence[Sequence[Guard]], callables: int
) -> tuple[list[Guard], list[list[Guard]]]:
    """Return the guards that all callables share, and a list per callable. Raise CaptureError if numbers differ."""
    shared: list[Guard] = []
    per_callable: list[list[Guard]] = []
    for entry in guards:
        if callable(entry):
            shared.append(entry)
        else:
            per_callable.append(list(entry))
    if not per_callable:
        return shared, [[] for _ in range(callables)]
    if shared:
        raise CaptureError("guards are either functions, for all callables, or lists of them, one for each callable")
    if len(per_callable) != callables:
        raise CaptureError(f"{len(per_callable)} lists of guards for {callables} callables")
    return [], per_callable


def run_warmup_hook(hook: Callable[[Any], None] | None, kind: str, target: Any) -> None:
    """Run a `pre_warmup_hook` or `post_warmup_hook`, before or after the whole warm-up of a callable."""
    if hook is not None:
        _run(hook, kind, "warmup", (target,))


def _run(hook: Callable[..., Any], kind: str, moment: Moment, arguments: tuple[Any, ...]) -> None:
    name = getattr(hook, "__qualname__", repr(hook))
    try:
        result = hook(*arguments)
    except Exception as error:
        if moment == "replay":
            error.add_note(f"raised in {kind} hook {name} at replay")
            raise
        raise HookError(f"{kind} hook {name} raised in {moment}: {error}") from error
    if result is not None:
        raise HookError(f"{kind} hook {name} returned {type(result).__name__}; hooks must return None")
