"""Communication of buckets beside computation: what is in flight, and which optimizer step each bucket reflects.

Owns the collectives and the versions. Knows buckets, not modules or hooks: who calls it, and when, is
`sharded_model.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollgraph.distributed.liveness import Liveness, RankLost
from rollgraph.distributed.world import World
from rollgraph.sharding.flat_buffer import Bucket

Reduction = Literal["library", "ordered"]

# Newer names first: the older ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_LOOK = timedelta(seconds=0.25)  # of a wait, after which it looks whether a rank is lost


class CommunicationError(RankLost):
    """A collective failed or timed out; says which bucket, and which rank is lost."""


class StaleWeights(RuntimeError):
    """Parameters would be read that were never gathered."""


@dataclass
class Flight:
    """A collective on its way: how to wait for it, and what is to be done with its result."""

    wait: Callable[[], None]
    finish: Callable[[], None]
    keep: tuple[Tensor, ...] = ()  # alive until it has landed

    def land(self) -> None:
        self.wait()
        self.finish()


def _nothing() -> None:
    pass


class Collectives:
    """Gathers and reductions of one process group.

    `library` sums as the backend does; `ordered` sums in the order of ranks, so that the bits do not depend on it.
    A rank that is gone, or does not come within `timeout` seconds, is an error on all others. Where the world has a
    liveness check, its time-out is the one that counts.
    """

    def __init__(self, world: World, reduction: Reduction = "library", timeout: float = 600.0) -> None:
        if reduction not in ("library", "ordered"):
            raise ValueError(f"reduction={reduction!r}: expected 'library' or 'ordered'")
        if world.size > 1 and not dist.is_initialized():
            raise CommunicationError(f"{world.size} ranks, but torch.distributed is not initialised")
        self._world, self._reduction = world, reduction
        self.liveness = world.liveness
        if world.size > 1 and self.liveness is None:
            self.liveness = _call_the_roll(world, timeout)
            weakref.finalize(self, self.liveness.close)
        self.timeout = timeout if self.liveness is None else self.liveness.timeout
        self.before_starting: Callable[[], None] = _nothing  # before each collective
        self.before_meeting: Callable[[], None] = _nothing  # before those that wait for all ranks at once

    @property
    def store(self) -> Any:
        """Where ranks leave notes for each other beside all collectives."""
        return _store_of(self._world)

    def gather(self, full: Tensor, shard: Tensor, what: str) -> Flight:
        """Fill `full` with the shards of all ranks."""
        if self._world.size == 1:
            return Flight(_nothing, _nothing)
        mine = shard.clone()  # a part of `full` itself
        wait = self._start(what, lambda: _all_gather(full, mine, group=self._world.group, async_op=True))
        return Flight(wait, _nothing, (mine,))

    def reduce(self, gradients: Tensor, shard: Tensor, what: str) -> Flight:
        """Leave in `shard` the sum over ranks of that part of their gradients."""
        size, group = self._world.size, self._world.group
        if size == 1:
            return Flight(_nothing, _nothing)
        if self._reduction == "library":
            total = torch.empty_like(shard)
            wait = self._start(what, lambda: _reduce_scatter(total, gradients, group=group, async_op=True))
            return Flight(wait, lambda: _replace(shard, total), (total,))
        parts = torch.empty_like(gradients)
        wait = self._start(what, lambda: dist.all_to_all_single(parts, gradients, group=group, async_op=True))
        return Flight(wait, lambda: _sum_in_order(shard, parts.view(size, -1)), (parts,))

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a scalar over ranks, in their order."""
        if self._world.size == 1:
            return value
        self.before_meeting()
        found = value.new_empty(self._world.size)
        group = self._world.group
        self._start("the sum of a scalar", lambda: _all_gather(found, value.view(1), group=group, async_op=True))()
        total = found[0].clone()
        for part in found[1:]:
            total += part
        return total

    def agree(self, text: str) -> list[str]:
        """What each rank says."""
        if self._world.size == 1:
            return [text]
        self.before_meeting()
        device = self._world.device
        content = text.encode(errors="surrogatepass")
        mine = torch.frombuffer(bytearray(content + b"."), dtype=torch.uint8).to(device)[:-1]  # never of nothing
        lengths = self._gather_all(torch.tensor([len(mine)], device=device)).tolist()
        padded = mine.new_zeros(max(lengths))
        padded[: len(mine)] = mine
        rows = self._gather_all(padded).view(self._world.size, -1).cpu()
        contents = [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]
        return [content.decode(errors="surrogatepass") for content in contents]

    def _gather_all(self, mine: Tensor) -> Tensor:
        """What each rank gives, one after the other."""
        found = mine.new_empty(self._world.size * len(mine))
        if len(found):
            self._start("a comparison", lambda: _all_gather(found, mine, group=self._world.group, async_op=True))()
        return found

    def _start(self, what: str, call: Callable[[], Any]) -> Callable[[], None]:
        """Begin a collective; what is given back waits for it."""
        assert self.liveness is not None
        self.before_starting()
        with self._explained(what):
            self.liveness.check()
            self.liveness.note(what)
            work = call()

        def wait() -> None:
            with self._explained(what):
                self._land(work, what)

        return wait

    def _land(self, work: Any, what: str) -> None:
        """Wait, as long as all ranks are there, for the time-out at most."""
        assert self.liveness is not None
        if not self._world.device.startswith("cpu"):
            work.wait(timedelta(seconds=self.timeout))  # NCCL ends a collective whose wait has ended: once is all
            return
        deadline = self.liveness.clock() + self.timeout
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self.liveness.check()
            if self.liveness.clock() > deadline:
                raise RankLost(self.liveness.late(what))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            raise CommunicationError(f"rank {self._world.rank}: {what} failed: {error}") from error
        except RuntimeError as error:
            assert self.liveness is not None
            reason = str(error).strip().splitlines()[-1]
            lost = self.liveness.explain() or "no rank is gone"
            raise CommunicationError(f"rank {self._world.rank}: {what} failed: {lost} ({reason})") from error


