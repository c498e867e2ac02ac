"""The tape: a graph for the CPU, with the semantics of a CUDA graph.

The recorder sees each aten operation that runs, forward and backward. `tape_program.py` turns them into
straight-line Python over fixed tensors, so no code of the model runs at replay. Memory that anything
outside the recording can reach is static and keeps its address; intermediates are freed and made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rollgraph.graph.backend import Recording, Thunk, refuse_host_read, refusing_host_reads
from rollgraph.graph.errors import CaptureError, GeneratorError, here
from rollgraph.graph.operation_mode import OperationMode
from rollgraph.graph.pool import Arena
from rollgraph.graph.surface import StaticTensors
from rollgraph.graph.tape_program import Entry, Register, RngMark, TapeProgram, Value, count_operations
from rollgraph.graph.undo_log import storage_keys, storage_of, tensors_in, written_arguments

# Operations that other ranks take part in: they wait for this one, whether anything reads the result here or not.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "rollgraph::group_")
_GRAD_SENSITIVE = ("aten::mkldnn_rnn_layer",)  # operations whose results depend on the grad mode


class Recorder(OperationMode):
    """Records the operations that run while it is entered."""

    def __init__(self, marks: dict[Any, RngMark], generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.values: list[Value] = []
        self.external: dict[int, Tensor] = {}  # register -> tensor from outside the recording
        self.views: dict[int, Tensor] = {}  # register -> view of such a tensor
        self.made: dict[int, StorageWeakRef] = {}  # storages made by the recording
        # id(tensor) -> register. Tensors are not kept, or a recording would hold all of its intermediates at once. So
        # an id may be that of another tensor by now: it counts only if that one is the same view of the same memory.
        self._register_of: dict[int, int] = {}
        self._first_in: dict[int, int] = {}  # storage -> the register it was made as
        self._marks = marks
        self._streams: dict[int, tuple[torch.Generator, bytes]] = {}
        for generator in (torch.default_generator, *generators):
            generator.seed()  # a state that no other recording has; the transaction restores it
            self._mark(generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_host_read(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._lift(func, args[0])
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # the original has no memory for a replay to write
        written = written_arguments(func, args, kwargs)
        recorded_args = self._encode(args)
        recorded_kwargs = self._encode(kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        if draws:
            generator = generator or torch.default_generator
            if id(generator) not in self._streams:
                raise GeneratorError(f"{func} at {here()} draws from a generator made inside the captured function")
            self._rewind_if_moved(generator)
        given = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        sequence = isinstance(result, (list, tuple))
        keep = bool(written) or draws or func._schema.name.startswith(_COLLECTIVES)
        entry = Entry(func, recorded_args, recorded_kwargs, [], sequence, keep)
        entry.uninitialised = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if func._schema.name in _GRAD_SENSITIVE and torch.is_grad_enabled():
            entry.function = _InGradMode(func)
        for output in result if sequence else (result,):
            entry.outputs.append(self._output(entry, output, given))
        self.entries.append(entry)
        if draws and generator is not None:
            self._mark(generator)
        return result

    # -- registers -------------------------------------------------------------------------------

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return Register(self._read(tree))
        if type(tree) in (list, tuple):
            return type(tree)(map(self._encode, tree))
        if isinstance(tree, dict):
            return {key: self._encode(value) for key, value in tree.items()}
        return tree

    def _read(self, tensor: Tensor) -> int:
        register = self._register_of.get(id(tensor))
        storage = storage_of(tensor)
        if register is not None and storage is not None and self.values[register] == _value(tensor, storage):
            return register  # still the same memory, and not changed by `.data =`
        if storage is None:
            raise CaptureError(f"a {tensor.layout} tensor on {tensor.device} at {here()} cannot be recorded")
        register = self._new(tensor, storage)
        if storage._cdata not in self.made:
            # Keep a leaf itself, to notice `.data =`. Of other tensors keep the memory, but not the autograd graph.
            self.external[register] = tensor if tensor.is_leaf else tensor.detach()
            return register
        # Another tensor object over memory of this recording: autograd unpacked a saved tensor.
        base = Register(self._first_in[storage._cdata])
        value = self.values[register]
        self.entries.append(Entry(_alias, (base, value), {}, [register], sequence=False, keep=False))
        return register

    def _output(self, entry: Entry, output: Any, given: Sequence[Tensor]) -> int | None:
        if not isinstance(output, Tensor):
            if isinstance(output, (list, tuple)) and tensors_in(output):
                raise CaptureError(
                    f"{entry.function} at {here()} returns nested lists of tensors, which cannot be recorded"
                )
            return None
        if any(output is tensor for tensor in given):
            return self._register_of[id(output)]  # an in-place operation returned its argument
        storage = storage_of(output)
        if storage is None:
            raise CaptureError(f"{entry.function} at {here()} makes a {output.layout} tensor, which cannot be recorded")
        register = self._new(output, storage)
        if storage._cdata in storage_keys(given):
            if storage._cdata not in self.made:
                self.views[register] = output.detach()
        elif storage._cdata not in self.made:
            self.made[storage._cdata] = StorageWeakRef(storage)
            self._first_in[storage._cdata] = register
            entry.creates.append(register)
        return register

    def _lift(self, func: Any, source: Tensor) -> Tensor:
        """`torch.tensor(...)`: a constant of the program, which every replay makes again."""
        constant = source.clone()
        result: Tensor = func(source)
        entry = Entry(torch.clone, (constant,), {}, [], sequence=False, keep=False)
        entry.outputs.append(self._output(entry, result, ()))
        self.entries.append(entry)
        return result

    def _new(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        self.values.append(_value(tensor, storage))
        self._register_of[id(tensor)] = len(self.values) - 1
        return len(self.values) - 1

    def _reshape_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`t_`, `unsqueeze_`, ...: from now on the tensor is another view of the same memory."""
        tensor = args[0]
        storage = storage_of(tensor)
        if storage is None or storage._cdata not in self.made:
            raise CaptureError(f"{func} at {here()} changes the shape of a tensor made outside the captured function")
        before = storage.nbytes()
        result = func(*args, **kwargs)
        after = storage_of(tensor)
        if after is None or after._cdata != storage._cdata or after.nbytes() != before:
            raise CaptureError(f"{func} at {here()} replaces the memory of a tensor, which cannot be recorded")
        del self._register_of[id(tensor)]
        self._read(tensor)
        return result

    # -- random streams --------------------------------------------------------------------------

    def _mark(self, generator: torch.Generator) -> None:
        """Mark the present state of a random stream."""
        state = _state(generator)
        self._streams[id(generator)] = (generator, state)
        self._marks[id(generator), state] = mark = RngMark(generator)
        self.entries.append(Entry(mark.save, (), {}, [], sequence=False, keep=True, saves=mark))

    def _rewind_if_moved(self, generator: torch.Generator) -> None:
        state = _state(generator)
        if state == self._streams[id(generator)][1]:
            return
        mark = self._marks.get((id(generator), state))
        if mark is None:
            raise GeneratorError(
                f"the captured function set the RNG state, before {here()}, to a state from outside, which a replay "
                "would not do again. Seed before the call"
            )
        mark.used = True
        self._streams[id(generator)] = (generator, state)
        self.entries.append(Entry(mark.rewind, (), {}, [], sequence=False, keep=True))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Return every random stream to a state that a replay can return it to."""
        for generator, _ in list(self._streams.values()):
            self._rewind_if_moved(generator)
        self._register_of.clear()


@dataclass
class _InGradMode:
    """Runs an operation as it ran in the recording: with grad mode on, below autograd."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return self.function(*args, **kwargs)

    def __str__(self) -> str:
        return f"{self.function}_in_grad_mode"


