"""The undo log: lets code run for real, and restores the memory that it wrote.

Warm-up and the recording of a tape execute the user's function. The undo log sees each operation through
the dispatcher, saves a storage before its first write, and restores it on rollback. It cannot see what
kernels launched outside PyTorch's dispatcher write. `transaction.py` restores everything that is not memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rollgraph.graph.errors import CaptureError, GeneratorError, Location, StateError, here
from rollgraph.graph.operation_mode import OperationMode
from rollgraph.graph.surface import Span, spanned

# Positions of arguments that an operation writes although its schema does not mark them as written.
_UNMARKED_WRITES = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4)}
# Kinds of arguments that hold no tensor.
_SCALARS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_HOST_WRITES = ("apply_", "map_", "map2_")  # methods that run Python for each element
_UNINITIALISED = ("aten::empty", "aten::new_empty")  # name prefixes; the first write gives the initial value
_FACTORIES = tuple(
    f"aten::{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "full", "empty", "arange", "lift")
)  # state made by these operations has the same initial value in every call


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, or None if it has none of its own (sparse, meta, wrappers)."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """The keys of the tensors' storages; equal keys mean the same memory, as long as a storage is alive."""
    keys: set[int] = set()
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage is not None:
            keys.add(storage._cdata)
    return keys


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    """The arguments of every operation pass through here, so plain containers skip pytree."""
    kind = type(tree)
    if kind is Tensor:
        found.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _add_tensors(item, found)
    elif kind is dict:
        for item in tree.values():
            _add_tensors(item, found)
    elif kind in _SCALARS:
        return
    elif isinstance(tree, Tensor):  # a parameter, or of another kind
        found.append(tree)
    else:
        found += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Traits(NamedTuple):
    """What an operation does, by its schema. Arguments are given by their positions and names."""

    written: list[tuple[int, str]]  # in place
    generators: list[tuple[int, str]]
    reshapes: bool  # changes the shape of its argument
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


