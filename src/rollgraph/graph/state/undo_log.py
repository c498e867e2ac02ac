"""The undo log: lets code run for real, and restores the memory that it wrote.

Warm-up and the recording of a tape execute the user's function. The undo log sees each operation through the
dispatcher, saves a storage before its first write, and restores it on rollback. It misses writes of kernels that are
launched outside PyTorch's dispatcher. `transaction.py` restores everything that is not memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rollgraph.graph.errors import CaptureError, GeneratorError, Location, StateError, here
from rollgraph.graph.surface import Span, memory_span

# -- the base of modes that see every operation ----------------------------------------------------
# PyTorch's base class costs seconds at the first such mode; this one does not.


class OperationMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is never compiled.

    PyTorch's base class ensures that by importing the compiler, which takes seconds. But a process that did not import
    the compiler compiles nothing. So we only disable compilation if the compiler is imported already.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `__init_subclass__` does that instead

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in cls.__dict__:
            cls.__torch_dispatch__ = _never_compiled(cls.__dict__["__torch_dispatch__"])  # type: ignore[method-assign]


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    uncompiled = torch._disable_dynamo(function)  # imports the compiler when it is called

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


# -- the log ---------------------------------------------------------------------------------------

# Positions of arguments that an operation writes although its schema does not say so.
_UNMARKED_WRITES = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4)}
# Types of arguments that contain no tensor.
_SCALARS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_HOST_WRITES = ("apply_", "map_", "map2_")  # methods that run Python for each element
_UNINITIALISED = ("aten::empty", "aten::new_empty")  # name prefixes; the first write sets the initial value
_FACTORIES = tuple(
    f"aten::{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "full", "empty", "arange", "lift")
)  # state from these operations has the same initial value in every call


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, or None if it has none of its own (sparse, meta, wrappers)."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """The keys of the tensors' storages. While a storage is alive, equal keys mean the same memory."""
    keys: set[int] = set()
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage is not None:
            keys.add(storage._cdata)
    return keys


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    tensors: list[Tensor] = []
    _add_tensors(tree, tensors)
    return tensors


def _add_tensors(tree: Any, tensors: list[Tensor]) -> None:
    """Fast: the arguments of every operation pass through here, so plain containers skip pytree."""
    kind = type(tree)
    if kind is Tensor:
        tensors.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _add_tensors(item, tensors)
    elif kind is dict:
        for item in tree.values():
            _add_tensors(item, tensors)
    elif kind in _SCALARS:
        return
    elif isinstance(tree, Tensor):  # a parameter or another subclass
        tensors.append(tree)
    else:
        tensors += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Traits(NamedTuple):
    """Properties of an operation, from its schema. Arguments are (position, name)."""

    written: list[tuple[int, str]]  # arguments written in place
    generators: list[tuple[int, str]]
    reshapes: bool  # changes the shape of its argument in place
    draws: bool  # random numbers


@cache
def _traits_of(func: Any) -> _Traits:
    unmarked = _UNMARKED_WRITES.get(func._schema.name, ())
    written = []
    generators = []
    for index, argument in enumerate(func._schema.arguments):
        if index in unmarked or (argument.alias_info is not None and argument.alias_info.is_write):
            written.append((index, argument.name))
        if "Generator" in str(argument.type):
            generators.append((index, argument.name))
    reshapes = torch.Tag.inplace_view in func.tags
    return _Traits(written, generators, reshapes, torch.Tag.nondeterministic_seeded in func.tags)