def _value(tensor: Tensor, storage: torch.UntypedStorage) -> Value:
    return Value(
        storage=storage._cdata,
        dtype=tensor.dtype,
        offset=int(tensor.storage_offset()),
        size=tensor.size(),
        stride=tensor.stride(),
        conjugate=tensor.is_conj(),
        negative=tensor.is_neg(),
    )


def _state(generator: torch.Generator) -> bytes:
    with torch._C.DisableTorchFunction():
        return bytes(generator.get_state().numpy())


def _alias(base: Tensor, value: Value) -> Tensor:
    return value.over(base.untyped_storage())


class TapeRecording:
    """A tape with its static inputs and outputs."""

    def __init__(self, recorder: Recorder, inputs: StaticTensors, outputs: list[Tensor | None]) -> None:
        recorder.finish()
        self._recorder: Recorder | None = recorder
        self._inference = torch.is_inference_mode_enabled()
        self._inputs = inputs
        self.outputs = outputs
        self._written = [o for o in outputs if o is not None and not o.is_inference()]
        self.external: Sequence[Tensor] = list(recorder.external.values())
        storages = self._surviving(recorder)
        self.nbytes = sum(storage.nbytes() for storage in storages.values())
        self._static = recorder.external | recorder.views
        for register, value in enumerate(recorder.values):
            if value.storage in storages:
                self._static[register] = value.over(storages[value.storage])
        self.operations = count_operations(recorder.entries)
        self.program: TapeProgram | None = None

    @staticmethod
    def _surviving(recorder: Recorder) -> dict[int, torch.UntypedStorage]:
        """Storages of the recording that are still in use elsewhere: outputs, activations, gradients."""
        alive = {}
        for key, reference in recorder.made.items():
            if reference.expired():
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is not None:
                alive[key] = storage
        return alive

    def seal(self, versions: bool = True) -> None:
        """Write the program. Only now: a backward recorded later may need this pass to save a random state."""
        assert self._recorder is not None
        self.program = TapeProgram(self._recorder.entries, self._static)
        self.operations = self.program.operations
        self._recorder = None
        if not versions:
            self._written = []

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        with torch.inference_mode(self._inference), torch.no_grad(), torch._C._DisableAutocast():
            self._inputs.fill(inputs)
            assert self.program is not None
            self.program.run()
        torch._C._increment_version(self._written)  # a backward that saved an output now gets autograd's error
        return self.outputs

    def release(self) -> None:
        self._recorder = None
        self.program = None
        self._static = {}
        self.outputs = []
        self._written = []
        self.external = ()


class TapeBackend:
    name = "tape"
    records = True
    executes = True

    def stage(self, arena: Arena, in_pool: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def record(
        self,
        thunk: Thunk,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        marks: dict[Any, Any],
    ) -> Recording:
        recorder = Recorder(marks, generators)
        with refusing_host_reads(), recorder:
            outputs = thunk(inputs.tensors)
        return TapeRecording(recorder, inputs, outputs)
