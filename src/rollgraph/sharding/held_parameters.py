"""The two ways in which a rank holds parameters, behind one interface.

Whole: it has all of them, and those of a bucket are stale after an update until they are gathered. In a ring: it keeps
shards, layers take turns in a few slots, and what reads all parameters at once reads a full copy. `ShardedModel` asks
for parameters without knowing which way it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from rollgraph.distributed.world import World
from rollgraph.graph.hooks import Guard
from rollgraph.sharding.bucket_sync import BucketSync, StaleWeights
from rollgraph.sharding.collectives import Collectives
from rollgraph.sharding.frozen_parts import FrozenParts
from rollgraph.sharding.full_copy import Allocate, FullCopy
from rollgraph.sharding.parameter_gathers import ParameterGathers
from rollgraph.sharding.ring import BACKWARD, Ring

_ONLY_SHARDS = "each rank has a shard of the parameters: call make_reader() first"


class HeldParameters(Protocol):
    """What `ShardedModel` asks for."""

    catches_up: bool  # after an aborted step, other ranks may not have started what a gather here waits for

    @property
    def known(self) -> Mapping[Tensor, Any]:
        """The parameters and what is gathered like them, each with what it is gathered with."""

    def start(self) -> None:
        """All ranks are about to wait for each other: start the gathers that come before."""

    def wait(self) -> None:
        """Wait for all gathers in flight: parameters may be written afterwards."""

    def complete(self) -> None:
        """After `start` and `wait`: bring what reads all parameters at once up to date."""

    def ensure(self, parameters: Sequence[Tensor]) -> None:
        """Make sure that these parameters can be read."""

    def enter(self, parameters: Sequence[Tensor], toward: int) -> None:
        """A layer, or a part of it, with these parameters is about to run forward or backward."""

    def stale(self) -> str | None:
        """Why not all parameters can be read now; None if they can."""

    def raise_if_stale(self, parameters: Sequence[Tensor]) -> None: ...

    def after_update(self, trained: Sequence[BucketSync], ahead: bool) -> bool:
        """The optimizer has written the shards. Gather `ahead`, if asked; False: everything has to be gathered now."""

    def after_exchange(self) -> None:
        """What each rank keeps of the parameters was exchanged for others, on all ranks."""

    def guards_of(self, module: nn.Module) -> list[Guard]:
        """Why a graph of this module must not run now."""

    def make_reader(self, allocate: Allocate) -> nn.Module:
        """The model that has all parameters at once."""

    def keep_reader(self) -> None:
        """All parameters of the reader were written, alike on all ranks."""

    def forget_reader(self) -> None:
        """The memory that only the reader has holds something else."""

    def refuse_state_dict(self, instead: str) -> None:
        """Raise if the model itself does not have all parameters; `instead` says what to use."""

    def abandon(self) -> None:
        """Forget what is in flight, without a wait."""


class WholeParameters:
    """Every rank has all parameters."""

    catches_up = False

    def __init__(self, model: nn.Module, buckets: Sequence[BucketSync]) -> None:
        self._model = model
        self._buckets = buckets
        self.gathers = ParameterGathers(buckets)
        self.start = self.gathers.start
        self.wait = self.gathers.wait
        self.ensure = self.gathers.ensure
        self.stale = self.gathers.stale
        self.raise_if_stale = self.gathers.raise_if_stale

    @property
    def known(self) -> Mapping[Tensor, Any]:
        return self.gathers.bucket_of

    def complete(self) -> None:
        """The model itself is what reads them."""

    def enter(self, parameters: Sequence[Tensor], toward: int) -> None:
        self.ensure(parameters)

    def after_update(self, trained: Sequence[BucketSync], ahead: bool) -> bool:
        self.gathers.after_update(trained)
        if ahead:
            self.gathers.prefetch()
        return ahead

    def after_exchange(self) -> None:
        """They were exchanged where everybody reads them."""

    def guards_of(self, module: nn.Module) -> list[Guard]:
        return []

    def make_reader(self, allocate: Allocate) -> nn.Module:
        return self._model

    def keep_reader(self) -> None:
        """They were written where they are kept."""

    def forget_reader(self) -> None:
        """The reader has no memory of its own."""

    def refuse_state_dict(self, instead: str) -> None:
        """The model has all parameters."""

    def abandon(self) -> None:
        for bucket in self._buckets:
            bucket.abandon()


class RingParameters:
    """Every rank keeps shards of the parameters."""

    catches_up = True

    def __init__(
        self,
        model: nn.Module,
        ring: Ring,
        world: World,
        collectives: Collectives,
        units: Sequence[nn.Module] = (),
        parts: FrozenParts | None = None,
    ) -> None:
        self._make_copy = partial(FullCopy, model, ring, world, collectives, units=units, parts=parts)
        self._copy: FullCopy | None = None
        self.ring = ring
        self.wait = ring.wait
        self.ensure = ring.ensure_parameters
        self.raise_if_stale = ring.raise_if_stale
        self.after_exchange = ring.after_writing
        self.abandon = ring.abandon

    @property
    def known(self) -> Mapping[Tensor, Any]:
        return self.ring.unit_of

    def start(self) -> None:
        self.ring.started.clear()  # all ranks have started as much by now

    def complete(self) -> None:
        if self._copy is not None:
            self.ring.ensure_outside()
            self._copy.gather()

    def enter(self, parameters: Sequence[Tensor], toward: int) -> None:
        for unit in dict.fromkeys(self.ring.unit_of[parameter] for parameter in parameters):
            self.ring.ensure(unit, toward)
            if toward == BACKWARD:
                self.ring.claim(unit)

    def stale(self) -> str | None:
        if self._copy is None:
            return _ONLY_SHARDS
        return self.ring.refusal_outside() or self._copy.stale()

    def after_update(self, trained: Sequence[BucketSync], ahead: bool) -> bool:
        self.ring.after_writing()
        return True  # layers are gathered when they run

    def guards_of(self, module: nn.Module) -> list[Guard]:
        tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor in self.ring.unit_of]
        units = dict.fromkeys(self.ring.unit_of[tensor] for tensor in tensors)
        return [partial(self.ring.refusal, unit) for unit in units]

    def make_reader(self, allocate: Allocate) -> nn.Module:
        if self._copy is None:
            self._copy = self._make_copy(allocate)
        return self._copy.model

    def keep_reader(self) -> None:
        if self._copy is not None:
            self._copy.keep()

    def forget_reader(self) -> None:
        if self._copy is not None:
            self._copy.forget()

    def refuse_state_dict(self, instead: str) -> None:
        raise StaleWeights(f"{_ONLY_SHARDS}, {instead}")
