"""Transformer Engine's `capture_time_hooks` as graph hooks, in the spelling of its proposal and as it was merged.

Owns the names of the keys and what a hook is called with. Either spelling takes, for each module, a dictionary of
kinds; a kind has a dictionary (id -> hook) or a list. A hook is called as PyTorch's own module hooks are, or with less
if it takes less. Gradients are never handed out, because a hook that held one would keep the memory of a graph: in
their place it gets empty tuples. (Theirs get uninitialised memory there, in warm-up and capture.)
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
# By the number of arguments of a hook: the places, in what a graph hook gets, of those it is called with.
_CALLED_WITH: dict[str, dict[int, tuple[int, ...]]] = {
    "pre_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, args, kwargs
    "post_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)},  # module, args, kwargs, output
    "pre_backward": {1: (0,), 2: (0, 1)},  # module, ()
    "post_backward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, (), ()
}
_GRADIENTS = ((), ())
# As merged, unless the id of a hook is in the dictionary of those that take keyword arguments.
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
        found[kind] = [
            _adapt(hook, kind, f"{where}[{key!r}]", _USUAL.get(key, 1) + (name in with_kwargs))
            for name, hook in _listed(given, f"{where}[{key!r}]")
        ]
    return GraphHooks(**found)


def _read_with_kwargs(entry: Mapping[str, Any], key: str, where: str) -> Collection[Any]:
    """The ids of the hooks that take keyword arguments; PyTorch keeps them as keys of a dictionary."""
    name = f"{key}_with_kwargs"
    ids = entry.get(name) or ()
    if not isinstance(ids, (Mapping, set, frozenset, list, tuple)):
        raise CaptureError(f"{where}[{name!r}] is a {type(ids).__name__}; expected a dictionary with the ids of hooks")
    return ids


def _listed(given: Any, where: str) -> Iterable[tuple[Any, Any]]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return given.items()
    if isinstance(given, (list, tuple)):
        return enumerate(given)
    what = "one function" if callable(given) else f"a {type(given).__name__}"
    raise CaptureError(f"{where} is {what}; expected a dictionary of hooks by id, or a list of them")


def _adapt(hook: Any, kind: str, where: str, usual: int) -> Hook:
    if not callable(hook):
        raise CaptureError(f"{where} has a {type(hook).__name__} where a hook should be")
    name = getattr(hook, "__qualname__", repr(hook))
    count, called_with = _count(hook, usual), _CALLED_WITH[kind]
    if count == 0:
        raise CaptureError(f"{where}: hook {name} takes no argument; a hook is called with its module")
    if count not in called_with:
        limit = f"{len(called_with)} arguments at most"
        raise CaptureError(f"{where}: hook {name} needs {count} arguments; a {kind} hook is called with {limit}")
    places = called_with[count]

    def call(*arguments: Any) -> Any:
        given = (*arguments, *_GRADIENTS)
        return hook(*[given[place] for place in places])

    call.__qualname__ = name  # what an error names
    return call


def _count(hook: Hook, usual: int) -> int:
    """How many positional arguments a hook is called with: as many as is usual, or else those it cannot do without."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return usual
    try:
        signature.bind(*range(usual))
    except TypeError:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [parameter for parameter in signature.parameters.values() if parameter.kind in positional]
        return sum(parameter.default is parameter.empty for parameter in named) or len(named[:1])
    return usual
