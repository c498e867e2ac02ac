"""Transformer Engine's `capture_time_hooks` as graph hooks, in the spelling of its proposal and as it was merged.

Owns the names of the keys and what a hook is called with. Either spelling takes, for each module, a dictionary of
kinds; a kind has a dictionary (id -> hook) or a list. A hook gets the module; one that needs more gets what PyTorch's
own module hooks get. Gradients are never handed out: a hook that held one would keep the memory of a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgraph.graph import CaptureError, GraphHooks

Hook = Callable[..., Any]

_KINDS = {
    "forward_pre_hooks": "pre_forward",
    "forward_hooks": "post_forward",
    "backward_pre_hooks": "pre_backward",
    "backward_hooks": "post_backward",
    "forward_pre": "pre_forward",
    "forward": "post_forward",
    "pre_backward": "pre_backward",
    "backward": "post_backward",
}
# By the number of arguments a hook needs: the places, in what a graph hook gets, of those it is called with.
_CALLED_WITH: dict[str, dict[int, tuple[int, ...]]] = {
    "pre_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, args, kwargs
    "post_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)},  # module, args, kwargs, output
    "pre_backward": {1: (0,)},
    "post_backward": {1: (0,)},
}


def read_capture_time_hooks(hooks: Any, modules: int) -> list[GraphHooks | None] | None:
    """A `GraphHooks` for each module, which runs in warm-up and capture and never at replay."""
    if hooks is None:
        return None
    if not isinstance(hooks, (list, tuple)):
        raise CaptureError(
            f"capture_time_hooks is a {type(hooks).__name__}; expected a list with one entry for each module"
        )
    if len(hooks) != modules:
        raise CaptureError(f"{len(hooks)} capture_time_hooks for {modules} modules: pass one for each, or None")
    return [_read_entry(entry, f"capture_time_hooks[{index}]") for index, entry in enumerate(hooks)]


def _read_entry(entry: Any, where: str) -> GraphHooks | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CaptureError(f"{where} is a {type(entry).__name__}; expected a dictionary of kinds, or None")
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, given in entry.items():
        kind = _KINDS.get(key)
        if kind is None:
            raise CaptureError(f"{where} has {key!r}; the kinds are {', '.join(_KINDS)}")
        if kind in spelled:
            raise CaptureError(f"{where} has {key!r} and {spelled[kind]!r}, which are two names of the same kind")
        spelled[kind] = key
        found[kind] = [_adapt(hook, kind, f"{where}[{key!r}]") for hook in _listed(given, f"{where}[{key!r}]")]
    return GraphHooks(**found)


def _listed(given: Any, where: str) -> Sequence[Any]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, (list, tuple)):
        return given
    what = "one function" if callable(given) else f"a {type(given).__name__}"
    raise CaptureError(f"{where} is {what}; expected a dictionary of hooks by id, or a list of them")


def _adapt(hook: Any, kind: str, where: str) -> Hook:
    if not callable(hook):
        raise CaptureError(f"{where} has a {type(hook).__name__} where a hook should be")
    name = getattr(hook, "__qualname__", repr(hook))
    needed, called_with = _needed(hook), _CALLED_WITH[kind]
    if needed == 0:
        raise CaptureError(f"{where}: hook {name} takes no argument; a hook is called with its module")
    if needed not in called_with:
        limit = "the module alone" if len(called_with) == 1 else f"{len(called_with)} arguments at most"
        raise CaptureError(f"{where}: hook {name} needs {needed} arguments; a {kind} hook is called with {limit}")
    places = called_with[needed]

    def call(*arguments: Any) -> Any:
        return hook(*[arguments[place] for place in places])

    call.__qualname__ = name  # what an error names
    return call


def _needed(hook: Hook) -> int:
    """How many positional arguments a hook cannot do without; 1 if it takes any number, or does not say."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    takes_any = bool(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return required or int(takes_any)
