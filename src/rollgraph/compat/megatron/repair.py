"""A repair: a known failure, a probe that reproduces it on small real objects, and the patches that fix it.

Owns the lifecycle of repairs and patches, and small Megatron objects for probes.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from rollgraph.compat.diagnosis import Diagnosis, RepairState

# -- patches ---------------------------------------------------------------------------------------
# Nothing here is specific to Megatron.

ABSENT: Any = object()  # in place of the value of a missing attribute


class CannotRepair(RuntimeError):
    """Internals that a repair needs are missing. Nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """`owner.name = value`, or `owner[name] = value` if the owner is a dictionary.

    With `everywhere`, modules that imported the old value by name get the new one too.
    """

    owner: Any  # a module, a class or a dictionary
    name: str
    value: Any
    everywhere: bool = False


@dataclass(frozen=True)
class InstalledPatch:
    patch: Patch
    original: Any  # ABSENT if the patch added the attribute

    def is_active(self) -> bool:
        return read_raw(self.patch.owner, self.patch.name) is self.patch.value


def install_patches(patches: list[Patch]) -> list[InstalledPatch]:
    installed: list[InstalledPatch] = []
    try:
        for patch in patches:
            entry = InstalledPatch(patch, read_raw(patch.owner, patch.name))
            write_raw(patch.owner, patch.name, patch.value)
            installed.append(entry)
            if patch.everywhere:
                rebind(entry.original, patch.value)
    except BaseException:
        restore_originals(installed)
        raise
    return installed


def uninstall_patches(installed: list[InstalledPatch]) -> None:
    replaced = describe_replaced(installed)
    if replaced:
        raise RuntimeError(f"cannot undo: {replaced}")
    restore_originals(installed)


def describe_replaced(installed: list[InstalledPatch]) -> str:
    """A sentence that names the patches that other code has replaced; empty if there are none."""
    names = [f"{qualified_name(entry.patch.owner)}.{entry.patch.name}" for entry in installed if not entry.is_active()]
    return f"{', '.join(names)} was replaced since" if names else ""


def restore_originals(installed: list[InstalledPatch]) -> None:
    for entry in reversed(installed):
        write_raw(entry.patch.owner, entry.patch.name, entry.original)
        if entry.patch.everywhere:
            rebind(entry.patch.value, entry.original)


def rebind(old: Any, new: Any) -> None:
    """Replace `old` in every module that has it as a global, for example by `from module import function`."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = [name for name, value in list(vars(module).items()) if value is old]
            vars(module).update(dict.fromkeys(names, new))


def read_raw(owner: Any, name: str) -> Any:
    """The stored value without binding: for a class, the classmethod object rather than the bound method."""
    stored = owner if isinstance(owner, dict) else vars(owner)
    return stored.get(name, ABSENT)


def write_raw(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def require_attributes(owner: Any, *names: str) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise CannotRepair(f"{qualified_name(owner)} has no {name}")


def require_parameters(function: Callable[..., Any], *names: str) -> None:
    actual = tuple(inspect.signature(function).parameters)
    if actual != names:
        raise CannotRepair(f"{qualified_name(function)} takes ({', '.join(actual)}), not ({', '.join(names)})")


def require_names_in_code(function: Callable[..., Any], *names: str) -> None:
    """Require that a function's code mentions these names: attributes of objects that do not exist yet."""
    missing = [name for name in names if name not in function.__code__.co_names]
    if missing:
        raise CannotRepair(f"{qualified_name(function)} does not mention {', '.join(missing)}")


def qualified_name(target: Any) -> str:
    if isinstance(target, ModuleType):
        return target.__name__
    if isinstance(target, type) or callable(target):
        return f"{target.__module__}.{target.__qualname__}"
    return type(target).__name__


def closure_values(function: Any) -> list[Any]:
    """The values in a function's closure; empty for anything that is not a function."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is still empty
            values.append(cell.cell_contents)
    return values


@contextmanager
def patch_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set these attributes of the owner inside the context."""
    with preserve_attributes(owner, *values):
        for name, value in values.items():
            write_raw(owner, name, value)
        yield


