"""Eager reference runs: the captured function itself, on the inputs of a replay, with all its effects undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.graph.backend import Thunk
from rollgraph.graph.errors import Location
from rollgraph.graph.sanitizer.line_search import LineSearch
from rollgraph.graph.sanitizer.operation_trace import OperationTrace, TracedOperation, same_bits
from rollgraph.graph.transaction import RngState, Transaction
from rollgraph.graph.undo_log import bytes_of


class MemoryWrite(NamedTuple):
    """Memory that a run wrote."""

    storage: torch.UntypedStorage
    before: Tensor  # its bytes
    after: Tensor


@dataclass
class EagerRun:
    """What an eager run computed, and the state it started from."""

    inputs: list[Tensor]
    outputs: list[Tensor | None]
    writes: list[MemoryWrite]
    operations: list[TracedOperation]
    rng: RngState  # before the run

    def matches_memory(self, outputs: Sequence[Tensor | None]) -> bool:
        """Whether a replay that has just run left these outputs and the same bytes wherever this run wrote."""
        if not all(map(same_bits, self.outputs, outputs)):
            return False
        return all(torch.equal(bytes_of(write.storage), write.after) for write in self.writes)

    def matches(self, other: EagerRun) -> bool:
        if not all(map(same_bits, self.outputs, other.outputs)):
            return False
        pairs = zip(self.writes, other.writes, strict=False)
        return all(torch.equal(mine.after, theirs.after) for mine, theirs in pairs)


class EagerReference:
    """Runs a captured function eagerly, in the modes in which it was captured."""

    def __init__(self, thunk: Thunk) -> None:
        self._thunk = thunk
        self._grad_mode = torch.is_grad_enabled()
        self._autocast = torch._C._is_any_autocast_enabled()

    def run(self, inputs: list[Tensor]) -> EagerRun:
        rng = RngState()
        trace = OperationTrace()
        autocast = nullcontext() if self._autocast else torch._C._DisableAutocast()
        with Transaction() as transaction:
            undo_log = transaction.undo_log
            with undo_log.run(again=True), trace, torch.set_grad_enabled(self._grad_mode), autocast:
                results = self._thunk(inputs)
            outputs = [None if result is None else result.detach().clone() for result in results]
            writes = [MemoryWrite(storage, before, bytes_of(storage).clone()) for storage, before in undo_log.saved()]
            undo_log.keep_fresh()  # the activations, which the backward will need
        return EagerRun(inputs, outputs, writes, trace.operations, rng)

    def run_again(self, first: EagerRun) -> EagerRun:
        """Run once more from the state in which the first run started, after a replay has changed it."""
        replayed = [(write.storage, bytes_of(write.storage).clone()) for write in first.writes]
        rng = RngState()
        try:
            for write in first.writes:
                bytes_of(write.storage).copy_(write.before)
            first.rng.restore()
            return self.run(first.inputs)
        finally:
            for storage, content in replayed:
                bytes_of(storage).copy_(content)
            rng.restore()

    def first_line_after_which(self, changed: Callable[[], bool], inputs: list[Tensor]) -> Location:
        """The line of the function that makes `changed()` true, found by running it once more."""
        search = LineSearch(changed)
        with suppress(_RollBack), Transaction() as transaction:
            with transaction.undo_log.run(again=True), torch.set_grad_enabled(self._grad_mode), search.tracing():
                self._thunk(inputs)
            raise _RollBack  # undoes what a successful transaction would keep, too
        return search.where


class _RollBack(Exception):
    """Ends a transaction none of whose effects are wanted."""
