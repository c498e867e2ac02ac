"""The hooks of a sharded model. They are removed through their handles, never looked up in the module tree."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rollgraph.graph.hooks import GraphHooks, Moment
from rollgraph.parallel.data.reductions import GradientReductions
from rollgraph.parallel.fsdp.full_parameters import Gathers
from rollgraph.parallel.fsdp.ring import BACKWARD, FORWARD

# -- a set of hooks --------------------------------------------------------------------------------
# Modules may be added, removed, replaced or wrapped between any two calls. A hook is removed through its handle,
# wherever its module is now. The next `enable()`, or the end of a pause, covers new modules. Hooks of the set run
# before other hooks of the same module. In a copy of a hooked module the hooks do nothing.

Kind = Literal["forward_pre", "forward", "backward_pre", "backward", "gradient"]
ChooseHooks = Callable[[str, nn.Module], Mapping[Kind, Callable[..., Any]]]

_REGISTER: dict[Kind, str] = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}
# A "gradient" hook is chosen per module, and runs for each trained parameter directly in the module after its gradient
# has been accumulated. For a parameter that several modules share it runs once, as long as one of them is in the tree.


class HookState(enum.Enum):
    OFF = "off"
    ON = "on"
    PAUSED_OFF = "paused, off"  # the end of a pause undoes any `enable` and `disable` inside it
    PAUSED_ON = "paused, on"


# The state after each call, by the state before it. The end of a pause restores the state before it, so it has no row.
TRANSITIONS: dict[str, dict[HookState, HookState]] = {
    "enable": {
        HookState.OFF: HookState.ON,
        HookState.ON: HookState.ON,  # covers new modules, releases modules that left the tree
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

    `choose(name, module)` returns the hooks of one module by kind. It is called for modules of the tree whenever hooks
    are registered.
    """

    def __init__(self, model: nn.Module, choose: ChooseHooks) -> None:
        self._model = model
        self._choose = choose
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._gradient_hooks: dict[nn.Module, Callable[..., Any]] = {}  # by module, for its parameters
        self._gradient_handles: dict[nn.Parameter, tuple[Callable[..., Any], RemovableHandle]] = {}
        self.state = HookState.OFF

    def enable(self) -> None:
        """Register the hooks on the current tree."""
        self._enter(TRANSITIONS["enable"][self.state])

    def disable(self) -> None:
        """Remove all hooks."""
        self._enter(TRANSITIONS["disable"][self.state])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run no hooks inside, and restore the state afterwards. Pauses can be nested."""
        before = self.state
        self._enter(TRANSITIONS["pause"][before])
        try:
            yield
        finally:
            self._enter(before)

    @property
    def modules(self) -> frozenset[nn.Module]:
        """The modules that currently have a hook of this set."""
        return frozenset(self._handles)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module currently has a hook of this set."""
        return module in self._handles

    def _enter(self, state: HookState) -> None:
        """Register or remove hooks to match a state. If that fails, all hooks are removed and the set is off."""
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
        """Put one hook on each trained parameter of the covered modules, whichever module had it before."""
        functions: dict[nn.Parameter, Callable[..., Any]] = {}
        for module, function in self._gradient_hooks.items():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    functions.setdefault(parameter, function)
        for parameter, (function, handle) in list(self._gradient_handles.items()):
            if functions.get(parameter) != function:
                handle.remove()
                del self._gradient_handles[parameter]
        for parameter, function in functions.items():
            if parameter not in self._gradient_handles:
                handle = parameter.register_post_accumulate_grad_hook(function)
                self._gradient_handles[parameter] = (function, handle)


class InertWhenCopied:
    """A hook that does nothing in copies and pickles of its module."""

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


# -- hooks of a sharded model ----------------------------------------------------------------------
# Owns all handles on the model. `gathers.py` and `reductions.py` do the work of the hooks.


class HookActions(Protocol):
    """What hooks call; `ShardedModel` implements it."""

    gathers: Gathers
    gradients: GradientReductions

    def ensure_gathered(self, parameters: Sequence[Tensor]) -> None: ...
    def enter_unit(self, parameters: Sequence[Tensor], direction: int) -> None: ...
    def before_state_dict(self) -> None: ...
    def before_load_state_dict(self) -> None: ...


def is_sharded(model: nn.Module) -> bool:
    """Whether a model carries the hooks of a ShardedModel. A copy of such a model does not."""
    hooks = model._state_dict_pre_hooks.values()
    return any(isinstance(hook, InertWhenCopied) and not hook.is_copy for hook in hooks)


