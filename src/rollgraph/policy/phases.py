"""The phase machine: what a worker is doing, what each transition requires, and which phase owns the shared memory.

Touches no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

# -- phases ----------------------------------------------------------------------------------------
# The machine decides which work a transition needs; functions passed to it do the work. A phase is a context manager:
# leaving it restores the state on entry, exception or not. No transition captures a graph.
#
# | phase                 | before it                  | while it lasts   | after it failed       |
# |-----------------------|----------------------------|------------------|-----------------------|
# | generate, score, save | gather the full parameters | hooks are paused |                       |
# | train                 |                            | hooks are on     | gradients are dropped |

IDLE = "idle"
READ_PHASES = ("generate", "score", "save")  # phases that read the full parameters and compute no gradients
PHASES = (*READ_PHASES, "train")


class PhaseError(RuntimeError):
    """A phase cannot be entered now."""


class Phases:
    """Allows one phase at a time. Entering the current phase again costs nothing.

    `gathered_and_paused` makes the context of a phase that reads the full parameters. `take_memory` is called with the
    name of the phase being entered; if it raises, the phase is refused.
    """

    def __init__(
        self,
        gathered_and_paused: Callable[[], AbstractContextManager[None]],
        drop_gradients: Callable[[], None],
        take_memory: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._gathered_and_paused = gathered_and_paused
        self._drop_gradients = drop_gradients
        self._take_memory = take_memory
        self.current = IDLE
        self.entered: Counter[str] = Counter()

    @contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        if phase not in PHASES:
            raise PhaseError(f"there is no phase {phase!r}: expected one of {', '.join(PHASES)}")
        if self.current not in (IDLE, phase):
            raise PhaseError(f"cannot {phase} during {self.current}: leave that phase first")
        with ExitStack() as stack:
            if phase != self.current:
                stack.enter_context(self._transition(phase))
            try:
                yield
            except BaseException:
                if phase == "train":
                    self._drop_gradients()
                raise

    @contextmanager
    def _transition(self, phase: str) -> Iterator[None]:
        """Go from idle to a phase, and back."""
        with ExitStack() as stack:
            if phase in READ_PHASES:
                stack.enter_context(self._gathered_and_paused())
            self._take_memory(phase)  # after the gathers: ranks have ended an aborted step by then
            try:
                self.current = phase
                self.entered[phase] += 1
                yield
            finally:
                self.current = IDLE


# -- memory that phases share ----------------------------------------------------------------------
# `PhaseMemory` decides when memory changes hands, `SharedGradients` and the engine do the work, and `worker.py` chooses
# the layout. The KV cache reuses memory of training:
#
# | memory                                      | generate              | score               | train              |
# |---------------------------------------------|-----------------------|---------------------|--------------------|
# | gradients: `flat.gradient_memory`, fp32     | pages of the first    |                     | gradients          |
# |   (one allocation)                          | layers, as fit        |                     |                    |
# | pool of graphs, on a GPU                    | pages of the other    | activations         | activations,       |
# |                                             | layers, temporaries   |                     | logits             |
# | pool, if parameters are sharded             | full parameters       | full parameters     | activations        |
#
# So on a GPU the pool is as large as the largest phase needs: training, scoring, or generation with its pages. Warm-up
# allocates from the pool, too. On a CPU there is no pool: the other pages are ordinary memory, and activations are
# freed after use. A standalone engine (`rollgraph generate`) shares nothing. Allocated all the time: parameters,
# optimizer, reference, inputs of graphs, state of decoding. No capture copies the cache or the gradients.
#
# Nothing in the cache outlives a phase, and neither do gradients that no optimizer has used:
#
# | entering | does                                                                                          |
# |----------|-----------------------------------------------------------------------------------------------|
# | generate | is refused if there are such gradients; if another phase used the cache's memory, the engine  |
# |          | forgets its cache                                                                             |
# | score    | ends the use of the cache, because its graphs overwrite a part of it                          |
# | train    | ends the use of the cache and of full parameters; zeroes the gradients if they held the cache |
# | save     |                                                                                               |
#
# Guards of the graphs catch misuse outside of the phases: a decode after training, a training step on a cache.


class GradientsInUse(PhaseError):
    """The cache would overwrite gradients that the optimizer has not used."""


class SharedGradients(Protocol):
    """Gradients whose memory can be lent. `GradientReductions` implements it."""

    @property
    def has_pending(self) -> bool: ...
    def lend(self) -> None: ...
    def take_back(self) -> None: ...


class PhaseMemory:
    """Tracks which phase uses the shared memory. Without a cache there, every phase may be entered at any time.

    `invalidate_full_parameters` is called before training reuses their memory.
    """

    def __init__(self, gradients: SharedGradients, invalidate_full_parameters: Callable[[], None]) -> None:
        self._gradients = gradients
        self._invalidate_full_parameters = invalidate_full_parameters
        self._over_gradients = False  # whether the cache lies, at least in part, in the memory of the gradients
        self._forget_cache: Callable[[], None] | None = None  # None: no cache shares memory
        self._cache_is_valid = False  # no other phase has used its memory, and the weights are those of its keys
        self._gradients_are_lent = False

    def share(self, forget_cache: Callable[[], None], *, over_gradients: bool) -> None:
        """From now on a cache lies in shared memory. `over_gradients`: some of it in the memory of the gradients."""
        self._forget_cache = forget_cache
        self._over_gradients = over_gradients

    def enter(self, phase: str) -> None:
        """Give a phase its memory. Raises GradientsInUse, and changes nothing, if unused gradients are in it."""
        if phase == "generate":
            self._give_to_cache()
        elif phase in ("score", "train"):
            self._cache_is_valid = False
        if phase == "train":
            self._invalidate_full_parameters()
            if self._gradients_are_lent:
                self._gradients.take_back()
                self._gradients_are_lent = False

    def _give_to_cache(self) -> None:
        """Lend the gradients' memory to the cache, and make the engine forget a cache that is no longer valid."""
        if self._forget_cache is None:
            return
        if self._over_gradients and not self._gradients_are_lent:
            if self._gradients.has_pending:
                raise GradientsInUse(
                    "cannot generate now: there are gradients that the optimizer has not used, and the key/value cache "
                    "lies in their memory. Take the optimizer's step or call gradients.drop() first"
                )
            self._gradients.lend()
            self._gradients_are_lent = True
        if not self._cache_is_valid:
            self._forget_cache()
            self._cache_is_valid = True

    def invalidate_cache(self) -> None:
        """Mark the cache as computed with other weights: the next phase generate starts with an empty one."""
        self._cache_is_valid = False

    # -- guards ------------------------------------------------------------------------------------

    def cache_is_gone(self) -> str | None:
        """A guard of generation: another phase used the memory of the cache."""
        if self._cache_is_valid or self._forget_cache is None:
            return None
        return "another phase used the memory of the key/value cache: enter the phase generate first"

    def gradients_are_lent(self) -> str | None:
        """A guard of training: the memory of the gradients holds the cache."""
        if not self._gradients_are_lent:
            return None
        return "the memory of the gradients holds the key/value cache: enter the phase train first"