def _arguments_at(places: Iterable[tuple[int, str]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in places]


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operation writes in place."""
    places = _traits_of(func).written
    return tensors_in(_arguments_at(places, args, kwargs)) if places else []


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage's memory as a tensor of bytes."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class UndoLog(OperationMode):
    """While entered, saves memory before operations overwrite it; `rollback()` restores it.

    Storages whose keys are in `unsaved` are left as the operations leave them.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled regions run compiled in warm-up, as they do in capture

    def __init__(self, unsaved: Container[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unsaved = unsaved
        self._saved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._written_at: dict[int, Location] = {}
        self._expected: set[int] = set()  # storages that a recording may write first
        self.refuse_new_writes = False
        # Storages that the function made itself; weak references, because most are intermediates.
        self._fresh: dict[int, StorageWeakRef] = {}
        self._made_by: dict[int, str] = {}  # storage -> the operation that made it
        self._made_here: set[int] = set()  # made in the current run
        self._made_again: set[int] = set()  # made in a run after the first
        self._fresh_saved: dict[int, Tensor] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._cuda_rng: dict[int, Tensor] = {}  # state of each CUDA generator after its last draw in this run
        # Of the current run: the writes to memory that it did not make, and how many preceded a storage's last read.
        self._writes: list[tuple[int, Span]] = []
        self._writes_at_read: dict[int, int] = {}

    @contextmanager
    def run(self, again: bool = False) -> Iterator[None]:
        """Wraps one run of the user's function; `again` if it ran before."""
        self._forget_dead()
        self._made_here = set()
        self._writes = []
        self._writes_at_read = {}
        self._cuda_rng = {id(g): g.get_state() for g in self._cuda_generators()}
        with own_autocast_cache(), self._saving_host_writes(), self:
            yield
        if again:
            self._made_again |= self._made_here

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
            inputs.clear()  # torch.tensor(...): a new constant, whose memory no operation made
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
            if storage is not None and storage._cdata not in inputs and storage._cdata not in self._fresh:
                self._fresh[storage._cdata] = StorageWeakRef(storage)
                self._made_by[storage._cdata] = func._schema.name
                self._made_here.add(storage._cdata)
        return result

    def saved(self) -> list[tuple[torch.UntypedStorage, Tensor]]:
        """The storages that were written, with their bytes from before."""
        return list(self._saved.values())

    def keep_fresh(self) -> None:
        """Exclude memory that the runs made themselves from the rollback."""
        self._fresh_saved.clear()

    def _cuda_generators(self) -> list[torch.Generator]:
        known = [generator for generator, _ in self.generators.values() if generator.device.type == "cuda"]
        if not torch.cuda.is_initialized():
            return known
        return [*torch.cuda.default_generators, *known]

    @contextmanager
    def _following_cuda_rng(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Raise GeneratorError if the RNG state was set inside the function, which a CUDA capture silently ignores.

        Activation checkpointing does so to draw the dropout of a region again. (A tape can hold that.)
        """
        once = func._schema.name == "aten::_cudnn_init_dropout_state"  # draws once for the process, not for each call
        given = _arguments_at(_traits_of(func).generators, args, kwargs)
        generator = next(filter(None, given), None) or torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.get_state()
        known = self._cuda_rng.setdefault(id(generator), before)
        if generator.device.type == "cuda" and not once and not torch.equal(known, before):
            raise GeneratorError(
                f"{func} at {here()} draws after the RNG state was set inside the function, which a CUDA graph cannot "
                "hold: seed before the call, and keep dropout out of checkpointed regions (or preserve_rng_state=False)"
            )
        yield
        self._cuda_rng[id(generator)] = generator.get_state()

    def _refuse_reshape(self, func: Any, written: list[Tensor]) -> None:
        for tensor in written:
            storage = storage_of(tensor)
            if storage is None or storage._cdata not in self._fresh:
                raise CaptureError(f"{func} at {here()} changes the shape of a tensor made outside the function")

    def check_reads(self, tensors: Iterable[Tensor]) -> None:
        """Raise StateError if a recording reads what the call before it made: replays would read that value forever.

        What the first call made and all later calls read is a cache, which is fine.
        """
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata in self._made_again:
                raise StateError(
                    f"a tensor of shape {tuple(tensor.shape)} passes from one call to the next through an attribute: "
                    "keep one tensor and update it with copy_"
                )

    def _note_write(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self._fresh and tensor.numel():
            self._writes.append((storage._cdata, spanned(tensor)))

    def writes_before_last_read(self, tensor: Tensor, returned: bool) -> list[tuple[int, Span]]:
        """Storage and span of what the last run wrote, in memory from outside, before it last read the tensor.

        Returning a tensor counts as a read at the very end.
        """
        storage = storage_of(tensor)
        if storage is None:
            return []
        if returned:
            return self._writes
        return self._writes[: self._writes_at_read.get(storage._cdata, 0)]

    @contextmanager
    def _saving_host_writes(self) -> Iterator[None]:
        """Save memory before the methods that write it without the dispatcher, too."""

        def saving(name: str) -> Any:
            write = getattr(torch._C.TensorBase, name)

            @wraps(write)
            def method(tensor: Tensor, *args: Any) -> Any:
                with _disable_current_modes():  # so that a recorder does not see the copy
                    self._save(tensor, f"Tensor.{name}")
                return write(tensor, *args)

            return method

        before = {name: vars(Tensor).get(name) for name in _HOST_WRITES}
        for name in _HOST_WRITES:
            setattr(Tensor, name, saving(name))
        try:
            yield
        finally:
            for name, method in before.items():
                if method is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, method)

    def _save(self, tensor: Tensor, func: Any) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._saved or storage._cdata in self._unsaved:
            return
        key = storage._cdata
        if key not in self._fresh:
            if self.refuse_new_writes and key not in self._expected:
                raise CaptureError(
                    f"{func} at {here()} writes memory that no earlier call wrote: the function did not get it from "
                    "PyTorch's factories (but from frombuffer or from_numpy). Clone it first"
                )
            self._saved[key] = (storage, bytes_of(storage).clone())
            self._written_at[key] = here()
        elif key in self._made_here:
            if self._made_by[key].startswith(_UNINITIALISED):
                self._made_by[key] = "aten::full"  # initialised by this write
            elif key not in self._fresh_saved:
                self._fresh_saved[key] = bytes_of(storage).clone()
        elif key not in self._fresh_saved or not self._made_by[key].startswith(_FACTORIES):
            raise CaptureError(
                f"{func} at {here()} updates state that an earlier call created, whose initial value is not known. "
                "Create the state before capturing, or run the function once"
            )

    def _forget_dead(self) -> None:
        for key in [key for key, ref in self._fresh.items() if ref.expired()]:
            del self._fresh[key], self._made_by[key]
            self._made_again.discard(key)
            self._fresh_saved.pop(key, None)

    def survivors(self) -> int:
        """How many bytes that the function made are still in use."""
        self._forget_dead()
        storages = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self._fresh)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Allow a recording to be the first to write these tensors."""
        self._expected |= storage_keys(tensors)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Treat state that the function created as if it had existed before, at its initial value."""
        tensors = list(tensors)
        self.expect(tensors)
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None or self._fresh.pop(storage._cdata, None) is None:
                continue
            del self._made_by[storage._cdata]
            initial = self._fresh_saved.pop(storage._cdata, None)
            if initial is not None:
                bytes_of(storage).copy_(initial)

    def wrote(self, tensor: Tensor) -> bool:
        """Whether a run wrote the tensor's memory."""
        storage = storage_of(tensor)
        return storage is not None and (storage._cdata in self._saved or storage._cdata in self._fresh_saved)

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
            for storage, saved in self._saved.values():
                if storage.nbytes() == saved.numel():
                    bytes_of(storage).copy_(saved)
            for key, saved in self._fresh_saved.items():
                storage = torch.UntypedStorage._new_with_weak_ptr(key)
                if storage is not None and storage.nbytes() == saved.numel():
                    bytes_of(storage).copy_(saved)
        for generator, state in self.generators.values():
            generator.set_state(state)


@contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Share no autocast weights with the outside: a cast inside a recording belongs to that recording."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
