"""Slots: the dictionary entries and attributes that hold the objects a graph was captured with.

They are parameters, buffers and children of modules, constants of built-in modules, tensors in plain attributes, state
and hyperparameters of optimizers, and dictionaries of hooks. They are found and named at capture, and `binding.py`
compares them before each replay. So a slot that a correct program changes between replays does not belong here.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollgraph.graph.state.names import Paths, nested_codes
from rollgraph.graph.state.transaction import ProgramObjects
from rollgraph.graph.state.undo_log import UndoLog

_PLAIN = frozenset({type(None), bool, int, float, complex, str, tuple})
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Attributes of built-in modules that only describe their weights: their forward reads the weights instead.
_DESCRIPTIONS = frozenset({
    "training", "in_features", "in1_features", "in2_features", "out_features", "in_channels", "out_channels",
    "num_features", "num_channels", "num_embeddings", "embedding_dim", "input_size", "hidden_size", "embed_dim", "kdim",
    "vdim", "head_dim", "normalized_shape", "affine", "elementwise_affine", "transposed",
})  # fmt: skip
# Attributes that built-in modules ignore in eval mode.
_FOR_TRAINING: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.dropout._DropoutNd, "p"),
    (nn.modules.batchnorm._NormBase, "momentum"),
    (nn.MultiheadAttention, "dropout"),
    (nn.RNNBase, "dropout"),
    (nn.RReLU, "lower"),
    (nn.RReLU, "upper"),
)


class BoundSlot(NamedTuple):
    """One entry of a dictionary, and its value at capture."""

    container: dict[Any, Any]
    key: Any
    value: Any
    name: str
    single: bool = False  # only this entry of the container is bound; all others may change
    may_be_deleted: bool = False  # may be deleted: the graph keeps the value alive, though the function would raise


class HookDict(NamedTuple):
    """The dictionary in which a module or optimizer registers hooks of one kind."""

    hooks: Mapping[Any, Any]
    kind: str
    owner: str


# -- modules ---------------------------------------------------------------------------------------


def slots_of(
    target: Any,
    modules: Sequence[nn.Module],
    called_modules: Mapping[int, nn.Module],
    tensors_read: Sequence[Tensor],
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> list[BoundSlot]:
    """All slots except those of optimizers. `tensors_read` are the tensors that the recording read."""
    return [
        *module_slots(modules),
        *entry_slots(called_modules),
        *constant_slots(called_modules.values()),
        *tensor_slots([*modules, *optimizers], tensors_read),
        *path_slots(target, called_modules, tensors_read),
    ]


def module_slots(modules: Iterable[nn.Module]) -> list[BoundSlot]:
    """The entries of the modules' parameters, buffers and children, including those that are None."""
    slots: list[BoundSlot] = []
    for module in modules:
        kind = type(module).__name__
        for container in (module._parameters, module._buffers, module._modules):
            slots += [BoundSlot(container, key, value, f"{kind}.{key}") for key, value in container.items()]
    return slots