@contextmanager
def preserve_attributes(owner: Any, *names: str) -> Iterator[None]:
    """Restore these attributes afterwards, and remove those that did not exist before."""
    before = {name: read_raw(owner, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not ABSENT or read_raw(owner, name) is not ABSENT:
                write_raw(owner, name, value)


# -- repairs ---------------------------------------------------------------------------------------

ADVICE = "rollgraph.compat.megatron.repair()"


@dataclass(frozen=True)
class Verdict:
    """The result of a probe. `note` says what fails, or why the probe could not run."""

    state: RepairState
    note: str = ""


def verdict_from(failures: list[str]) -> Verdict:
    """Affected if anything failed, with all failures in the note."""
    if failures:
        return Verdict(RepairState.AFFECTED, "; ".join(failures))
    return Verdict(RepairState.CLEAR)


@dataclass
class Repair:
    name: str
    symptom: str
    reason: str
    run_probe: Callable[[], Verdict]  # runs the real code on small objects, and leaves the process unchanged
    make_patches: Callable[[], list[Patch]]  # changes nothing; raises CannotRepair if internals are missing
    cleanup: Callable[[], None] = lambda: None  # after `undo`: removes state of the patches from the user's objects
    installed: list[InstalledPatch] = field(default_factory=list)

    @property
    def is_active(self) -> bool:
        return bool(self.installed) and all(entry.is_active() for entry in self.installed)

    def probe(self) -> Verdict:
        try:
            return self.run_probe()
        except Exception as error:  # internals that it uses have moved
            return Verdict(RepairState.UNKNOWN, f"the probe does not run here: {type(error).__name__}: {error}")

    def apply(self) -> None:
        """Install the patches; raises CannotRepair, and changes nothing, if that does not fix the failure."""
        if self.is_active:
            return
        if self.installed:
            raise CannotRepair(describe_replaced(self.installed))
        try:
            self.installed = install_patches(self.make_patches())
        except CannotRepair:
            raise
        except Exception as error:
            raise CannotRepair(f"{type(error).__name__}: {error}") from error
        try:
            verdict = self.probe()
            if verdict.state is not RepairState.CLEAR:
                raise CannotRepair(f"the failure is still there with the repair: {verdict.note}")
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        if self.installed:
            uninstall_patches(self.installed)
            self.installed = []
            self.cleanup()

    def diagnose(self) -> Diagnosis:
        if self.is_active:
            return self.describe(RepairState.REPAIRED)
        verdict = self.probe()
        return self.describe(verdict.state, verdict.note)

    def repair_if_affected(self) -> Diagnosis:
        """Apply the repair only if the probe reproduces the failure. Otherwise nothing is changed."""
        diagnosis = self.diagnose()
        if diagnosis.state is not RepairState.AFFECTED:
            return diagnosis
        try:
            self.apply()
        except CannotRepair as error:
            return Diagnosis(
                diagnosis.name, diagnosis.state, diagnosis.symptom, diagnosis.reason, f"cannot repair: {error}"
            )
        return self.describe(RepairState.REPAIRED)

    def describe(self, state: RepairState, note: str = "") -> Diagnosis:
        reason = self.reason
        if state is RepairState.AFFECTED:
            if note:
                reason = f"{reason} Here: {note}."
            advice = ADVICE
        elif state is RepairState.REPAIRED:
            advice = "in force; rollgraph.compat.megatron.undo() reverts it"
        else:
            reason = note or reason
            advice = "nothing to do"
            if state is RepairState.UNKNOWN:
                advice = "cannot repair: what cannot be tried is left alone"
        return Diagnosis(self.name, state, self.symptom, reason, advice)


# -- objects for probes ----------------------------------------------------------------------------


class SingleRankGroup:
    """Stands in for a process group with one rank, in code that only reads its size and rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@contextmanager
def silence_megatron() -> Iterator[None]:
    """Silence Megatron's logs and warnings about a probe's objects, which users would take for their own."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("megatron.") and isinstance(logger, logging.Logger) and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.disabled = False


def make_config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    with silence_megatron():
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def wrap_ddp(module: nn.Module) -> Any:
    """Megatron's DDP with forward pre-hooks, around a module without parameters: nothing is allocated or gathered."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    group = SingleRankGroup()
    names = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "tp", "pp", "ep")
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    groups = SimpleNamespace(**dict.fromkeys(names, group))
    with silence_megatron():
        return DistributedDataParallel(make_config(), settings, module, pg_collection=groups)


def make_runner(need_backward: bool = False) -> Any:
    """A graph runner for `x * 2`, as a graph manager makes it in the first call of its module."""
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    module: Any = nn.Identity()
    module.config = make_config()
    return _CudaGraphRunner(module, None, [torch.zeros(2)], {}, lambda x: x * 2, need_backward)


class GcStandIn:
    """`gc` without collections, which would take longer than the rest of a probe."""

    def collect(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)


class TorchStandIn:
    """`torch` for probes without GPU and process group: a capture records nothing, and the rank is 1."""

    def __init__(self) -> None:
        self.distributed = SimpleNamespace(get_rank=lambda *group: 1)
        self.cuda = CudaStandIn()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class CudaStandIn:
    CUDAGraph = type("GraphStandIn", (), {"register_generator_state": lambda self, state: None})

    class graph:
        def __init__(self, *arguments: Any, **settings: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *exception: Any) -> None: ...

    def synchronize(self) -> None: ...

    def device_count(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)
