"""Between the adapters of a model, its shards and its weight slots: when A is copied to where it is multiplied with.

The copies must follow every change of the parameters: an optimizer's step, a gather, a slot that is swapped in, a
checkpoint. They are refreshed where a phase begins, around the use of a slot and before a minibatch. What would be
forgotten here is found by a guard, before the graph runs. For a model without adapters, nothing here does anything.

If parameters are sharded, so is the base, and A is copied in each layer that is gathered: nothing else writes to where
layers take turns. The guards are then those of the ring and of the full copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollgraph.model.adapters import Adapters, copying_a, frozen_tensors
from rollgraph.policy.weights import POLICY, SlotError, WeightSlots
from rollgraph.sharding import FrozenParts, ShardedModel

SHARDED_BASE = FrozenParts(frozen_tensors, copying_a)  # what layers with adapters have beside their parameters


class AdaptedWeights:
    """The weights that a worker computes with. It does for the phase machine what that asks for."""

    def __init__(self, adapters: Adapters | None, sharded: ShardedModel, slots: WeightSlots) -> None:
        self._adapters = adapters
        self._sharded = sharded
        self._slots = slots
        self._base: str | None = None  # the name under which the base scores
        if adapters is not None and sharded.has_copies:
            adapters.leave_to_gathers()
        elif adapters is not None:
            adapters.watch([bucket.parameters for bucket in sharded.flat.buckets])

    def __contains__(self, name: str) -> bool:
        return name == self._base or name in self._slots

    def name_base(self, name: str) -> None:
        """Let the model without its adapters score under this name, in place of a slot."""
        if self._adapters is None:
            raise ValueError("the model has no adapters: save() its weights to a slot")
        if name in self._slots:
            raise SlotError(f"{name!r} has weights of its own: give the base another name")
        self._base = name

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Compute with the weights of this name inside; afterwards with those of before, exception or not."""
        if name == self._base and self._adapters is not None:
            self._sharded.refresh_copy()
            with self._adapters.off():
                yield
            return
        if self._adapters is not None and not self._adapters.enabled:
            raise SlotError(f"the adapters are switched off: leave the base before you use {name!r}")
        try:
            with self._slots.use(name):
                self.refresh()
                yield
        finally:
            self.refresh()

    def refresh(self) -> None:
        """Bring everything that is computed with up to date with the parameters of all ranks."""
        if self._adapters is not None and not self._sharded.has_copies:
            self._sharded.gather()
            self._adapters.refresh()

    # -- guards ------------------------------------------------------------------------------------

    def stale(self) -> str | None:
        """A guard of every graph: the weights are not those of the last step."""
        return self._sharded.stale() or self.stale_copies()

    def stale_copies(self) -> str | None:
        """A guard of a graph whose own parameters a hook gathers."""
        return None if self._adapters is None else self._adapters.stale()

    def not_the_policy(self) -> str | None:
        """A guard of training: the model computes with other weights than those that are trained."""
        if self._slots.current != POLICY:
            return f"the weights in the model are {self._slots.current!r}"
        if self._adapters is not None and not self._adapters.enabled:
            return "the adapters are switched off"
        return None

    # -- actions of the phase machine --------------------------------------------------------------

    @contextmanager
    def paused(self, gather: bool) -> Iterator[None]:
        with self._sharded.paused(gather):
            if gather:
                self.refresh()
            yield

    def drop_gradients(self) -> None:
        self._sharded.drop_gradients()