def modules_with(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that have one of the tensors as a parameter or buffer."""
    ids = set(map(id, tensors))
    owners = []
    for module in modules:
        tensors_of_module = (*module._parameters.values(), *module._buffers.values())
        if any(id(tensor) in ids for tensor in tensors_of_module):
            owners.append(module)
    return owners


def constant_slots(called_modules: Iterable[nn.Module]) -> Iterator[BoundSlot]:
    """Plain attributes that a module's result depends on: those of built-in modules, and declared `__constants__`.

    Other attributes of the program's classes may be counters or caches; we cannot tell whether a result depends on one.
    """
    for module in called_modules:
        attributes = vars(module)
        unused = {name for kind, name in _FOR_TRAINING if isinstance(module, kind) and not module.training}
        names: Iterable[str] = getattr(module, "__constants__", ())
        if type(module).__module__.startswith("torch.nn.modules."):
            names = [name for name in attributes if not name.startswith("_")]
        for name in names:
            if name in _DESCRIPTIONS or name in unused or type(attributes.get(name, module)) not in _PLAIN:
                continue
            yield BoundSlot(attributes, name, attributes[name], f"{type(module).__name__}.{name}", single=True)


def tensor_slots(owners: Iterable[Any], tensors: Iterable[Tensor]) -> Iterator[BoundSlot]:
    """Plain attributes whose value is one of the tensors, unless the owner's `forward` assigns them."""
    ids = set(map(id, tensors))
    for owner in owners:
        attributes = vars(owner)
        for name, value in attributes.items():
            if not isinstance(value, Tensor) or id(value) not in ids:
                continue
            if name not in _names_assigned(getattr(owner, "forward", None)):
                yield BoundSlot(
                    attributes, name, value, f"{type(owner).__name__}.{name}", single=True, may_be_deleted=True
                )


def path_slots(target: Any, called_modules: Mapping[int, nn.Module], tensors: Iterable[Tensor]) -> list[BoundSlot]:
    """Attributes and globals through which a function reaches the modules it called and the tensors it read."""
    if isinstance(target, nn.Module):
        return []
    ids = set(map(id, tensors))

    def is_bound(value: Any) -> bool:
        return id(value) in ids or (isinstance(value, nn.Module) and _was_fully_called(value, called_modules))

    return [BoundSlot(*step, single=True, may_be_deleted=True) for step in Paths(target, is_bound).matching_steps]


# -- lists of modules ------------------------------------------------------------------------------


def fully_called_lists(called_modules: Mapping[int, nn.Module], live_modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Module lists and dicts whose entries were all called. (A ModuleList itself is never called.)"""
    lists = [m for m in live_modules if isinstance(m, _LISTS) and len(m._modules) > 1]
    called_lists: list[nn.Module] = [m for m in lists if _was_fully_called(m, called_modules)]
    called_lists += [
        m for m in _module_lists_below(called_modules) if _was_fully_called(m, called_modules) or not m._modules
    ]
    return list({id(m): m for m in called_lists}.values())


def entry_slots(called_modules: Mapping[int, nn.Module]) -> Iterator[BoundSlot]:
    """The called entries of module lists below a called module, even if some other entry was not called."""
    for module in _module_lists_below(called_modules):
        for key, entry in module._modules.items():
            if entry is not None and _was_fully_called(entry, called_modules):
                yield BoundSlot(module._modules, key, entry, f"{type(module).__name__}.{key}", single=True)


def growable_lists(modules: Sequence[nn.Module], called_modules: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Module lists and dicts in which a new entry would run: those whose entries were all called.

    An empty one counts if the `forward` of its parent names it.
    """
    growable: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, _LISTS):
            continue
        if _was_fully_called(module, called_modules) or (not module._modules and _is_named(module, modules)):
            growable.append(module)
    return growable


def _is_named(child: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Whether the `forward` of a parent names the attribute that holds `child`."""
    for parent in modules:
        for key, entry in parent._modules.items():
            if entry is child and key in _names_used(parent.forward):
                return True
    return False


def _module_lists_below(called_modules: Mapping[int, nn.Module]) -> Iterator[nn.Module]:
    pending = list(called_modules.values())
    while pending:
        for child in pending.pop()._modules.values():
            if isinstance(child, _LISTS) and id(child) not in called_modules:
                yield child
                pending.append(child)


def _was_fully_called(module: nn.Module, called_modules: Mapping[int, nn.Module]) -> bool:
    """Whether the module was called or, if it is a list, all of its entries were."""
    if id(module) in called_modules:
        return True
    entries = module._modules.values() if isinstance(module, _LISTS) else ()
    return bool(entries) and all(entry is not None and _was_fully_called(entry, called_modules) for entry in entries)


# -- optimizers ------------------------------------------------------------------------------------


def stepped_optimizers(objects: ProgramObjects, undo_log: UndoLog) -> list[torch.optim.Optimizer]:
    """The optimizers that stepped while the undo log was active."""
    return [o for o in objects.optimizers if _with_written_state(o, undo_log) or _writes_parameters(o, undo_log)]


def optimizer_slots(optimizers: Iterable[torch.optim.Optimizer], undo_log: UndoLog) -> list[BoundSlot]:
    """State and hyperparameters, and attributes that the code of an optimizer class of the program reads."""
    slots: list[BoundSlot] = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        attributes = vars(optimizer)
        stepped = _with_written_state(optimizer, undo_log)
        if stepped:
            slots.append(BoundSlot(attributes, "state", optimizer.state, f"the state of {name}", single=True))
        for parameter in stepped:
            state = optimizer.state[parameter]
            slots.append(BoundSlot(optimizer.state, parameter, state, f"the state of {name}"))
            slots += [BoundSlot(state, key, value, f"{name} state {key!r}") for key, value in state.items()]
        slots.append(BoundSlot(attributes, "param_groups", optimizer.param_groups, f"{name}.param_groups", single=True))
        for index, group in enumerate(optimizer.param_groups):
            slots += [
                BoundSlot(group, key, value, f"{name}.param_groups[{index}][{key!r}]") for key, value in group.items()
            ]
        slots += [
            BoundSlot(attributes, key, attributes[key], f"{name}.{key}", single=True)
            for key in sorted(_read_by_class(type(optimizer)))
            if type(attributes.get(key, optimizer)) in _PLAIN
        ]
    return slots


def _with_written_state(optimizer: torch.optim.Optimizer, undo_log: UndoLog) -> list[Any]:
    return [p for p, state in optimizer.state.items() if any(map(undo_log.wrote, _tensors(state)))]


def _writes_parameters(optimizer: torch.optim.Optimizer, undo_log: UndoLog) -> bool:
    return any(undo_log.wrote(p) for group in optimizer.param_groups for p in group["params"])


def _tensors(state: dict[Any, Any]) -> Iterator[Tensor]:
    return (value for value in state.values() if isinstance(value, Tensor))


# -- hooks -----------------------------------------------------------------------------------------


def hook_dicts(called_modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[HookDict]:
    """The hook dicts whose hooks run in the captured function but not in its replay."""
    kinds = _MODULE_HOOKS if torch.is_grad_enabled() else _MODULE_HOOKS[:2]
    dicts: list[HookDict] = []
    for module in called_modules:
        dicts += _hook_dicts_of(module, kinds)
    for optimizer in optimizers:
        dicts += _hook_dicts_of(optimizer, _OPTIMIZER_HOOKS)
    return dicts


def _hook_dicts_of(owner: Any, kinds: Iterable[str]) -> Iterator[HookDict]:
    for kind in kinds:
        if kind in vars(owner):
            kind_in_words = kind.strip("_").removesuffix("s").replace("_", " ")
            yield HookDict(vars(owner)[kind], kind_in_words, type(owner).__name__)


def code_of(hook: Any) -> Any:
    """The code object of a hook: the same for every registration of the same function."""
    hook = inspect.unwrap(getattr(hook, "__func__", getattr(hook, "func", hook)))
    return getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)


# -- names in code ---------------------------------------------------------------------------------


def _read_by_class(kind: type) -> set[str]:
    """Attributes that the code of a class reads but does not assign, without the code of PyTorch's classes."""
    read: set[str] = set()
    assigned: set[str] = set()
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        methods = [method for name, method in vars(base).items() if name != "__init__"]
        read = read.union(*map(_names_used, methods))
        assigned = assigned.union(*map(_names_assigned, methods))
    return read - assigned


def _codes(function: Any) -> list[CodeType]:
    """The code of a function and of the functions defined inside it."""
    code = code_of(function) if callable(function) else None
    if not isinstance(code, CodeType):
        return []
    return list(nested_codes(code))


def _names_used(function: Any) -> set[str]:
    """Attributes and globals that a function uses."""
    return {name for code in _codes(function) for name in code.co_names}


def _names_assigned(function: Any) -> set[str]:
    instructions = [i for code in _codes(function) for i in dis.get_instructions(code)]
    return {i.argval for i in instructions if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
