"""Transactions: a capture attempt leaves the process as it found it.

Owns the state around a capture that is not memory: random streams, gradients, optimizer state, modes and
the garbage collector. `undo_log.py` restores memory (parameters,
buffers), `live_objects.py` Python state.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph.errors import CaptureError, StateError
from rollgraph.graph.live_objects import ProgramObjects, PythonState
from rollgraph.graph.undo_log import UndoLog, own_autocast_cache, tensors_in


class RngState:
    """The state of all random streams of the process: PyTorch's for each device, Python's and NumPy's."""

    def __init__(self) -> None:
        self._cpu = torch.default_generator.get_state()
        self._cuda: list[Tensor] | None = None
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()
        self._python = random.getstate()
        self._numpy: Any = None
        if "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Transaction:
    """A capture attempt: whatever happens inside, afterwards the process is as it was before.

    The function may rebind gradients (`leaf.grad = ...`); each leaf gets its own gradient back. `unsaved` has the keys
    of storages that may change (see `GraphPool.leave_unsaved`).
    """

    def __init__(self, *roots: Any, unsaved: Container[int] = ()) -> None:
        self.undo_log = UndoLog(unsaved)
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
        with ExitStack() as restore:  # runs every callback, even if another one fails
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
        """Wraps the recording of a pass; `runs` says that the recording executes the pass for real."""
        before = PythonState(self.objects)
        self.undo_log.refuse_new_writes = True
        try:
            with self.undo_log.run() if runs else own_autocast_cache():
                yield
        finally:
            self.undo_log.refuse_new_writes = False
        for what in before.rebound():
            raise StateError(f"the function replaces {what}, which a replay would not do again")

    def restore_gradients(self) -> None:
        for leaf, gradient in self.entry_gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def changed_gradients(self) -> list[Tensor]:
        """Leaves whose gradient the function rebound or wrote."""
        return [
            leaf
            for leaf, gradient in self.entry_gradients
            if leaf.grad is not gradient or (gradient is not None and self.undo_log.wrote(gradient))
        ]

    def create_optimizer_state(self) -> None:
        """Create the state of optimizers that the function steps for the first time, at its initial value.

        An optimizer creates its state in its first step. A graph holds a later step, so the state has to exist
        before the recording. A step on zero gradients creates it; the undo log undoes that step.
        """
        for optimizer, known in self._states:
            created = [p for p, state in optimizer.state.items() if set(state) - known.get(p, set())]
            if not created:
                continue
            self._drop_new_optimizer_state(optimizer)
            self._step_on_zeros(optimizer, created)
            self.undo_log.adopt(tensors_in([optimizer.state[p] for p in created]))

    def _step_on_zeros(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        name = type(optimizer).__name__
        groups = optimizer.param_groups
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        decays = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
        if any(group.get("dampening") for group in groups):
            raise CaptureError(
                f"the first step of {name} with dampening differs from the later ones: run one step first"
            )
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
def no_gc() -> Iterator[None]:
    """Switch the garbage collector off: a destructor that frees CUDA memory would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
