"""A set of module hooks that can be trusted: owned by their handles, never looked up through the tree.

Modules may be added, removed, replaced or wrapped between any two calls. What was registered is removed
by its handle, wherever its module is now; what is new is covered at the next `enable()`, or when a
pause ends. Hooks of the set run before those that others register on the same module. A copy of a hooked
module carries no hook.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Kind = Literal["forward_pre", "forward", "backward_pre", "backward", "gradient"]
Choose = Callable[[str, nn.Module], Mapping[Kind, Callable[..., Any]]]

_REGISTER: dict[Kind, str] = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}


# "gradient" is asked for by module and runs for each of its own trained parameters, after the gradient has been
# accumulated; for one that several modules share, once, as long as one of them is in the tree.


class HookState(enum.Enum):
    OFF = "off"
    ON = "on"
    PAUSED_OFF = "paused, off"  # inside a pause; what `enable` and `disable` said inside it, it forgets at its end
    PAUSED_ON = "paused, on"


# What each call makes of each state. A pause that ends gives back the state it found, so it needs no row.
TRANSITIONS: dict[str, dict[HookState, HookState]] = {
    "enable": {
        HookState.OFF: HookState.ON,
        HookState.ON: HookState.ON,  # covers the modules that are new, lets go of those that left
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
    """Hooks on the modules of a tree, switched together.

    `choose(name, module)` gives the hooks of one module by kind; it is asked for each module of the tree whenever
    hooks are put in place.
    """

    def __init__(self, model: nn.Module, choose: Choose) -> None:
        self._model = model
        self._choose = choose
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._gradient_hooks: dict[nn.Module, Callable[..., Any]] = {}  # what a module asked for its parameters
        self._gradient_handles: dict[nn.Parameter, tuple[Callable[..., Any], RemovableHandle]] = {}
        self.state = HookState.OFF

    def enable(self) -> None:
        """Hooks on, for the tree as it is now."""
        self._enter(TRANSITIONS["enable"][self.state])

    def disable(self) -> None:
        """Hooks off, everywhere."""
        self._enter(TRANSITIONS["disable"][self.state])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No hook runs inside; afterwards the set is in the state it was found in. Nests."""
        found = self.state
        self._enter(TRANSITIONS["pause"][found])
        try:
            yield
        finally:
            self._enter(found)

    @property
    def modules(self) -> frozenset[nn.Module]:
        """The modules that carry a hook of this set now."""
        return frozenset(self._handles)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module carries a hook of this set now."""
        return module in self._handles

    def _enter(self, state: HookState) -> None:
        """Make the hooks those of a state; if a registration fails, none is left and the set is off."""
        self.state = state
        tree = dict(_named(self._model)) if state is HookState.ON else {}
        try:
            self._cover_modules(tree)
            self._cover_parameters()
        except BaseException:
            self.state = HookState.OFF
            self._cover_modules({})
            self._cover_parameters()
            raise

    def _cover_modules(self, tree: Mapping[nn.Module, str]) -> None:
        for module in [m for m in self._handles if m not in tree]:
            self._remove(module)
        for module, name in tree.items():
            if module not in self._handles:
                self._register(name, module)

    def _register(self, name: str, module: nn.Module) -> None:
        handles: list[RemovableHandle] = []
        for kind, function in self._choose(name, module).items():
            self._handles[module] = handles  # before the first registration, so that a failure finds it
            if kind == "gradient":
                self._gradient_hooks[module] = function
            else:
                handles.append(getattr(module, _REGISTER[kind])(InertWhenCopied(function), prepend=True))

    def _remove(self, module: nn.Module) -> None:
        self._gradient_hooks.pop(module, None)
        for handle in self._handles.pop(module):
            handle.remove()

    def _cover_parameters(self) -> None:
        """One hook on each trained parameter that a covered module has now, whichever module had it before."""
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
    """A hook that stays with its module: a copy or a pickle of the module carries one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def is_copy(self) -> bool:
        return self._function is _nothing

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> Any:
        return InertWhenCopied, (_nothing,)


def _nothing(*arguments: Any) -> None:
    pass


class TreeView:
    """What a module tree is made of, so that two looks at it can be compared. Holds what it saw: places stay unique."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[object] = []
        self.key: list[int] = []
        open_modules = [model]
        while open_modules:
            module = open_modules.pop()
            self._seen.append(module)
            self.key.append(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._seen.append(parameter)
                    self.key += (_place(parameter), parameter.requires_grad)
            open_modules += [child for child in module._modules.values() if child is not None]


def _place(parameter: Tensor) -> int:
    """Its memory: a capture may put another tensor over the same memory into a parameter's place."""
    try:
        return parameter.data_ptr()
    except RuntimeError:  # it has none, under torch.func
        return id(parameter)


def _named(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each module of the tree once, with its first name."""
    return ((module, name) for name, module in model.named_modules())