def _arguments_at(positions: Iterable[tuple[int, str]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in positions]


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operation writes in place."""
    positions = _traits_of(func).written
    return tensors_in(_arguments_at(positions, args, kwargs)) if positions else []


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage's memory as a tensor of bytes."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class UndoLog(OperationMode):
    """While entered, saves memory before operations overwrite it; `rollback()` restores it.

    Storages whose keys are in `unsaved` are neither saved nor restored.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled regions run compiled in warm-up, as they do in capture

    def __init__(self, unsaved: Container[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unsaved = unsaved
        self._saved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._written_at: dict[int, Location] = {}
        self._writable: set[int] = set()  # storages that a recording may be the first to write
        self.refuse_new_writes = False
        self.wrote_unsaved = False  # a run wrote memory that is not restored
        # Storages that the function created; weak references, because most are intermediates.
        self._created: dict[int, StorageWeakRef] = {}
        self._created_by: dict[int, str] = {}  # storage -> the operation that created it
        self._created_this_run: set[int] = set()
        self._created_in_rerun: set[int] = set()  # created in a run after the first
        self._created_saved: dict[int, Tensor] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._cuda_rng: dict[int, Tensor] = {}  # state of each CUDA generator after its last draw in this run
        # In the current run: writes to memory from outside, and how many of them preceded the last read of a storage.
        self._writes: list[tuple[int, Span]] = []
        self._writes_at_read: dict[int, int] = {}

    @contextmanager
    def run(self, is_rerun: bool = False) -> Iterator[None]:
        """Wraps one run of the user's function; `is_rerun` means that it ran before."""
        self._forget_dead()
        self._created_this_run = set()
        self._writes = []
        self._writes_at_read = {}
        self._cuda_rng = {id(g): g.get_state() for g in self._cuda_generators()}
        with isolated_autocast_cache(), self._saving_host_writes(), self:
            yield
        if is_rerun:
            self._created_in_rerun |= self._created_this_run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = _traits_of(func)
        for generator in _arguments_at(traits.generators, args, kwargs):
            if generator is not None and id(generator) not in self.generators:
                self.generators[id(generator)] = (generator, generator.get_state())
        written = written_arguments(func, args, kwargs)
        if traits.reshapes:
            self._refuse_reshape(func, written)
        for tensor in written:
            self._save(tensor, func)
        inputs = storage_keys(tensors_in((args, kwargs)))
        if func is torch.ops.aten.lift_fresh.default:
            inputs.clear()  # torch.tensor(...): a new constant, whose memory no operation created
        self._writes_at_read.update(dict.fromkeys(inputs, len(self._writes)))
        for tensor in written:
            self._note_write(tensor)
        if traits.draws and torch.cuda.is_initialized():
            with self._following_cuda_rng(func, args, kwargs):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in inputs and storage._cdata not in self._created:
                self._created[storage._cdata] = StorageWeakRef(storage)
                self._created_by[storage._cdata] = func._schema.name
                self._created_this_run.add(storage._cdata)
        return result

    def saved(self) -> list[tuple[torch.UntypedStorage, Tensor]]:
        """The storages that were written, with their bytes from before the first write."""
        return list(self._saved.values())

    def keep_created(self) -> None:
        """Exclude memory that the runs created from the rollback."""
        self._created_saved.clear()

    def _cuda_generators(self) -> list[torch.Generator]:
        known = [generator for generator, _ in self.generators.values() if generator.device.type == "cuda"]
        if not torch.cuda.is_initialized():
            return known
        return [*torch.cuda.default_generators, *known]

    @contextmanager
    def _following_cuda_rng(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Raise GeneratorError if the function sets the RNG state, which a CUDA capture silently ignores.

        Activation checkpointing sets it to draw the dropout of a region again. (A tape can record that.)
        """
        draws_once = func._schema.name == "aten::_cudnn_init_dropout_state"  # per process, not per call
        generators = _arguments_at(_traits_of(func).generators, args, kwargs)
        generator = next(filter(None, generators), None) or torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.get_state()
        known = self._cuda_rng.setdefault(id(generator), before)
        if generator.device.type == "cuda" and not draws_once and not torch.equal(known, before):
            raise GeneratorError(
                f"{func} at {here()} draws after the RNG state was set inside the function, which a CUDA graph cannot "
                "hold: seed before the call, and keep dropout out of checkpointed regions (or preserve_rng_state=False)"
            )
        yield
        self._cuda_rng[id(generator)] = generator.get_state()

    def _refuse_reshape(self, func: Any, written: list[Tensor]) -> None:
        for tensor in written:
            storage = storage_of(tensor)
            if storage is None or storage._cdata not in self._created:
                raise CaptureError(f"{func} at {here()} changes the shape of a tensor made outside the function")

    def check_reads(self, tensors: Iterable[Tensor]) -> None:
        """Raise StateError if a recording reads a tensor that the previous run created: replays would reuse it forever.

        A tensor that the first run created and all later runs read is a cache, which is fine.
        """
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata in self._created_in_rerun:
                raise StateError(
                    f"a tensor of shape {tuple(tensor.shape)} passes from one call to the next through an attribute: "
                    "keep one tensor and update it with copy_"
                )

    def _note_write(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self._created and tensor.numel():
            self._writes.append((storage._cdata, memory_span(tensor)))

    def writes_before_last_read(self, tensor: Tensor, is_returned: bool) -> list[tuple[int, Span]]:
        """(storage, span) of each write of the last run to memory from outside, up to its last read of the tensor.

        Returning the tensor counts as a read at the very end.
        """
        storage = storage_of(tensor)
        if storage is None:
            return []
        if is_returned:
            return self._writes
        return self._writes[: self._writes_at_read.get(storage._cdata, 0)]

    @contextmanager
    def _saving_host_writes(self) -> Iterator[None]:
        """Also save memory before Tensor methods that write it without the dispatcher."""

        def saving(name: str) -> Any:
            write = getattr(torch._C.TensorBase, name)

            @wraps(write)
            def method(tensor: Tensor, *args: Any) -> Any:
                with _disable_current_modes():  # so that a recorder does not see the copy
                    self._save(tensor, f"Tensor.{name}")
                return write(tensor, *args)

            return method

        originals = {name: vars(Tensor).get(name) for name in _HOST_WRITES}
        for name in _HOST_WRITES:
            setattr(Tensor, name, saving(name))
        try:
            yield
        finally:
            for name, method in originals.items():
                if method is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, method)

    def _save(self, tensor: Tensor, func: Any) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._saved:
            return
        key = storage._cdata
        if key in self._unsaved:
            self.wrote_unsaved = True
            return
        if key not in self._created:
            if self.refuse_new_writes and key not in self._writable:
                raise CaptureError(
                    f"{func} at {here()} writes memory that no earlier call wrote: the function did not get it from "
                    "PyTorch's factories (but from frombuffer or from_numpy). Clone it first"
                )
            self._saved[key] = (storage, bytes_of(storage).clone())
            self._written_at[key] = here()
        elif key in self._created_this_run:
            if self._created_by[key].startswith(_UNINITIALISED):
                self._created_by[key] = "aten::full"  # initialised by this write
            elif key not in self._created_saved:
                self._created_saved[key] = bytes_of(storage).clone()
        elif key not in self._created_saved or not self._created_by[key].startswith(_FACTORIES):
            raise CaptureError(
                f"{func} at {here()} updates state that an earlier call created, whose initial value is not known. "
                "Create the state before capturing, or run the function once"
            )

    def _forget_dead(self) -> None:
        for key in [key for key, ref in self._created.items() if ref.expired()]:
            del self._created[key], self._created_by[key]
            self._created_in_rerun.discard(key)
            self._created_saved.pop(key, None)

    def live_created(self) -> set[int]:
        """The keys of storages that the function created and that are still in use."""
        self._forget_dead()
        return set(self._created)

    def has_references_besides(self, known_counts: Mapping[int, int]) -> bool:
        """Whether storages that the function created have more tensors than `known_counts` (storage key -> count)."""
        with _disable_current_modes():
            fresh = torch.empty(1)
        unrelated = torch._C._storage_Use_Count(fresh.untyped_storage()._cdata) - 1  # references that any storage has
        return any(
            torch._C._storage_Use_Count(key) - unrelated > known_counts.get(key, 0) for key in self.live_created()
        )

    def surviving_bytes(self) -> int:
        """How many bytes of memory that the function created are still in use."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self.live_created())
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def allow_writes(self, tensors: Iterable[Tensor]) -> None:
        """Allow a recording to be the first to write these tensors."""
        self._writable |= storage_keys(tensors)

    def adopt_state(self, tensors: Iterable[Tensor]) -> None:
        """Treat state that the function created as if it had existed before with its initial value."""
        tensors = list(tensors)
        self.allow_writes(tensors)
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None or self._created.pop(storage._cdata, None) is None:
                continue
            del self._created_by[storage._cdata]
            initial = self._created_saved.pop(storage._cdata, None)
            if initial is not None:
                bytes_of(storage).copy_(initial)

    def wrote(self, tensor: Tensor) -> bool:
        """Whether a run wrote the tensor's memory."""
        storage = storage_of(tensor)
        return storage is not None and (storage._cdata in self._saved or storage._cdata in self._created_saved)

    def written_at(self, tensor: Tensor) -> Location | None:
        """The line that first wrote the memory of a tensor from outside."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        return self._written_at.get(storage._cdata)

    def rollback(self) -> None:
        """Restore the bytes of every saved storage in place, and the state of every generator."""
        self._forget_dead()
        with torch.no_grad():
            for storage, saved in reversed(self._saved.values()):  # two storages may share memory: undo in reverse
                if storage.nbytes() == saved.numel():
                    bytes_of(storage).copy_(saved)
            for key, saved in self._created_saved.items():
                storage = torch.UntypedStorage._new_with_weak_ptr(key)
                if storage is not None and storage.nbytes() == saved.numel():
                    bytes_of(storage).copy_(saved)
        for generator, state in self.generators.values():
            generator.set_state(state)


@contextmanager
def isolated_autocast_cache() -> Iterator[None]:
    """Isolate the cache of autocast weights: a cast inside a recording belongs to that recording."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
