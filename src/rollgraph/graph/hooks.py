"""Hooks around captured work: user code that runs beside a graph and is never part of it.

Hooks see the same arguments in warm-up, capture and replay, and can be paused. Guards are checks
before every replay, and nothing can pause them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rollgraph.graph.errors import CaptureError, HookError, StaleGraph

Moment = Literal["warmup", "capture", "replay"]
PreForward = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
PostForward = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
BackwardHook = Callable[[Any], None]  # no tensors: a backward hook must not pin activations
Guard = Callable[[], str | None]  # the reason why a replay would be wrong, or None

_MOMENTS = get_args(Moment)
_KINDS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


@dataclass
class GraphHooks:
    """Hooks of one callable; each list runs in order.

    pre_forward(callable, args, kwargs); post_forward(callable, args, kwargs, output) with the raw output;
    pre_backward(callable); post_backward(callable). `when` names the moments in which they run, for all kinds or
    by kind: warm-up and capture by default, replay where asked for.
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
        for moments in self.when.values() if isinstance(self.when, Mapping) else (self.when,):
            if isinstance(moments, str) or any(moment not in _MOMENTS for moment in moments):
                raise ValueError(f"when={self.when!r}: expected a sequence of {', '.join(_MOMENTS)}")
        for kind in _KINDS:
            hooks = getattr(self, kind)
            if callable(hooks):
                raise TypeError(f"{kind} takes a list of functions, got one function")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No hook runs inside; nests."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def wanted(self, kind: str, moment: Moment) -> bool:
        moments = self.when.get(kind, ()) if isinstance(self.when, Mapping) else self.when
        return moment in moments

    @property
    def at_replay(self) -> bool:
        return any(self.wanted(kind, "replay") for kind in _KINDS)

    def run(self, kind: str, moment: Moment, *arguments: Any) -> None:
        """Run the hooks of one kind, if they are asked for at this moment."""
        if self._pauses or not self.wanted(kind, moment):
            return
        for hook in getattr(self, kind):
            _run(hook, kind, moment, arguments)


NO_HOOKS = GraphHooks()


def hooks_per_callable(hooks: GraphHooks | Sequence[GraphHooks | None] | None, callables: int) -> list[GraphHooks]:
    """One GraphHooks for each callable; a length mismatch is an error."""
    if hooks is None:
        return [NO_HOOKS] * callables
    if isinstance(hooks, GraphHooks):
        if callables != 1:
            raise CaptureError(f"one GraphHooks for {callables} callables: pass a list, one for each")
        return [hooks]
    if len(hooks) != callables:
        raise CaptureError(f"{len(hooks)} GraphHooks for {callables} callables")
    return [NO_HOOKS if h is None else h for h in hooks]


def run_warmup_hook(hook: Callable[[Any], None] | None, kind: str, target: Any) -> None:
    """`pre_warmup_hook` and `post_warmup_hook`: once for each callable, around all of its warm-up."""
    if hook is not None:
        _run(hook, kind, "warmup", (target,))


def check_guards(guards: Sequence[Guard], graph: str) -> None:
    for guard in guards:
        reason = guard()
        if reason is not None:
            raise StaleGraph(f"graph {graph!r} refused: {reason}")


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
