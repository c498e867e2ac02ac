"""Memory that phases share: what lies over what, and whose turn it is.

Owns the turns and touches no tensor: it decides what a phase takes and has `SharedGradients` and the engine do it.
`cache_layout.py` lays out the memory. The cache needs no memory of its own beyond that of training:

| memory | generate | score | train |
|---|---|---|---|
| gradients: `flat.gradient_memory`, fp32, one allocation | pages of the first layers, as many as fit | | gradients |
| pool of graphs, on a GPU | pages of the other layers, and temporaries | activations | activations, logits |
| the same, if parameters are sharded | a full copy of them | the same copy | activations |

So on a GPU the pool takes the larger of what training or scoring uses at once and of what generation does, pages
included; warm-up takes its memory from there, too. On a CPU there is no pool: the other pages are ordinary memory, and
activations are freed after use. An engine of its own (`rollgraph generate`) shares nothing. Always held: parameters,
optimizer, reference, inputs of graphs, state of decoding. No capture copies the cache or the gradients.

Nothing in the cache outlives a phase, and neither do gradients that no optimizer has used:

| entered | does |
|---|---|
| generate | is refused if there are such gradients; has the engine forget its cache if another phase used its memory |
| score | ends the use of the cache: its graphs overwrite a part of it |
| train | ends the use of the cache and of a full copy, zeroes the gradients if their memory held the cache |
| save | |

Guards of the graphs refuse what happens outside of the phases: a decode after training, a training step on a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rollgraph.policy.phases import PhaseError


class GradientsInUse(PhaseError):
    """The cache would overwrite gradients that the optimizer has not used."""


class SharedGradients(Protocol):
    """Gradients whose memory can be lent. `ShardedModel` implements it."""

    @property
    def has_gradients(self) -> bool: ...
    def lend_gradients(self) -> None: ...
    def take_back_gradients(self) -> None: ...
    def forget_copy(self) -> None: ...


class PhaseMemory:
    """Whose turn it is. Without a cache in shared memory, every phase may be entered at any time."""

    def __init__(self, gradients: SharedGradients) -> None:
        self._gradients = gradients
        self._over_gradients = False
        self._forget_cache: Callable[[], None] | None = None  # None: no cache shares memory
        self._cache_holds = False
        self._gradients_are_lent = False

    def share(self, forget_cache: Callable[[], None], *, over_gradients: bool) -> None:
        """From now on a cache lies in shared memory, some of it over the gradients or none."""
        self._forget_cache = forget_cache
        self._over_gradients = over_gradients

    def enter(self, phase: str) -> None:
        """Give a phase its memory. Raises GradientsInUse, and changes nothing, if it must not have it yet."""
        if phase == "generate":
            self._give_to_cache()
        elif phase in ("score", "train"):
            self._cache_holds = False
        if phase == "train":
            self._gradients.forget_copy()
            if self._gradients_are_lent:
                self._gradients.take_back_gradients()
                self._gradients_are_lent = False

    def _give_to_cache(self) -> None:
        if self._forget_cache is None:
            return
        if self._over_gradients and not self._gradients_are_lent:
            if self._gradients.has_gradients:
                raise GradientsInUse(
                    "cannot generate now: there are gradients that the optimizer has not used, and the key/value cache "
                    "lies in their memory. Take the optimizer's step or call drop_gradients() first"
                )
            self._gradients.lend_gradients()
            self._gradients_are_lent = True
        if not self._cache_holds:
            self._forget_cache()
            self._cache_holds = True

    def forget(self) -> None:
        """What the cache holds is of other weights: the phase generate begins with none of it."""
        self._cache_holds = False

    # -- guards ------------------------------------------------------------------------------------

    def cache_is_gone(self) -> str | None:
        """A guard of generation: another phase used the memory of the cache."""
        if self._cache_holds or self._forget_cache is None:
            return None
        return "another phase used the memory of the key/value cache: enter the phase generate first"

    def gradients_are_lent(self) -> str | None:
        """A guard of training: the memory of the gradients holds the cache."""
        if not self._gradients_are_lent:
            return None
        return "the memory of the gradients holds the key/value cache: enter the phase train first"