class ModelHooks:
    """The hooks on `model` for the tensors that are gathered. `units` are the layers of a ring, if any.

    `hooks` gather and reduce, and can be paused. Guards only check, so they stay during a pause.
    """

    def __init__(self, model: nn.Module, actions: HookActions, units: Sequence[nn.Module] = ()) -> None:
        self._model = model
        self._managed = actions.gathers.managed
        self._actions = actions
        self._units = {unit: [p for p in unit.parameters() if p in self._managed] for unit in units}
        self.hooks = HookSet(model, self._choose_hooks)
        self._guards = HookSet(model, self._choose_guards)
        before_state_dict = InertWhenCopied(lambda module, prefix, keep_vars: actions.before_state_dict())
        before_load = InertWhenCopied(lambda *arguments: actions.before_load_state_dict())
        before_forward = InertWhenCopied(lambda module, args: self.cover_module_tree())
        self._handles = [
            model.register_state_dict_pre_hook(before_state_dict),
            model.register_load_state_dict_pre_hook(before_load),
            model.register_forward_pre_hook(before_forward, prepend=True),
        ]
        self._tree: ModuleTreeKey | None = None
        if units:
            # PyTorch warns of backward hooks where no input needs a gradient, as in a first layer; they run anyway.
            warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        self.hooks.enable()
        self.cover_module_tree()

    def cover_module_tree(self) -> None:
        """Cover modules that were added, and parameters that were tied, replaced or unfrozen, since the last call.

        Each forward of the whole model calls this, and each pause.
        """
        tree = ModuleTreeKey(self._model)
        if self._tree is None or tree.key != self._tree.key:
            self._tree = tree
            self._guards.enable()
            if self.hooks.state is HookState.ON:
                self.hooks.enable()

    def remove(self) -> None:
        self.hooks.disable()
        self._guards.disable()
        for handle in self._handles:
            handle.remove()

    def _managed_tensors(self, module: nn.Module) -> list[Tensor]:
        """The parameters and buffers directly in a module that are gathered."""
        tensors = (*module._parameters.values(), *module._buffers.values())
        return [tensor for tensor in tensors if tensor is not None and tensor in self._managed]

    def _tensors_at_call(self, module: nn.Module, registered: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors that a call of a module reads. `registered` are those it had when its hooks were registered.

        During a capture, other tensors temporarily replace the module's: then it reads the memory of `registered`.
        """
        if module in self._units:
            return registered
        return self._managed_tensors(module) or registered

    def _needs_hooks(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        """Whether a module with these gathered tensors needs hooks.

        The model itself always does: its forward covers the module tree, and would register a hook of its own too late.
        """
        return bool(tensors) or module is self._model

    def _choose_hooks(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        if module in self._units:
            return self._hooks_of_unit(self._units[module])
        tensors = self._managed_tensors(module)
        if not self._needs_hooks(module, tensors):
            return {}

        def gather(module: nn.Module, args: Any) -> None:
            self._actions.ensure_gathered(self._tensors_at_call(module, tensors))

        return {"forward_pre": gather, "gradient": self._actions.gradients.accumulate}

    def _hooks_of_unit(self, parameters: Sequence[Tensor]) -> dict[Any, Callable[..., Any]]:
        def before_forward(module: nn.Module, args: Any) -> None:
            self._actions.enter_unit(parameters, FORWARD)

        def before_backward(module: nn.Module, gradients: Any) -> None:
            self._actions.enter_unit(parameters, BACKWARD)

        return {
            "forward_pre": before_forward,
            "backward_pre": before_backward,
            "gradient": self._actions.gradients.accumulate,
        }

    def _choose_guards(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        """Checks that refuse to run a module with stale tensors while the hook that gathers them is off or paused."""
        is_unit = module in self._units
        tensors = self._units[module] if is_unit else self._managed_tensors(module)
        if not self._needs_hooks(module, tensors):
            return {}

        def check(module: nn.Module, args: Any) -> None:
            if module not in self.hooks:  # otherwise its hook gathers, before or after this check
                self._actions.gathers.raise_if_stale(self._tensors_at_call(module, tensors))

        if is_unit:
            return {"forward_pre": check, "backward_pre": check}
        return {"forward_pre": check}

    def graph_hooks(self, module: nn.Module) -> GraphHooks:
        tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor in self._managed]

        def gather(target: Any, args: Any, kwargs: Any) -> None:
            self._actions.enter_unit(tensors, FORWARD)

        def gather_for_backward(target: Any) -> None:
            self._actions.enter_unit(tensors, BACKWARD)

        def reduce(target: Any) -> None:
            for tensor in tensors:
                if tensor.requires_grad:
                    self._actions.gradients.mark_arrived(tensor)

        always: tuple[Moment, ...] = ("warmup", "capture", "replay")
        moments: dict[str, tuple[Moment, ...]] = {"pre_forward": always, "post_backward": ("replay",)}
        if not self._units:
            return GraphHooks([gather], (), (), [reduce], when=moments)
        return GraphHooks([gather], (), [gather_for_backward], [reduce], when={**moments, "pre_backward": always})


class ModuleTreeKey:
    """The modules and parameters of a tree as a `key`, so that two trees can be compared.

    Keeps references to all objects in the key, so that no id is reused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._references: list[object] = []
        self.key: list[int] = []
        open_modules = [model]
        while open_modules:
            module = open_modules.pop()
            self._references.append(module)
            self.key.append(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._references.append(parameter)
                    self.key += (_identify(parameter), parameter.requires_grad)
            open_modules += [child for child in module._modules.values() if child is not None]


def _identify(parameter: Tensor) -> int:
    """The address of a parameter: a capture may replace it by another tensor over the same memory."""
    try:
        return parameter.data_ptr()
    except RuntimeError:  # under torch.func a tensor has no memory
        return id(parameter)
