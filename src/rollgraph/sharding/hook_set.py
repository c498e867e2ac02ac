"""A set of module hooks that are owned by their handles and never looked up through the module tree.

Modules may be added, removed, replaced or wrapped between any two calls. A hook is removed through its handle, wherever
its module is now. New modules are covered by the next `enable()`, or when a pause ends. Hooks of the set run before
those that others register on the same module. A copy of a hooked module carries no hook.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

Kind = Literal["forward_pre", "forward", "backward_pre", "backward", "gradient"]
Choose = Callable[[str, nn.Module], Mapping[Kind, Callable[..., Any]]]

_REGISTER: dict[Kind, str] = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}
# A "gradient" hook is chosen for a module and runs for each of the module's own trained parameters, after the gradient
# has been accumulated. It runs once for a parameter that several modules share, as long as one of them is in the tree.


class HookState(enum.Enum):
    OFF = "off"
    ON = "on"
    PAUSED_OFF = "paused, off"  # inside a pause, whose end undoes any `enable` and `disable` inside it
    PAUSED_ON = "paused, on"


# The state after each call, by the state before it. The end of a pause restores the state it found, so it has no row.
TRANSITIONS: dict[str, dict[HookState, HookState]] = {
    "enable": {
        HookState.OFF: HookState.ON,
        HookState.ON: HookState.ON,  # covers new modules, releases those that left the tree
        HookState.PAUSED_OFF: HookState.PAUSED_ON,
        HookState.PAUSED_ON: HookState.PAUSED_ON,
    },
    "disable": {
        HookState.OFF: HookState.OFF,
        HookState.ON: HookState.OFF,
        HookState.PAUSED_OFF: HookState.PAUSED_OFF,
        HookState.PAUSED_ON: HookState.PAUSED_OFF,
    },
    "pause": {
        HookState.OFF: HookState.PAUSED_OFF,
        HookState.ON: HookState.PAUSED_ON,
        HookState.PAUSED_OFF: HookState.PAUSED_OFF,
        HookState.PAUSED_ON: HookState.PAUSED_ON,
    },
}


class HookSet:
    """Hooks on the modules of a tree, switched on and off together.

    `choose(name, module)` returns the hooks of one module by kind. It is called for each module of the tree whenever
    hooks are registered.
    """

    def __init__(self, model: nn.Module, choose: Choose) -> None:
        self._model = model
        self._choose = choose
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._gradient_hooks: dict[nn.Module, Callable[..., Any]] = {}  # by module, for its parameters
        self._gradient_handles: dict[nn.Parameter, tuple[Callable[..., Any], RemovableHandle]] = {}
        self.state = HookState.OFF

    def enable(self) -> None:
        """Register the hooks on the tree as it is now."""
        self._enter(TRANSITIONS["enable"][self.state])

    def disable(self) -> None:
        """Remove all hooks."""
        self._enter(TRANSITIONS["disable"][self.state])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run no hook inside, and restore the state afterwards. Pauses can be nested."""
        before = self.state
        self._enter(TRANSITIONS["pause"][before])
        try:
            yield
        finally:
            self._enter(before)

    @property
    def modules(self) -> frozenset[nn.Module]:
        """The modules that have a hook of this set now."""
        return frozenset(self._handles)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module has a hook of this set now."""
        return module in self._handles

    def _enter(self, state: HookState) -> None:
        """Register or remove hooks to match a state. If that fails, no hook is left and the set is off."""
        self.state = state
        tree: dict[nn.Module, str] = {}
        if state is HookState.ON:
            tree = dict(_named(self._model))
        try:
            self._cover_modules(tree)
            self._cover_parameters()
        except BaseException:
            self.state = HookState.OFF
            self._cover_modules({})
            self._cover_parameters()
            raise

    def _cover_modules(self, tree: Mapping[nn.Module, str]) -> None:
        for module in list(self._handles):
            if module not in tree:
                self._remove(module)
        for module, name in tree.items():
            if module not in self._handles:
                self._register(name, module)

    def _register(self, name: str, module: nn.Module) -> None:
        handles: list[RemovableHandle] = []
        for kind, function in self._choose(name, module).items():
            self._handles[module] = handles  # before the first registration, so that a failure cleans it up
            if kind == "gradient":
                self._gradient_hooks[module] = function
            else:
                handles.append(getattr(module, _REGISTER[kind])(InertWhenCopied(function), prepend=True))

    def _remove(self, module: nn.Module) -> None:
        self._gradient_hooks.pop(module, None)
        for handle in self._handles.pop(module):
            handle.remove()

    def _cover_parameters(self) -> None:
        """Put one hook on each trained parameter that a covered module has now, whichever module had it before."""
        wanted: dict[nn.Parameter, Callable[..., Any]] = {}
        for module, function in self._gradient_hooks.items():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    wanted.setdefault(parameter, function)
        for parameter, (function, handle) in list(self._gradient_handles.items()):
            if wanted.get(parameter) != function:
                handle.remove()
                del self._gradient_handles[parameter]
        for parameter, function in wanted.items():
            if parameter not in self._gradient_handles:
                handle = parameter.register_post_accumulate_grad_hook(function)
                self._gradient_handles[parameter] = (function, handle)


class InertWhenCopied:
    """A hook that stays with its module: in a copy or a pickle of the module it does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def is_copy(self) -> bool:
        return self._function is _do_nothing

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> Any:
        return InertWhenCopied, (_do_nothing,)


def _do_nothing(*arguments: Any) -> None:
    pass


def _named(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each module of the tree once, with its first name."""
    for name, module in model.named_modules():
        yield module, name
