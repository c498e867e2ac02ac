"""Turns Transformer Engine's `capture_time_hooks` into graph hooks, in the proposed and in the merged spelling.

Owns the names of the keys and the arguments a hook gets. In both spellings, each module has a dictionary of kinds, and
each kind a dictionary (id -> hook) or a list. A hook is called as PyTorch's module hooks are, or with fewer arguments
if it takes fewer. Gradients are replaced by empty tuples, because a hook that held one would pin a graph's memory.
(Transformer Engine passes uninitialised memory there in warm-up and capture.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
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
_WITH_KWARGS = ("forward_pre_hooks_with_kwargs", "forward_hooks_with_kwargs")
# For each kind: number of arguments a hook takes -> which of the graph hook's arguments it gets.
_CALLED_WITH: dict[str, dict[int, tuple[int, ...]]] = {
    "pre_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, args, kwargs
    "post_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)},  # module, args, kwargs, output
    "pre_backward": {1: (0,), 2: (0, 1)},  # module, ()
    "post_backward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, (), ()
}
_GRADIENTS = ((), ())
# In the merged spelling; one more if the hook's id is listed as taking keyword arguments.
_USUAL = {"forward_pre_hooks": 2, "forward_hooks": 3, "backward_pre_hooks": 2, "backward_hooks": 3}


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
        if key in _WITH_KWARGS:
            continue
        kind = _KINDS.get(key)
        if kind is None:
            raise CaptureError(f"{where} has {key!r}; the kinds are {', '.join((*_KINDS, *_WITH_KWARGS))}")
        if kind in spelled:
            raise CaptureError(f"{where} has {key!r} and {spelled[kind]!r}, which are two names of the same kind")
        spelled[kind] = key
        with_kwargs = _read_with_kwargs(entry, key, where)
        place = f"{where}[{key!r}]"
        found[kind] = []
        for name, hook in _list_hooks(given, place):
            usual = _USUAL.get(key, 1) + (name in with_kwargs)
            found[kind].append(_adapt(hook, kind, place, usual))
    return GraphHooks(**found)


def _read_with_kwargs(entry: Mapping[str, Any], key: str, where: str) -> Collection[Any]:
    """The ids of the hooks that take keyword arguments; PyTorch keeps them as the keys of a dictionary."""
    name = f"{key}_with_kwargs"
    ids = entry.get(name) or ()
    if not isinstance(ids, (Mapping, set, frozenset, list, tuple)):
        raise CaptureError(f"{where}[{name!r}] is a {type(ids).__name__}; expected a dictionary with the ids of hooks")
    return ids


def _list_hooks(given: Any, where: str) -> Iterable[tuple[Any, Any]]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return given.items()
    if isinstance(given, (list, tuple)):
        return enumerate(given)
    what = "one function" if callable(given) else f"a {type(given).__name__}"
    raise CaptureError(f"{where} is {what}; expected a dictionary of hooks by id, or a list of hooks")


def _adapt(hook: Any, kind: str, where: str, usual: int) -> Hook:
    if not callable(hook):
        raise CaptureError(f"{where} has a {type(hook).__name__} where a hook should be")
    name = getattr(hook, "__qualname__", repr(hook))
    count = _count_arguments(hook, usual)
    called_with = _CALLED_WITH[kind]
    if count == 0:
        raise CaptureError(f"{where}: hook {name} takes no argument; a hook is called with its module")
    if count not in called_with:
        limit = f"{len(called_with)} arguments at most"
        raise CaptureError(f"{where}: hook {name} needs {count} arguments; a {kind} hook is called with {limit}")
    places = called_with[count]

    def call(*arguments: Any) -> Any:
        given = (*arguments, *_GRADIENTS)
        return hook(*[given[place] for place in places])

    call.__qualname__ = name  # so that errors name the user's hook
    return call


def _count_arguments(hook: Hook, usual: int) -> int:
    """How many positional arguments to call a hook with: the usual number if it takes them, else those it requires."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return usual
    try:
        signature.bind(*range(usual))
    except TypeError:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [parameter for parameter in signature.parameters.values() if parameter.kind in positional]
        required = sum(parameter.default is parameter.empty for parameter in named)
        return required or len(named[:1])
    return usual