def _call_the_roll(world: World, timeout: float) -> Liveness:
    """For a world that has none: by the store of its process group."""
    return Liveness(world.rank, world.size, _store_of(world), timeout)


def _store_of(world: World) -> Any:
    group: Any = world.group or dist.group.WORLD
    return dist.distributed_c10d._get_process_group_store(group)


def _replace(shard: Tensor, total: Tensor) -> None:
    shard.copy_(total)


def _sum_in_order(shard: Tensor, parts: Tensor) -> None:
    shard.copy_(parts[0])
    for part in parts[1:]:
        shard.add_(part)


class BucketTraffic:
    """One bucket between the ranks: gathers, reductions, and the optimizer step its full parameters reflect."""

    def __init__(
        self, index: int, bucket: Bucket, parameters: Sequence[Tensor], world: World, collectives: Collectives
    ) -> None:
        self.index, self.bucket, self.parameters = index, bucket, parameters
        self._world, self._collectives = world, collectives
        self.version = 0  # of the full parameters
        self.shard_version = 0  # of the part that this rank owns
        self._gather: Flight | None = None
        self._writes: list[int] = []  # how often each parameter had been written when the gather began
        self._reduce: Flight | None = None
        self.reduction_began = False  # since forget_reduce()
        self._reduced = False

    @property
    def name(self) -> str:
        first, last = self.bucket.plan.slots[-1].parameter.name, self.bucket.plan.slots[0].parameter.name
        return f"bucket {self.index} ({first} to {last})" if first != last else f"bucket {self.index} ({first})"

    # -- parameters --------------------------------------------------------------------------------

    @property
    def stale(self) -> str | None:
        """Why the full parameters must not be read now, if so."""
        if self.version == self.shard_version:
            return None
        return f"{self.name} holds the parameters of step {self.version}, the model is at step {self.shard_version}"

    def updated(self) -> None:
        """The optimizer wrote this rank's shard, after `land_gather()`."""
        assert self._gather is None, "a gather in flight would overwrite what was written"
        self.shard_version += 1
        if self._world.size == 1:
            self.version = self.shard_version

    def start_gather(self) -> None:
        if self.stale is not None and self._gather is None:
            shard = self.bucket.shard(self._world.rank)
            self._writes = self._count_writes()
            self._gather = self._collectives.gather(self.bucket.parameters, shard, f"the gather of {self.name}")

    def land_gather(self) -> None:
        """Before the full parameters are read, and before anybody writes them."""
        if self._gather is not None:
            flight, self._gather = self._gather, None
            flight.land()
            self.version = self.shard_version
            if self._count_writes() != self._writes:
                raise RuntimeError(
                    f"a parameter of {self.name} was written while it was gathered, and the write is lost: "
                    "gather() before parameters are written by hand"
                )

    def _count_writes(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    # -- gradients ---------------------------------------------------------------------------------

    def start_reduce(self) -> None:
        assert self.bucket.gradients is not None
        if not self.reduction_began:
            shard = self.bucket.gradient_shard(self._world.rank)
            self._reduce = self._collectives.reduce(self.bucket.gradients, shard, f"the reduction of {self.name}")
            self.reduction_began = True

    def land_reduce(self) -> None:
        """Before the gradients are read, and before anybody writes them."""
        if self._reduce is not None:
            flight, self._reduce = self._reduce, None
            flight.land()
            self._reduced = True
        if self.reduction_began and not self._reduced:
            raise CommunicationError(f"the reduction of {self.name} failed before: drop_gradients() first")

    def discard_reduce(self) -> None:
        """Wait for what is in flight, and leave its result alone."""
        if self._reduce is not None:
            flight, self._reduce = self._reduce, None
            flight.wait()

    def forget_reduce(self) -> None:
        """What was reduced is used or given up; the next gradients may come."""
        assert self._reduce is None, "a reduction in flight reads the gradients"
        self.reduction_began = self._reduced = False
