"""The tape: a graph for the CPU, with the semantics of a CUDA graph.

The recorder sees each aten operation that runs, forward and backward, and writes it down as a line of
straight Python over fixed tensors: no code of the model runs at replay. Memory that anything outside
the recording can reach is static and keeps its address; intermediates are freed and made again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph.backend import Recording, Thunk, refuse_host_read, refusing_host_reads
from rollgraph.graph.errors import CaptureError, GeneratorError, here
from rollgraph.graph.pool import Arena
from rollgraph.graph.surface import StaticTensors
from rollgraph.graph.undo_log import storage_of, tensors_in, written_arguments

_LITERALS = (type(None), bool, int)
_GRAD_SENSITIVE = ("aten::mkldnn_rnn_layer",)  # what they return depends on the grad mode


@dataclass(frozen=True)
class Register:
    """A tensor of the recording, by number."""

    index: int


@dataclass
class Value:
    """What a register held while recording: enough to rebuild it over its storage."""

    storage: int  # the storage's key
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conjugate: bool  # read as the conjugate, or the negative, of what lies there
    negative: bool

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = torch._conj(tensor)
        if self.negative:
            tensor = torch._neg_view(tensor)
        return tensor


class RngMark:
    """A moment of a random stream, saved at each replay so that a later operation can return to it.

    Activation checkpointing rewinds the generator to draw a region's dropout a second time.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.used = False
        self._state: Tensor | None = None

    def save(self) -> None:
        self._state = self.generator.get_state()

    def rewind(self) -> None:
        assert self._state is not None
        self.generator.set_state(self._state)


