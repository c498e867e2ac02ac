"""The program of a tape: recorded operations, written as straight-line Python.

Owns what one recorded operation is, which operations a replay needs, and when an intermediate is freed.
Knows nothing of how operations are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_LITERALS = (type(None), bool, int)


@dataclass(frozen=True)
class Register:
    """A tensor of the recording, by number."""

    index: int


@dataclass
class Value:
    """The tensor of a register in the recording: enough to rebuild it over its storage."""

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
    """A state of a random stream, saved at each replay so that a later operation can return to it.

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
class Entry:
    """One operation: `outputs` are its results in order, None where a result is not a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # tensors replaced by registers
    kwargs: dict[str, Any]
    outputs: list[int | None]
    sequence: bool  # the operation returns a list or tuple
    keep: bool  # it has an effect besides its outputs: it writes, draws random numbers, or other ranks wait for it
    creates: list[int] = field(default_factory=list)  # outputs that got a new storage
    uninitialised: bool = False
    saves: RngMark | None = None

    def inputs(self) -> Iterable[int]:
        return (r.index for r in _registers((self.args, tuple(self.kwargs.values()))))


def count_operations(entries: Iterable[Entry]) -> int:
    return sum(isinstance(entry.function, torch._ops.OpOverload) for entry in entries)


def _registers(tree: Any) -> Iterable[Register]:
    if isinstance(tree, Register):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _registers(item)


class TapeProgram:
    """Straight-line Python for the entries that a replay needs. To debug, print `source`."""

    def __init__(self, entries: list[Entry], static: dict[int, Tensor]) -> None:
        self._names: dict[str, Any] = {}
        self._bound: dict[int, str] = {}  # id -> name; `_names` keeps the objects alive
        self._static = static  # register -> tensor at a fixed address
        kept = self._live(entries)
        self.operations = count_operations(kept)
        self.source = self._write(kept)
        namespace: dict[str, Any] = {"__name__": __name__, **self._names}
        exec(compile(self.source, "<tape>", "exec"), namespace)
        self.run: Callable[[], None] = namespace["replay"]

    def _live(self, entries: list[Entry]) -> list[Entry]:
        """Entries with an effect: a write, a random draw, or a result that is used."""
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
        arguments = [self._text(value) for value in entry.args]
        arguments += [f"{key}={self._text(value)}" for key, value in entry.kwargs.items()]
        name = re.sub(r"\W", "_", getattr(entry.function, "__qualname__", None) or str(entry.function))
        call = f"{self._bind(name, entry.function)}({', '.join(arguments)})"
        local: list[str] = []  # the variable for each result, or "_"
        copies: list[tuple[int, int]] = []  # (place, register) of the results that go to static tensors
        for place, output in enumerate(entry.outputs):
            if output is None or output in self._static:
                local.append("_")
            else:
                local.append(f"r{output}")
            if output is not None and output in entry.creates and output in self._static:
                copies.append((place, output))
        if not entry.sequence and copies:
            yield f"{self._text(Register(copies[0][1]))}.copy_({call})"
        elif not entry.sequence:
            if local in ([], ["_"]):
                yield call
            else:
                yield f"{local[0]} = {call}"
        else:
            yield f"t = {call}"
            yield from (f"{name} = t[{i}]" for i, name in enumerate(local) if name != "_")
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

    def _bind(self, name: str, thing: Any) -> str:
        """A readable name for a function or a fixed value; the same object always has the same name."""
        known = self._bound.get(id(thing))
        if known is None:
            known = name if name not in self._names else f"{name}_{len(self._names)}"
            self._names[known] = thing
            self._bound[id(thing)] = known
        return known
