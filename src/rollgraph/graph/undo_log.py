"""The undo log: runs code for real and puts everything back.

Warm-up (and a tape's recording) executes the user's function. The undo log sees each operation by
dispatch, saves a storage before its first write, and on rollback restores values, gradients, RNG and
modes. What kernels launched outside PyTorch's dispatcher write, it cannot see.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rollgraph.graph.errors import CaptureError, GeneratorError, Location, StateError, here
from rollgraph.graph.live_objects import ProgramObjects, PythonState
from rollgraph.graph.surface import Span, spanned

# Operations that write arguments their schema does not mark as written: argument positions.
_UNMARKED_WRITES = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4)}
_HOST_WRITES = ("apply_", "map_", "map2_")  # they run Python for each element
_UNINITIALISED = ("aten::empty", "aten::new_empty")  # prefixes: the first write is the initial value
_FACTORIES = tuple(
    f"aten::{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "full", "empty", "arange", "lift")
)  # state made by these has the same initial value in every call


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, or None where it has none of its own (sparse, meta, wrappers)."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tensors_in(tree: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operation writes in place."""
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        unmarked = _UNMARKED_WRITES.get(func._schema.name)
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (unmarked is not None and index in unmarked):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += tensors_in(value)
    return written


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class UndoLog(TorchDispatchMode):
    """Saves what operations overwrite while it is entered; `rollback()` restores it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled regions run compiled in warm-up, as they will in capture

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._written_at: dict[int, Location] = {}
        self._expected: set[int] = set()  # storages that a recording may be the first to write
        self.refuse_new_writes = False
        # Storages the function made itself: weak, because most are intermediates.
        self._fresh: dict[int, StorageWeakRef] = {}
        self._made_by: dict[int, str] = {}  # with the operation that made them
        self._made_here: set[int] = set()  # those of the current run
        self._made_again: set[int] = set()  # those of a call that was not the first
        self._fresh_saved: dict[int, Tensor] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._cuda_rng: dict[int, Tensor] = {}  # state of each CUDA stream after its last draw in this run
        self._writes: list[tuple[int, Span]] = []  # in this run: storage and place of each write from outside it
        self._writes_at_read: dict[int, int] = {}  # storage -> how many of them it was last read after

    @contextmanager
    def run(self, again: bool = False) -> Iterator[None]:
        """One execution of the user's function; `again` if it was called before."""
        self._forget_dead()
        self._made_here = set()
        self._writes, self._writes_at_read = [], {}
        self._cuda_rng = {id(g): g.get_state() for g in self._cuda_generators()}
        with own_autocast_cache(), self._saving_host_writes(), self:
            yield
        if again:
            self._made_again |= self._made_here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self.generators:
                self.generators[id(value)] = (value, value.get_state())
        written = written_arguments(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            self._refuse_reshape(func, written)
        for tensor in written:
            self._save(tensor, func)
        inputs = {s._cdata for t in tensors_in((args, kwargs)) if (s := storage_of(t)) is not None}
        if func is torch.ops.aten.lift_fresh.default:
            inputs.clear()  # torch.tensor(...): a new constant, whose memory only now comes into sight
        self._writes_at_read.update(dict.fromkeys(inputs, len(self._writes)))
        for tensor in written:
            self._note_write(tensor)
        with self._following_cuda_rng(func, args, kwargs):
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in inputs and storage._cdata not in self._fresh:
                self._fresh[storage._cdata] = StorageWeakRef(storage)
                self._made_by[storage._cdata] = func._schema.name
                self._made_here.add(storage._cdata)
        return result

    def saved(self) -> list[tuple[torch.UntypedStorage, Tensor]]:
        """What was written, with the bytes it had before."""
        return list(self._saved.values())

    def keep_fresh(self) -> None:
        """What the runs made themselves keeps its values when the rest is rolled back."""
        self._fresh_saved.clear()

    def _cuda_generators(self) -> list[torch.Generator]:
        known = [generator for generator, _ in self.generators.values() if generator.device.type == "cuda"]
        return [*torch.cuda.default_generators, *known] if torch.cuda.is_initialized() else known

    @contextmanager
    def _following_cuda_rng(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Find RNG states set inside the function: a CUDA capture ignores them without a word.

        Activation checkpointing does it to draw a region's dropout again. (A tape can hold that.)
        """
        if torch.Tag.nondeterministic_seeded not in func.tags or not torch.cuda.is_initialized():
            yield
            return
        once = func._schema.name == "aten::_cudnn_init_dropout_state"  # draws for the process, not for the call
        given = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        generator = given or torch.cuda.default_generators[torch.cuda.current_device()]
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
                raise CaptureError(f"{func} at {here()} changes the shape of a tensor that the function did not make")

    def check_reads(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a recording that reads what the call before it made: a replay would read that for ever.

        What the first call made and all others read is a cache, and fine.
        """
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata in self._made_again:
                raise StateError(
                    f"a tensor of shape {tuple(tensor.shape)} passes from one call to the next through an attribute: "
                    "keep it in one tensor and update that with copy_"
                )

    def _note_write(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self._fresh and tensor.numel():
            self._writes.append((storage._cdata, spanned(tensor)))

    def overtaking(self, tensor: Tensor, returned: bool) -> list[tuple[int, Span]]:
        """What the last run wrote outside of itself before it read the tensor for the last time, by storage.

        To return a tensor is to read it at the very end.
        """
        storage = storage_of(tensor)
        if storage is None:
            return []
        return self._writes if returned else self._writes[: self._writes_at_read.get(storage._cdata, 0)]

    @contextmanager
    def _saving_host_writes(self) -> Iterator[None]:
        """The methods that write without a word to the dispatcher save what they write too."""

        def saving(name: str) -> Any:
            write = getattr(torch._C.TensorBase, name)

            @wraps(write)
            def method(tensor: Tensor, *args: Any) -> Any:
                with _disable_current_modes():  # a recorder must not see the copy
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
        if storage is None or storage._cdata in self._saved:
            return
        key = storage._cdata
        if key not in self._fresh:
            if self.refuse_new_writes and key not in self._expected:
                raise CaptureError(
                    f"{func} at {here()} writes memory that no call before it wrote: it came into the function by "
                    "another way than PyTorch's factories (frombuffer, from_numpy). Clone it first"
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
                f"{func} at {here()} updates state that an earlier call created: its value before the first call is "
                "not known. Create the state before capturing, or run the function once"
            )

    def _forget_dead(self) -> None:
        for key in [key for key, ref in self._fresh.items() if ref.expired()]:
            del self._fresh[key], self._made_by[key]
            self._made_again.discard(key)
            self._fresh_saved.pop(key, None)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """These may be written for the first time by a recording."""
        self._expected |= {storage._cdata for t in tensors if (storage := storage_of(t)) is not None}

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Treat state that the function created as if it had always been there, at its initial value."""
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
        storage = storage_of(tensor)
        return storage is not None and (storage._cdata in self._saved or storage._cdata in self._fresh_saved)

    def written_at(self, tensor: Tensor) -> Location | None:
        """The line that first wrote the memory of a tensor that was there before."""
        storage = storage_of(tensor)
        return None if storage is None else self._written_at.get(storage._cdata)

    def rollback(self) -> None:
        """Restore every saved storage to its bytes, in place."""
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


class RngState:
    """All random streams of the process: PyTorch's per device, Python's and NumPy's."""

    def __init__(self) -> None:
        self._cpu = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Transaction:
    """A capture attempt: whatever happens inside, the process is afterwards as it was before.

    Gradients may be rebound inside (`leaf.grad = ...`); each leaf gets back the gradient it had.
    """

    def __init__(self, *roots: Any) -> None:
        self.undo_log = UndoLog()
        self._roots = roots

    def __enter__(self) -> Transaction:
        self._rng = RngState()
        self._gc = gc.isenabled()
        self._grad_mode = torch.is_grad_enabled()
        self.objects = ProgramObjects(*self._roots)
        self._python = PythonState(self.objects)
        self.entry_gradients = [(leaf, leaf.grad) for leaf in self.objects.leaves]
        self._states = [(o, {p: set(s) for p, s in o.state.items()}) for o in self.objects.optimizers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_grad_enabled(self._grad_mode)
        with ExitStack() as restore:  # each of them, even if another one fails
            restore.callback(gc.enable if self._gc else gc.disable)
            restore.callback(self._rng.restore)
            restore.callback(self._python.restore)
            if error is not None:
                restore.callback(self._drop_new_optimizer_state)
                restore.callback(self._python.restore_slots)
            restore.callback(self.restore_gradients)
            restore.callback(self.undo_log.rollback)

    @contextmanager
    def recording(self, runs: bool) -> Iterator[None]:
        """Around the recording of a pass; `runs` says that the recording executes it for real."""
        before = PythonState(self.objects)
        self.undo_log.refuse_new_writes = True
        try:
            with self.undo_log.run() if runs else own_autocast_cache():
                yield
        finally:
            self.undo_log.refuse_new_writes = False
        for what in before.rebound():
            raise StateError(f"the function replaces {what}: a replay would not do that again")

    def restore_gradients(self) -> None:
        for leaf, gradient in self.entry_gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def changed_gradients(self) -> list[Tensor]:
        """Leaves whose gradient the function bound anew or wrote."""
        return [
            leaf
            for leaf, gradient in self.entry_gradients
            if leaf.grad is not gradient or (gradient is not None and self.undo_log.wrote(gradient))
        ]

    def create_optimizer_state(self) -> None:
        """Give optimizers that the function steps for the first time their state, at its initial value.

        An optimizer creates its state inside its first step. A graph holds a later step, so that state must
        exist before it is recorded. A step on zero gradients creates it; the undo log undoes the step.
        """
        for optimizer, known in self._states:
            created = [p for p, state in optimizer.state.items() if set(state) - known.get(p, set())]
            if created:
                self._drop_new_optimizer_state(optimizer)
                self._step_on_zeros(optimizer, created)
                self.undo_log.adopt(tensors_in([optimizer.state[p] for p in created]))

    def _step_on_zeros(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        name, groups = type(optimizer).__name__, optimizer.param_groups
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        decays = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
        if any(group.get("dampening") for group in groups):
            raise CaptureError(f"the first step of {name} with dampening differs from all others: run it first")
        try:
            for group, _ in decays:
                group["weight_decay"] = 0
            for parameter, _ in gradients:
                parameter.grad = None
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            with self.undo_log.run():
                optimizer.step()
        except TypeError as error:  # a step that needs a closure
            raise CaptureError(f"{name} creates state in its first step: run one step before capturing") from error
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _drop_new_optimizer_state(self, only: torch.optim.Optimizer | None = None) -> None:
        for optimizer, known in self._states:
            if only is not None and optimizer is not only:
                continue
            for parameter in list(optimizer.state):
                if parameter not in known:
                    del optimizer.state[parameter]
                else:
                    for key in set(optimizer.state[parameter]) - known[parameter]:
                        del optimizer.state[parameter][key]


@contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Weights cast inside are cast anew, and their casts are not used outside: they belong to one moment."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def no_gc() -> Iterator[None]:
    """No collection inside: a destructor that frees CUDA memory would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