@dataclass
class Entry:
    """One operation: `outputs` are its results in order, None where a result is not a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # tensors replaced by registers
    kwargs: dict[str, Any]
    outputs: list[int | None]
    sequence: bool  # the operation returns a list or tuple
    keep: bool  # has an effect beyond its outputs: writes, or draws random numbers
    creates: list[int] = field(default_factory=list)  # outputs that got a new storage
    uninitialised: bool = False
    saves: RngMark | None = None

    def inputs(self) -> Iterable[int]:
        return (r.index for r in _registers((self.args, tuple(self.kwargs.values()))))


class Recorder(TorchDispatchMode):
    """Writes down the operations that run while it is entered."""

    def __init__(self, marks: dict[Any, RngMark], generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.values: list[Value] = []
        self.external: dict[int, Tensor] = {}  # register -> tensor that was there before
        self.views: dict[int, Tensor] = {}  # register -> view of such a tensor
        self.made: dict[int, StorageWeakRef] = {}  # storages made by the recording
        self._register_of: dict[int, int] = {}  # id(tensor) -> register
        self._held: list[Tensor] = []  # keeps those ids valid
        self._first_in: dict[int, int] = {}  # storage -> the register it was made as
        self._marks = marks
        self._streams: dict[int, tuple[torch.Generator, bytes]] = {}
        for generator in (torch.default_generator, *generators):
            generator.seed()  # a state no other recording has; the transaction restores it
            self._mark(generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_host_read(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._lift(func, args[0])
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # zeros without memory, which a replay could not write to
        written = written_arguments(func, args, kwargs)
        recorded_args, recorded_kwargs = self._encode(args), self._encode(kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        if draws:
            generator = generator or torch.default_generator
            if id(generator) not in self._streams:
                raise GeneratorError(f"{func} at {here()} draws from a generator made inside the captured function")
            self._rewind_if_moved(generator)
        inputs = {s._cdata for t in tensors_in((args, kwargs)) if (s := storage_of(t)) is not None}
        result = func(*args, **kwargs)
        sequence = isinstance(result, (list, tuple))
        entry = Entry(func, recorded_args, recorded_kwargs, [], sequence, bool(written) or draws)
        entry.uninitialised = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if func._schema.name in _GRAD_SENSITIVE and torch.is_grad_enabled():
            entry.function = _InGradMode(func)
        for output in result if sequence else (result,):
            entry.outputs.append(self._output(entry, output, inputs))
        self.entries.append(entry)
        if draws and generator is not None:
            self._mark(generator)
        return result

    # -- registers -------------------------------------------------------------------------------

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return Register(self._read(tree))
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self._encode, tree)) if type(tree) in (list, tuple) else tree
        if isinstance(tree, dict):
            return {key: self._encode(value) for key, value in tree.items()}
        return tree

    def _read(self, tensor: Tensor) -> int:
        register = self._register_of.get(id(tensor))
        storage = storage_of(tensor)
        if register is not None and storage is not None and self.values[register] == _value(tensor, storage):
            return register  # the same tensor; `.data =` may have given it other memory since
        if storage is None:
            raise CaptureError(f"a {tensor.layout} tensor on {tensor.device} at {here()} cannot be recorded")
        register = self._new(tensor, storage)
        if storage._cdata not in self.made:
            # A leaf by identity, to see it re-pointed; of others only the memory, not their autograd graph.
            self.external[register] = tensor if tensor.is_leaf else tensor.detach()
            return register
        # Another tensor object over memory of this recording: autograd unpacked a saved tensor.
        base, value = Register(self._first_in[storage._cdata]), self.values[register]
        self.entries.append(Entry(_alias, (base, value), {}, [register], sequence=False, keep=False))
        return register

    def _output(self, entry: Entry, output: Any, inputs: set[int]) -> int | None:
        if not isinstance(output, Tensor):
            if isinstance(output, (list, tuple)) and next(tensors_in(output), None) is not None:
                raise CaptureError(
                    f"{entry.function} at {here()} returns nested lists of tensors: it cannot be recorded"
                )
            return None
        known = self._register_of.get(id(output))
        if known is not None:
            return known  # an in-place operation returned its argument
        storage = storage_of(output)
        if storage is None:
            raise CaptureError(f"{entry.function} at {here()} makes a {output.layout} tensor: it cannot be recorded")
        register = self._new(output, storage)
        if storage._cdata in inputs:
            if storage._cdata not in self.made:
                self.views[register] = output.detach()
        elif storage._cdata not in self.made:
            self.made[storage._cdata] = StorageWeakRef(storage)
            self._first_in[storage._cdata] = register
            entry.creates.append(register)
        return register

    def _lift(self, func: Any, source: Tensor) -> Tensor:
        """`torch.tensor(...)`: a constant of the program, made anew by every replay."""
        constant = source.clone()
        result: Tensor = func(source)
        entry = Entry(torch.clone, (constant,), {}, [], sequence=False, keep=False)
        entry.outputs.append(self._output(entry, result, set()))
        self.entries.append(entry)
        return result

    def _new(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        self.values.append(_value(tensor, storage))
        self._register_of[id(tensor)] = len(self.values) - 1
        self._held.append(tensor)
        return len(self.values) - 1

    def _reshape_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`t_`, `unsqueeze_`, ...: from here on the tensor is another view of the same memory."""
        tensor = args[0]
        storage = storage_of(tensor)
        if storage is None or storage._cdata not in self.made:
            raise CaptureError(f"{func} at {here()} changes the shape of a tensor made outside the captured function")
        before = storage.nbytes()
        result = func(*args, **kwargs)
        after = storage_of(tensor)
        if after is None or after._cdata != storage._cdata or after.nbytes() != before:
            raise CaptureError(f"{func} at {here()} replaces the memory of a tensor: it cannot be recorded")
        del self._register_of[id(tensor)]
        self._read(tensor)
        return result

    # -- random streams --------------------------------------------------------------------------

    def _mark(self, generator: torch.Generator) -> None:
        """Remember this moment of the stream, by its state."""
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
                f"the RNG state was set inside the captured function, before {here()}, to a state from outside: a "
                "replay would not set it again. Seed before the call"
            )
        mark.used = True
        self._streams[id(generator)] = (generator, state)
        self.entries.append(Entry(mark.rewind, (), {}, [], sequence=False, keep=True))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let go of the tensors, so that what is still alive is what others hold."""
        for generator, _ in list(self._streams.values()):
            self._rewind_if_moved(generator)
        self._held.clear()
        self._register_of.clear()


@dataclass
class _InGradMode:
    """Runs an operation as it ran while recording: with grad mode on, below autograd."""

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


def _operations(entries: Iterable[Entry]) -> int:
    return sum(isinstance(entry.function, torch._ops.OpOverload) for entry in entries)


def _registers(tree: Any) -> Iterable[Register]:
    if isinstance(tree, Register):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _registers(item)


class TapeProgram:
    """Straight-line Python for the entries that matter. `source` is readable: print it to debug."""

    def __init__(self, recorder: Recorder, static: dict[int, Tensor]) -> None:
        self._names: dict[str, Any] = {}
        self._bound: dict[int, str] = {}  # id -> name; the names keep the things alive
        self._static = static  # register -> tensor at a fixed address
        kept = self._live(recorder.entries)
        self.operations = _operations(kept)
        self.source = self._write(kept)
        namespace: dict[str, Any] = {"__name__": __name__, **self._names}
        exec(compile(self.source, "<tape>", "exec"), namespace)
        self.run: Callable[[], None] = namespace["replay"]

    def _live(self, entries: list[Entry]) -> list[Entry]:
        """Entries with an effect: a write, a draw, or a result that somebody reads."""
        needed: set[int] = set()
        kept: list[Entry] = []
        for entry in reversed(entries):
            if entry.saves is not None and not entry.saves.used:
                continue
            outputs = [o for o in entry.outputs if o is not None]
            static_result = any(o in self._static for o in entry.creates) and not entry.uninitialised
            read = any(o in needed and o not in self._static for o in outputs)
            if entry.keep or static_result or read:
                needed.update(entry.inputs())
                kept.append(entry)
        return kept[::-1]

    def _write(self, entries: list[Entry]) -> str:
        last_use: dict[int, int] = {}
        for line, entry in enumerate(entries):
            for register in (*entry.inputs(), *(o for o in entry.outputs if o is not None)):
                last_use[register] = line
        dead_after: dict[int, list[str]] = {}
        for register, line in last_use.items():
            if register not in self._static:
                dead_after.setdefault(line, []).append(f"r{register}")
        lines = ["def replay():"]
        for line, entry in enumerate(entries):
            lines += [f"    {text}" for text in self._statements(entry)]
            if line in dead_after:
                lines.append(f"    {' = '.join(dead_after[line])} = None")
        return "\n".join([*lines, "    return"])

    def _statements(self, entry: Entry) -> Iterable[str]:
        arguments = [self._text(a) for a in entry.args] + [f"{k}={self._text(v)}" for k, v in entry.kwargs.items()]
        name = re.sub(r"\W", "_", getattr(entry.function, "__qualname__", None) or str(entry.function))
        call = f"{self._bind(name, entry.function)}({', '.join(arguments)})"
        local = [f"r{o}" if o is not None and o not in self._static else "_" for o in entry.outputs]
        copies = [
            (i, o) for i, o in enumerate(entry.outputs) if o in entry.creates and o is not None and o in self._static
        ]
        if not entry.sequence and copies:
            yield f"{self._text(Register(copies[0][1]))}.copy_({call})"
        elif not entry.sequence:
            yield call if not local or local == ["_"] else f"{local[0]} = {call}"
        else:
            yield f"t = {call}"
            yield from (f"{name} = t[{i}]" for i, name in enumerate(local) if name != "_")
            yield from (f"{self._text(Register(o))}.copy_(t[{i}])" for i, o in copies)
            yield "t = None"

    def _text(self, value: Any) -> str:
        if isinstance(value, Register):
            static = self._static.get(value.index)
            return f"r{value.index}" if static is None else self._bind(f"s{value.index}", static)
        if type(value) in _LITERALS:
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._text(v) + ', ' for v in value)})"
        return self._bind("constant", value)

    def _bind(self, name: str, thing: Any) -> str:
        """A readable name for a function or a fixed value, the same one each time."""
        known = self._bound.get(id(thing))
        if known is None:
            known = name if name not in self._names else f"{name}_{len(self._names)}"
            self._names[known] = thing
            self._bound[id(thing)] = known
        return known


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
        self.operations = _operations(recorder.entries)
        self.program: TapeProgram | None = None

    @staticmethod
    def _surviving(recorder: Recorder) -> dict[int, torch.UntypedStorage]:
        """Storages of the recording that something outside it still holds: outputs, activations, gradients."""
        alive = {}
        for key, reference in recorder.made.items():
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(key)
                if storage is not None:
                    alive[key] = storage
        return alive

    def seal(self, versions: bool = True) -> None:
        """Write the program. Not before: a backward recorded later may need this pass to save a random state."""
        assert self._recorder is not None
        self.program = TapeProgram(self._recorder, self._static)
        self.operations = self.program.operations
        self._recorder = None
        if not versions:
            self._written = []

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        with torch.inference_mode(self._inference), torch.no_grad(), torch._C._DisableAutocast():
            self._inputs.fill(inputs)
            assert self.program is not None
            self.program.run()
        torch._C._increment_version(self._written)  # whoever saved an output for a backward gets autograd's error
        return self.outputs

    def release(self) -> None:
        self._recorder, self.program = None, None
        self._static, self.outputs, self._written, self.external = {}, [], [], ()


class TapeBackend:
    name = "tape"
    records = True
    executes = True

    def stage(self, arena: Arena) -> AbstractContextManager[None]:
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
