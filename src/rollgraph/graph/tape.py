"""The tape: a graph for the CPU with the semantics of a CUDA graph. Start here to understand captures."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from rollgraph.graph.backend import PassFunction, Recording
from rollgraph.graph.errors import CaptureError, GeneratorError, NeedsWarmup, here
from rollgraph.graph.host_reads import refuse_host_read, refusing_host_reads
from rollgraph.graph.pool import Arena
from rollgraph.graph.state.undo_log import OperationMode, storage_keys, storage_of, tensors_in, written_arguments
from rollgraph.graph.surface import StaticTensors

# -- the program of a tape -------------------------------------------------------------------------
# Owns the form of a recorded operation, which operations a replay needs, and when an intermediate is freed. Knows
# nothing of how operations are recorded.

_LITERALS = (type(None), bool, int)


@dataclass(frozen=True)
class Register:
    """A tensor of the recording, by number."""

    index: int


@dataclass
class Value:
    """The tensor of a register: enough to rebuild it over its storage."""

    storage: int  # the key of its storage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conjugate: bool  # the tensor is the conjugate of its memory
    negative: bool  # the tensor is the negative of its memory

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = torch._conj(tensor)
        if self.negative:
            tensor = torch._neg_view(tensor)
        return tensor


class RngMark:
    """A state of a random generator, saved at each replay so that a later operation can return to it.

    Activation checkpointing rewinds the generator to draw the dropout of a region a second time.
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
class TapeEntry:
    """One operation. `outputs` are the registers of its results in order, None for a result that is no tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # tensors replaced by registers
    kwargs: dict[str, Any]
    outputs: list[int | None]
    is_sequence: bool  # the operation returns a list or tuple
    has_effect: bool  # besides its outputs: it writes, draws random numbers, or is a collective
    creates: list[int] = field(default_factory=list)  # registers of outputs with a new storage
    is_uninitialised: bool = False
    saved_mark: RngMark | None = None

    def inputs(self) -> Iterable[int]:
        return (r.index for r in _registers((self.args, tuple(self.kwargs.values()))))


def count_operations(entries: Iterable[TapeEntry]) -> int:
    return sum(isinstance(entry.function, torch._ops.OpOverload) for entry in entries)


def _registers(tree: Any) -> Iterable[Register]:
    if isinstance(tree, Register):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _registers(item)


class TapeProgram:
    """Straight-line Python for the entries that a replay needs. Print `source` to debug it."""

    def __init__(self, entries: list[TapeEntry], static: dict[int, Tensor]) -> None:
        self._names: dict[str, Any] = {}
        self._bound: dict[int, str] = {}  # id -> name; `_names` keeps the objects alive
        self._static = static  # register -> tensor at a fixed address
        live = self._live(entries)
        self.operations = count_operations(live)
        self.source = self._write(live)
        namespace: dict[str, Any] = {"__name__": __name__, **self._names}
        exec(compile(self.source, "<tape>", "exec"), namespace)
        self.run: Callable[[], None] = namespace["replay"]

    def _live(self, entries: list[TapeEntry]) -> list[TapeEntry]:
        """Drop dead code. An entry is live if it writes, draws random numbers or has a result that is used."""
        needed: set[int] = set()
        live: list[TapeEntry] = []
        for entry in reversed(entries):
            if entry.saved_mark is not None and not entry.saved_mark.used:
                continue
            outputs = [o for o in entry.outputs if o is not None]
            static_result = any(o in self._static for o in entry.creates) and not entry.is_uninitialised
            read = any(o in needed and o not in self._static for o in outputs)
            if entry.has_effect or static_result or read:
                needed.update(entry.inputs())
                live.append(entry)
        return live[::-1]

    def _write(self, entries: list[TapeEntry]) -> str:
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

    def _statements(self, entry: TapeEntry) -> Iterable[str]:
        arguments = [self._text(value) for value in entry.args]
        arguments += [f"{key}={self._text(value)}" for key, value in entry.kwargs.items()]
        name = re.sub(r"\W", "_", getattr(entry.function, "__qualname__", None) or str(entry.function))
        call = f"{self._bind(name, entry.function)}({', '.join(arguments)})"
        variables: list[str] = []  # the variable of each result, or "_"
        copies: list[tuple[int, int]] = []  # (position, register) of the results that go to static tensors
        for position, output in enumerate(entry.outputs):
            if output is None or output in self._static:
                variables.append("_")
            else:
                variables.append(f"r{output}")
            if output is not None and output in entry.creates and output in self._static:
                copies.append((position, output))
        if not entry.is_sequence and copies:
            yield f"{self._text(Register(copies[0][1]))}.copy_({call})"
        elif not entry.is_sequence:
            if variables in ([], ["_"]):
                yield call
            else:
                yield f"{variables[0]} = {call}"
        else:
            yield f"t = {call}"
            yield from (f"{name} = t[{i}]" for i, name in enumerate(variables) if name != "_")
            yield from (f"{self._text(Register(o))}.copy_(t[{i}])" for i, o in copies)
            yield "t = None"

    def _text(self, value: Any) -> str:
        if isinstance(value, Register):
            static = self._static.get(value.index)
            if static is None:
                return f"r{value.index}"
            return self._bind(f"s{value.index}", static)
        if type(value) in _LITERALS:
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._text(v) + ', ' for v in value)})"
        return self._bind("constant", value)

    def _bind(self, name: str, value: Any) -> str:
        """Return a readable name for a function or a fixed value. One object has one name."""
        assigned = self._bound.get(id(value))
        if assigned is None:
            assigned = name if name not in self._names else f"{name}_{len(self._names)}"
            self._names[assigned] = value
            self._bound[id(value)] = assigned
        return assigned


# -- recording and replaying -----------------------------------------------------------------------
# The recorder sees each ATen operation that runs, forward and backward. A replay runs the program above.

# Collectives stay in the program even if nothing reads their result here: other ranks wait for them.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "rollgraph::group_")
# Functions that create a tensor over memory that PyTorch did not allocate.
_FOREIGN = (
    (torch, "frombuffer"),
    (torch, "from_dlpack"),
    (torch, "asarray"),
    (torch.utils.dlpack, "from_dlpack"),
)
_GRAD_SENSITIVE = ("aten::mkldnn_rnn_layer",)  # operations whose results depend on the grad mode


class Recorder(OperationMode):
    """Records the operations that run inside it."""

    def __init__(
        self, rng_marks: dict[Any, RngMark], generators: Sequence[torch.Generator], is_first_call: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_first_call = is_first_call
        self.entries: list[TapeEntry] = []
        self.values: list[Value] = []
        self.external: dict[int, Tensor] = {}  # register -> tensor from outside the recording
        self.views: dict[int, Tensor] = {}  # register -> view of such a tensor
        self.created: dict[int, StorageWeakRef] = {}  # storages created in the recording
        # id(tensor) -> register. We do not keep the tensors, or a recording would hold all its intermediates at once.
        # So an id may belong to a newer tensor: it counts only if that tensor is the same view of the same memory.
        self._register_of: dict[int, int] = {}
        self._created_as: dict[int, int] = {}  # storage -> the register of its first tensor
        self._rng_marks = rng_marks
        self._generator_states: dict[int, tuple[torch.Generator, bytes]] = {}
        for generator in (torch.default_generator, *generators):
            if not is_first_call:
                generator.seed()  # a state unique to this recording; the transaction restores it
            self._record_rng_mark(generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one ATen operation and append it to the tape, with its tensors replaced by registers.

        Raises if a replay could not repeat the operation.
        """
        kwargs = kwargs or {}
        refuse_host_read(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._lift(func, args[0])
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # a zero tensor without memory: a replay could not write it
        written = written_arguments(func, args, kwargs)
        # Encode before the call, because the call may change the size and strides of an argument.
        recorded_args = self._encode(args)
        recorded_kwargs = self._encode(kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        draws_random = torch.Tag.nondeterministic_seeded in func.tags
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        if draws_random:
            generator = generator or torch.default_generator
            if id(generator) not in self._generator_states and self._is_first_call:
                raise NeedsWarmup(f"{func} at {here()} draws from a generator that was not known before the call")
            if id(generator) not in self._generator_states:
                raise GeneratorError(f"{func} at {here()} draws from a generator made inside the captured function")
            self._record_rewind_if_moved(generator)  # the function may have set its state since the last draw
        inputs = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        is_sequence = isinstance(result, (list, tuple))
        has_effect = bool(written) or draws_random or func._schema.name.startswith(_COLLECTIVES)
        entry = TapeEntry(func, recorded_args, recorded_kwargs, [], is_sequence, has_effect)
        entry.is_uninitialised = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if func._schema.name in _GRAD_SENSITIVE and torch.is_grad_enabled():
            entry.function = _WithGradEnabled(func)
        for output in result if is_sequence else (result,):
            entry.outputs.append(self._register_of_output(entry, output, inputs))
        self.entries.append(entry)
        if draws_random and generator is not None:
            self._record_rng_mark(generator)  # the function may later return to the state after this draw
        return result

    # -- registers -------------------------------------------------------------------------------

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return Register(self._register_of_input(tree))
        if type(tree) in (list, tuple):
            return type(tree)(map(self._encode, tree))
        if isinstance(tree, dict):
            return {key: self._encode(value) for key, value in tree.items()}
        return tree

    def _register_of_input(self, tensor: Tensor) -> int:
        register = self._register_of.get(id(tensor))
        storage = storage_of(tensor)
        if register is not None and storage is not None and self.values[register] == _value(tensor, storage):
            return register  # the same memory, not changed by `.data =`
        if storage is None:
            raise CaptureError(f"a {tensor.layout} tensor on {tensor.device} at {here()} cannot be recorded")
        register = self._new_register(tensor, storage)
        if storage._cdata not in self.created:
            # Keep a leaf itself, to notice `.data =`. For other tensors keep the memory but not the autograd graph.
            self.external[register] = tensor if tensor.is_leaf else tensor.detach()
            return register
        # Another tensor object over memory of this recording: autograd unpacked a saved tensor.
        base = Register(self._created_as[storage._cdata])
        value = self.values[register]
        self.entries.append(TapeEntry(_view_over, (base, value), {}, [register], is_sequence=False, has_effect=False))
        return register

    def _register_of_output(self, entry: TapeEntry, output: Any, inputs: Sequence[Tensor]) -> int | None:
        if not isinstance(output, Tensor):
            if isinstance(output, (list, tuple)) and tensors_in(output):
                raise CaptureError(
                    f"{entry.function} at {here()} returns nested lists of tensors, which cannot be recorded"
                )
            return None
        if any(output is tensor for tensor in inputs):
            return self._register_of[id(output)]  # an in-place operation returned its argument
        storage = storage_of(output)
        if storage is None:
            raise CaptureError(f"{entry.function} at {here()} makes a {output.layout} tensor, which cannot be recorded")
        register = self._new_register(output, storage)
        if storage._cdata in storage_keys(inputs):
            if storage._cdata not in self.created:
                self.views[register] = output.detach()
        elif storage._cdata not in self.created:
            self.created[storage._cdata] = StorageWeakRef(storage)
            self._created_as[storage._cdata] = register
            entry.creates.append(register)
        return register

    def _lift(self, func: Any, source: Tensor) -> Tensor:
        """`torch.tensor(...)`: a constant of the program, which every replay creates again."""
        with _disable_current_modes():  # the tape creates this tensor, not the function
            constant = source.clone()
        result: Tensor = func(source)
        entry = TapeEntry(torch.clone, (constant,), {}, [], is_sequence=False, has_effect=False)
        entry.outputs.append(self._register_of_output(entry, result, ()))
        self.entries.append(entry)
        return result

    def _new_register(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        self.values.append(_value(tensor, storage))
        self._register_of[id(tensor)] = len(self.values) - 1
        return len(self.values) - 1

    def _reshape_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`t_`, `unsqueeze_`, ...: the tensor becomes another view of the same memory."""
        tensor = args[0]
        storage = storage_of(tensor)
        if storage is None or storage._cdata not in self.created:
            raise CaptureError(f"{func} at {here()} changes the shape of a tensor made outside the captured function")
        before = storage.nbytes()
        result = func(*args, **kwargs)
        after = storage_of(tensor)
        if after is None or after._cdata != storage._cdata or after.nbytes() != before:
            raise CaptureError(f"{func} at {here()} replaces the memory of a tensor, which cannot be recorded")
        del self._register_of[id(tensor)]
        self._register_of_input(tensor)
        return result

    # -- random numbers --------------------------------------------------------------------------

    def _record_rng_mark(self, generator: torch.Generator) -> None:
        """Record that a replay saves the state of this generator here, so that it can be set back to it later."""
        state = _state(generator)
        self._generator_states[id(generator)] = (generator, state)
        self._rng_marks[id(generator), state] = mark = RngMark(generator)
        self.entries.append(TapeEntry(mark.save, (), {}, [], is_sequence=False, has_effect=True, saved_mark=mark))

    def _record_rewind_if_moved(self, generator: torch.Generator) -> None:
        """Record a rewind if the function has set the generator's state since its last draw.

        Called before each draw and at the end. A replay can rewind only to states that it saves: those at its start and
        after each draw. Activation checkpointing returns to one of them.
        """
        state = _state(generator)
        if state == self._generator_states[id(generator)][1]:
            return
        if self._is_first_call:  # the state before the call is arbitrary, so we cannot tell where this one comes from
            raise NeedsWarmup(f"the RNG state is set before {here()}")
        mark = self._rng_marks.get((id(generator), state))
        if mark is None:
            raise GeneratorError(
                f"the captured function set the RNG state, before {here()}, to a state from outside, which a replay "
                "would not do again. Seed before the call"
            )
        mark.used = True
        self._generator_states[id(generator)] = (generator, state)
        self.entries.append(TapeEntry(mark.rewind, (), {}, [], is_sequence=False, has_effect=True))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Make sure that every generator ends in a state that a replay can restore."""
        for generator, _ in list(self._generator_states.values()):
            self._record_rewind_if_moved(generator)
        self._register_of.clear()


@dataclass
class _WithGradEnabled:
    """Runs an operation with grad mode on but below autograd, as in the recording."""

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


def _view_over(base: Tensor, value: Value) -> Tensor:
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
        storages = self._live_storages(recorder)
        self.nbytes = sum(storage.nbytes() for storage in storages.values())
        self._static = recorder.external | recorder.views
        for register, value in enumerate(recorder.values):
            if value.storage in storages:
                self._static[register] = value.over(storages[value.storage])
        self.operations = count_operations(recorder.entries)
        self.program: TapeProgram | None = None

    @staticmethod
    def _live_storages(recorder: Recorder) -> dict[int, torch.UntypedStorage]:
        """Storages from the recording that are still in use: outputs, activations, gradients."""
        alive = {}
        for key, reference in recorder.created.items():
            if reference.expired():
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is not None:
                alive[key] = storage
        return alive

    def seal(self, versions: bool = True) -> None:
        """Write the program. Not earlier: a backward recorded later may need this pass to save an RNG state."""
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
        torch._C._increment_version(self._written)  # so that autograd refuses a backward that saved an old output
        return self.outputs

    def release(self) -> None:
        self._recorder = None
        self.program = None
        self._static = {}
        self.outputs = []
        self._written = []
        self.external = ()


@contextmanager
def _refusing_foreign_memory() -> Iterator[None]:
    """Raise NeedsWarmup for a tensor over foreign memory (`frombuffer`, DLPack), whose creation a recorder misses.

    The recording of a first call would treat it as a tensor from outside, so replays would not create it again.
    """
    recording_thread = threading.get_ident()
    originals = [(owner, name, getattr(owner, name)) for owner, name in _FOREIGN]

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == recording_thread:
                raise NeedsWarmup(f"torch.{name} at {here()} makes a tensor over memory of others")
            return original(*args, **kwargs)

        return refuse

    try:
        for owner, name, original in originals:
            setattr(owner, name, refusing(name, original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class TapeBackend:
    name = "tape"
    records = True
    executes = True

    def stream_context(self, arena: Arena, in_pool: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        return _record(Recorder(shared_state, generators), run_pass, inputs)

    def record_call(self, run_pass: PassFunction, inputs: StaticTensors) -> Recording:
        with _refusing_foreign_memory():
            return _record(Recorder({}, (), is_first_call=True), run_pass, inputs)


def _record(recorder: Recorder, run_pass: PassFunction, inputs: StaticTensors) -> Recording:
    with refusing_host_reads(), recorder:
        outputs = run_pass(inputs.tensors)
    return TapeRecording(recorder, inputs, outputs)
