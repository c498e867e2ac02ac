"""Slots: the places where a program keeps what a graph was captured with, found and named at capture.

They are parameters, buffers and children of modules, constants of built-in modules, tensors in plain
attributes, state and hyper-parameters of optimizers, and dictionaries of hooks. `binding.py` compares them
before each replay, so a place that a correct program changes between replays does not belong here.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollgraph.graph.bytecode import nested_codes
from rollgraph.graph.live_objects import ProgramObjects
from rollgraph.graph.names import Paths
from rollgraph.graph.undo_log import UndoLog

_PLAIN = frozenset({type(None), bool, int, float, complex, str, tuple})
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Attributes of built-in modules that describe their weights. Their forward looks at the weights instead.
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
    """One place, and its value at capture."""

    container: dict[Any, Any]
    key: Any
    value: Any
    name: str
    single: bool = False  # only this entry of the container is bound; the others may change
    may_vanish: bool = False  # the entry may be deleted: the graph keeps the value, where the function would raise


class HookPlace(NamedTuple):
    """The dictionary in which a module or optimizer registers hooks of one kind."""

    hooks: Mapping[Any, Any]
    kind: str
    owner: str


# -- modules ---------------------------------------------------------------------------------------


def slots_of(
    target: Any,
    modules: Sequence[nn.Module],
    called: Mapping[int, nn.Module],
    read: Sequence[Tensor],
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> list[BoundSlot]:
    """All slots except those of optimizers; `read` are the tensors that the recording read."""
    return [
        *module_slots(modules),
        *entry_slots(called),
        *constant_slots(called.values()),
        *tensor_slots([*modules, *optimizers], read),
        *path_slots(target, called, read),
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
    found = []
    for module in modules:
        own = (*module._parameters.values(), *module._buffers.values())
        if any(id(tensor) in ids for tensor in own):
            found.append(module)
    return found


def constant_slots(called: Iterable[nn.Module]) -> Iterator[BoundSlot]:
    """Plain attributes that decide what a module computes: those of built-in modules, and declared `__constants__`.

    Other attributes of the program's own classes may be counters or caches; whether a result depends on one is unknown.
    """
    for module in called:
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
            if name not in _assigned(getattr(owner, "forward", None)):
                yield BoundSlot(attributes, name, value, f"{type(owner).__name__}.{name}", single=True, may_vanish=True)


def path_slots(target: Any, called: Mapping[int, nn.Module], tensors: Iterable[Tensor]) -> list[BoundSlot]:
    """The attributes and globals through which a function reaches the modules it called and the tensors it read."""
    if isinstance(target, nn.Module):
        return []
    ids = set(map(id, tensors))

    def wanted(value: Any) -> bool:
        return id(value) in ids or (isinstance(value, nn.Module) and _was_called(value, called))

    return [BoundSlot(*step, single=True, may_vanish=True) for step in Paths(target, wanted).found]


# -- lists of modules ------------------------------------------------------------------------------


def fully_called_lists(called: Mapping[int, nn.Module], alive: Iterable[nn.Module]) -> list[nn.Module]:
    """Lists and dictionaries of modules whose entries were all called. (The list itself is never called.)"""
    longer = [m for m in alive if isinstance(m, _LISTS) and len(m._modules) > 1]
    found: list[nn.Module] = [m for m in longer if _was_called(m, called)]
    found += [m for m in _lists_below(called) if _was_called(m, called) or not m._modules]
    return list({id(m): m for m in found}.values())


def entry_slots(called: Mapping[int, nn.Module]) -> Iterator[BoundSlot]:
    """The called entries of lists below a called module, whether or not all entries were called."""
    for module in _lists_below(called):
        for key, entry in module._modules.items():
            if entry is not None and _was_called(entry, called):
                yield BoundSlot(module._modules, key, entry, f"{type(module).__name__}.{key}", single=True)


def growable_lists(modules: Sequence[nn.Module], called: Mapping[int, nn.Module]) -> list[nn.Module]:
    """The lists and dictionaries of modules in which a new entry would run: those whose entries were all called.

    An empty one counts if the `forward` of its parent module names it.
    """
    found: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, _LISTS):
            continue
        if _was_called(module, called) or (not module._modules and _is_named(module, modules)):
            found.append(module)
    return found


def _is_named(child: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Whether the `forward` of a parent names the attribute that `child` is in."""
    for parent in modules:
        for key, found in parent._modules.items():
            if found is child and key in _names(parent.forward):
                return True
    return False


def _lists_below(called: Mapping[int, nn.Module]) -> Iterator[nn.Module]:
    pending = list(called.values())
    while pending:
        for child in pending.pop()._modules.values():
            if isinstance(child, _LISTS) and id(child) not in called:
                yield child
                pending.append(child)


def _was_called(module: nn.Module, called: Mapping[int, nn.Module]) -> bool:
    """Whether the module was called or, if it is a list, all of its entries were."""
    if id(module) in called:
        return True
    entries = module._modules.values() if isinstance(module, _LISTS) else ()
    return bool(entries) and all(entry is not None and _was_called(entry, called) for entry in entries)


# -- optimizers ------------------------------------------------------------------------------------


def stepped_optimizers(objects: ProgramObjects, undo_log: UndoLog) -> list[torch.optim.Optimizer]:
    """The optimizers that stepped while the undo log was active."""
    return [o for o in objects.optimizers if _with_written_state(o, undo_log) or _writes_parameters(o, undo_log)]


def optimizer_slots(optimizers: Iterable[torch.optim.Optimizer], undo_log: UndoLog) -> list[BoundSlot]:
    """State, hyper-parameters, and the attributes that an optimizer class of the program reads in its own code."""
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


def hook_places(called: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[HookPlace]:
    """Where hooks are registered that run inside a graph's function, but not in its replay."""
    kinds = _MODULE_HOOKS if torch.is_grad_enabled() else _MODULE_HOOKS[:2]
    places: list[HookPlace] = []
    for module in called:
        places += _hook_places_of(module, kinds)
    for optimizer in optimizers:
        places += _hook_places_of(optimizer, _OPTIMIZER_HOOKS)
    return places


def _hook_places_of(owner: Any, kinds: Iterable[str]) -> Iterator[HookPlace]:
    for kind in kinds:
        if kind in vars(owner):
            readable = kind.strip("_").removesuffix("s").replace("_", " ")
            yield HookPlace(vars(owner)[kind], readable, type(owner).__name__)


def code_of(hook: Any) -> Any:
    """The code of a hook's function, which is the same for every registration of it."""
    hook = inspect.unwrap(getattr(hook, "__func__", getattr(hook, "func", hook)))
    return getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)


# -- what code does with names ---------------------------------------------------------------------


def _read_by_class(kind: type) -> set[str]:
    """Names of attributes that the code of a class reads but does not assign, without PyTorch's own classes."""
    read: set[str] = set()
    assigned: set[str] = set()
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        methods = [method for name, method in vars(base).items() if name != "__init__"]
        read = read.union(*map(_names, methods))
        assigned = assigned.union(*map(_assigned, methods))
    return read - assigned


def _codes(function: Any) -> list[CodeType]:
    """The code of a function and of the functions defined inside it."""
    code = code_of(function) if callable(function) else None
    if not isinstance(code, CodeType):
        return []
    return list(nested_codes(code))


def _names(function: Any) -> set[str]:
    """Attributes and globals that a function uses."""
    return {name for code in _codes(function) for name in code.co_names}


def _assigned(function: Any) -> set[str]:
    instructions = [i for code in _codes(function) for i in dis.get_instructions(code)]
    return {i.argval for i in instructions if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
