"""The hooks of a sharded model: which ones a module gets, and when they follow a change of the module tree.

Owns all handles on the model. What the hooks do is in `parameter_gathers.py` and `gradient_reductions.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from rollgraph.graph.hooks import GraphHooks, Moment
from rollgraph.sharding.hook_set import HookSet, HookState, InertWhenCopied
from rollgraph.sharding.ring import BACKWARD, FORWARD


class HookActions(Protocol):
    """What the hooks call. `ShardedModel` implements it."""

    def ensure_gathered(self, parameters: Sequence[Tensor]) -> None: ...
    def enter_unit(self, parameters: Sequence[Tensor], toward: int) -> None: ...
    def accumulate_gradient(self, parameter: Tensor) -> None: ...
    def gradient_arrived(self, parameter: Tensor) -> None: ...
    def raise_if_stale(self, parameters: Sequence[Tensor]) -> None: ...
    def before_state_dict(self) -> None: ...
    def before_load_state_dict(self) -> None: ...


def is_sharded(model: nn.Module) -> bool:
    """Whether a model carries the hooks of a ShardedModel. A copy of such a model does not."""
    hooks = model._state_dict_pre_hooks.values()
    return any(isinstance(hook, InertWhenCopied) and not hook.is_copy for hook in hooks)


class ModelHooks:
    """The hooks on `model`, for the tensors in `known`. `units` are modules whose parameters come and go."""

    def __init__(
        self, model: nn.Module, known: Mapping[Tensor, Any], actions: HookActions, units: Sequence[nn.Module] = ()
    ) -> None:
        self._model = model
        self._known = known
        self._actions = actions
        self._units = {unit: [p for p in unit.parameters() if p in known] for unit in units}
        self.hooks = HookSet(model, self._choose_hooks)
        self._guards = HookSet(model, self._choose_guards)  # never paused: they only check
        before_state_dict = InertWhenCopied(lambda module, prefix, keep_vars: actions.before_state_dict())
        before_load = InertWhenCopied(lambda *arguments: actions.before_load_state_dict())
        before_forward = InertWhenCopied(lambda module, args: self.follow_tree())
        self._handles = [
            model.register_state_dict_pre_hook(before_state_dict),
            model.register_load_state_dict_pre_hook(before_load),
            model.register_forward_pre_hook(before_forward, prepend=True),
        ]
        self._tree: TreeView | None = None
        if units:  # inputs of a first layer may need no gradient: its hook runs then as well, and PyTorch warns of that
            warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        self.hooks.enable()
        self.follow_tree()

    def follow_tree(self) -> None:
        """Cover modules that were added, and parameters that were tied, replaced or unfrozen, since the last call.

        Called by each forward of the model itself, and at each pause.
        """
        tree = TreeView(self._model)
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

    def _own_tensors(self, module: nn.Module) -> list[Tensor]:
        """The parameters of a module, and what is gathered like them."""
        own = (*module._parameters.values(), *module._buffers.values())
        return [tensor for tensor in own if tensor is not None and tensor in self._known]

    def _choose_hooks(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        if module in self._units:
            return self._hooks_of_unit(self._units[module])
        own = self._own_tensors(module)
        if not own and module is not self._model:
            return {}

        def gather(module: nn.Module, args: Any) -> None:
            self._actions.ensure_gathered(self._own_tensors(module) or own)  # a capture replaces them meanwhile

        return {"forward_pre": gather, "gradient": self._actions.accumulate_gradient}

    def _hooks_of_unit(self, parameters: Sequence[Tensor]) -> dict[Any, Callable[..., Any]]:
        def before_forward(module: nn.Module, args: Any) -> None:
            self._actions.enter_unit(parameters, FORWARD)

        def before_backward(module: nn.Module, gradients: Any) -> None:
            self._actions.enter_unit(parameters, BACKWARD)

        return {
            "forward_pre": before_forward,
            "backward_pre": before_backward,
            "gradient": self._actions.accumulate_gradient,
        }

    def _choose_guards(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        own = self._own_tensors(module)
        if not own and module is not self._model and module not in self._units:
            return {}

        def check(module: nn.Module, args: Any) -> None:
            if module not in self.hooks:  # otherwise its hook gathers, before or after this one
                self._actions.raise_if_stale(self._own_tensors(module) or own)

        def check_unit(module: nn.Module, args: Any) -> None:
            if module not in self.hooks:
                self._actions.raise_if_stale(self._units[module])

        if module in self._units:
            return {"forward_pre": check_unit, "backward_pre": check_unit}
        return {"forward_pre": check}

    def graph_hooks(self, module: nn.Module) -> GraphHooks:
        own = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor in self._known]

        def gather(target: Any, args: Any, kwargs: Any) -> None:
            self._actions.enter_unit(own, FORWARD)

        def gather_again(target: Any) -> None:
            self._actions.enter_unit(own, BACKWARD)

        def reduce(target: Any) -> None:
            for tensor in own:
                if tensor.requires_grad:
                    self._actions.gradient_arrived(tensor)

        always: tuple[Moment, ...] = ("warmup", "capture", "replay")
        when: dict[str, tuple[Moment, ...]] = {"pre_forward": always, "post_backward": ("replay",)}
        if not self._units:
            return GraphHooks([gather], (), (), [reduce], when=when)
        return GraphHooks([gather], (), [gather_again], [reduce], when={**when, "pre_backward": always})


class TreeView:
    """What a module tree consists of, so that two views can be compared.

    It keeps references to what it saw, so that no id is reused.
    """

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
                    self.key += (_identify(parameter), parameter.requires_grad)
            open_modules += [child for child in module._modules.values() if child is not None]


def _identify(parameter: Tensor) -> int:
    """By its memory: a capture may put another tensor over the same memory in a parameter's place."""
    try:
        return parameter.data_ptr()
    except RuntimeError:  # under torch.func a tensor has no memory
        return id(parameter)
