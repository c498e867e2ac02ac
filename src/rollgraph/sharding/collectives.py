"""The collectives of one process group, started asynchronously, with errors that name the lost rank.

Owns every call into torch.distributed. Does not know buckets, modules or hooks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollgraph.distributed.liveness import Liveness
from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.distributed.world import World
from rollgraph.sharding.host_staging import HostStaging

Call = Callable[..., Any]  # a collective of torch.distributed: output, input, group and async_op
Reduction = Literal["library", "ordered"]

# The newer names first: the older ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GIVE_UP_SECONDS = 5.0  # for a collective to fail after its process group was aborted
_EXCHANGE = "an exchange inside a layer"
_CHECK_INTERVAL = timedelta(seconds=0.25)  # a wait checks this often whether a rank is lost


class CommunicationError(RankLost):
    """A collective failed or timed out. The message says which bucket and which rank; so does `loss`."""


class WaitEnded(RuntimeError):
    """A wait ended before its collective did, which is still in flight."""


@dataclass
class PendingCollective:
    """A collective that was started: how to wait for it, and what to do with its result then."""

    wait: Callable[[], None]
    copy_out: Callable[[], None]
    buffers: tuple[Tensor, ...] = ()  # kept alive until it is complete

    def complete(self) -> None:
        self.wait()
        self.copy_out()


def _do_nothing() -> None:
    pass


def watch_others(world: World, timeout: float = 600.0) -> Liveness:
    """A liveness check for a world that has none. All ranks create theirs in the same order."""
    store = _store_of(world)
    generation = store.add(f"rollgraph/liveness/{world.rank}", 1)
    return Liveness(world.rank, world.size, store, timeout, key=f"rollgraph/liveness/at/{generation}")


def _store_of(world: World) -> Any:
    group: Any = world.group or dist.group.WORLD
    return dist.distributed_c10d._get_process_group_store(group)


class Collectives:
    """All-gathers and reduce-scatters of one process group.

    `reduction="library"` sums as the backend does; "ordered" sums in the order of ranks, so that the bits do not depend
    on the backend. If a rank is lost or does not respond within `timeout` seconds, all others raise. If the world has a
    liveness check, its timeout is used instead.
    """

    def __init__(self, world: World, reduction: Reduction = "library", timeout: float = 600.0) -> None:
        if reduction not in ("library", "ordered"):
            raise ValueError(f"reduction={reduction!r}: expected 'library' or 'ordered'")
        if world.size > 1 and not dist.is_initialized():
            raise CommunicationError(f"there are {world.size} ranks, but torch.distributed is not initialised")
        self._world = world
        self._reduction = reduction
        self._unfinished: set[Any] = set()  # what was started and not waited for
        self.timeout = timeout
        self.liveness = world.liveness
        if world.size > 1 and self.liveness is None:
            self.liveness = watch_others(world, timeout)
            weakref.finalize(self, self.liveness.close)
        if self.liveness is not None:
            self.timeout = self.liveness.timeout
        self.before_starting: Callable[[], None] = _do_nothing  # called before each collective
        self.before_blocking: Callable[[], None] = _do_nothing  # called before those that wait for all ranks at once
        self.while_waiting: Callable[[], None] = _do_nothing  # called now and then; WaitEnded ends the wait

    @property
    def staged(self) -> bool:
        """Whether everything passes through host memory."""
        return self._world.staged

    @property
    def _on_device(self) -> bool:
        """Whether a collective is work of the GPU, which the host need not wait for."""
        return self._world.device.startswith("cuda") and not self.staged

    @property
    def store(self) -> Any:
        """The key-value store of the process group, where ranks leave messages without a collective."""
        return _store_of(self._world)

    def rejoin(self, world: World) -> None:
        """Go on in the process group and with the liveness check of the next attempt, as the same rank of as many."""
        if (world.rank, world.size) != (self._world.rank, self._world.size):
            raise ValueError(
                f"rank {self._world.rank} of {self._world.size} cannot go on as {world.rank} of {world.size}"
            )
        if not self.settle(_GIVE_UP_SECONDS):
            raise CommunicationError("a lost rank may still write to the memory of this one: start it anew")
        self._world = world
        self.liveness = world.liveness
        if self.liveness is not None:
            self.timeout = self.liveness.timeout

    def settle(self, seconds: float) -> bool:
        """Wait for what was begun with a rank that is lost to fail: until then it may still write to memory.

        With gloo it fails once the connections to the lost rank are closed, so somebody has to end that process.
        Returns whether all of it has failed within so many seconds, and is forgotten.
        """
        deadline = time.monotonic() + seconds
        while any(not work.is_completed() for work in self._unfinished):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        self._unfinished.clear()
        return True

    def gather(self, full: Tensor, shard: Tensor, what: str) -> PendingCollective:
        """Fill `full` with the shards of all ranks. `what` names the collective in errors."""
        if self._world.size == 1:
            return PendingCollective(_do_nothing, _do_nothing)
        mine = shard.clone()  # the shard is a part of `full` itself
        wait = self._start(what, _all_gather, full, mine)
        return PendingCollective(wait, _do_nothing, (mine,))

    def reduce(self, gradients: Tensor, shard: Tensor, what: str, *, onto: bool = False) -> PendingCollective:
        """Leave in `shard` the sum of that part of the gradients over all ranks, or add it `onto` what is there."""
        size = self._world.size
        if size == 1:
            return PendingCollective(_do_nothing, _do_nothing)
        if self._reduction == "library":
            total = torch.empty_like(shard)
            wait = self._start(what, _reduce_scatter, total, gradients)
            return PendingCollective(wait, lambda: sum_in_order(shard, total.unsqueeze(0), onto), (total,))
        parts = torch.empty_like(gradients)
        wait = self._start(what, dist.all_to_all_single, parts, gradients)
        return PendingCollective(wait, lambda: sum_in_order(shard, parts.view(size, -1), onto), (parts,))

    def sum(self, value: Tensor, what: str = "the sum of a scalar") -> Tensor:
        """The sum of a scalar over all ranks, in their order."""
        if self._world.size == 1:
            return value
        self.before_blocking()
        values = self._all_gather_now(value.view(1), what)
        total = values[0].clone()
        for part in values[1:]:
            total += part
        return total

    def all_gather_text(self, text: str, *, counts: bool = True) -> list[str]:
        """Exchange strings: what each rank passed, in the order of ranks. `counts` is as for any other collective."""
        if self._world.size == 1:
            return [text]
        self.before_blocking()
        device = self._world.device
        content = text.encode(errors="surrogatepass")
        # One byte more than needed, because frombuffer refuses an empty buffer.
        mine = torch.frombuffer(bytearray(content + b"."), dtype=torch.uint8).to(device)[:-1]
        what = "the exchange of strings"
        lengths = self._all_gather_now(torch.tensor([len(mine)], device=device), what, counts).tolist()
        longest = max(lengths)
        if longest == 0:
            return [""] * self._world.size
        padded = mine.new_zeros(longest)
        padded[: len(mine)] = mine
        rows = self._all_gather_now(padded, what, counts).view(self._world.size, -1).cpu()
        texts = []
        for row, length in zip(rows, lengths, strict=True):
            texts.append(row[:length].numpy().tobytes().decode(errors="surrogatepass"))
        return texts

    def gather_inside(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks, [ranks, ...], inside of what they compute together."""
        gathered = mine.new_empty((self._world.size, *mine.shape))
        self._exchange_inside(_all_gather, gathered.view(-1), mine.view(-1))
        return gathered

    def spread_inside(self, rows: Tensor) -> Tensor:
        """Of each rank the row that it has for this one, [ranks, ...], inside of what they compute together."""
        received = torch.empty_like(rows)
        self._exchange_inside(dist.all_to_all_single, received, rows)
        return received

    def _exchange_inside(self, call: Call, output: Tensor, given: Tensor) -> None:
        """On a GPU, nobody waits for it. It counts as no progress: ranks of other groups, which have other samples,
        exchange more or fewer.
        """
        assert self.liveness is not None
        if self._on_device:
            with self._explain_errors(_EXCHANGE):
                self.liveness.check()
                call(output, given, group=self._world.group)
            return
        self._start(_EXCHANGE, call, output, given, counts=False)()

    def _all_gather_now(self, mine: Tensor, what: str, counts: bool = True) -> Tensor:
        """The tensors of all ranks, one after the other."""
        gathered = mine.new_empty(self._world.size * len(mine))
        self._start(what, _all_gather, gathered, mine, counts=counts)()
        return gathered

    def _start(
        self, what: str, call: Call, output: Tensor, given: Tensor, *, counts: bool = True
    ) -> Callable[[], None]:
        """Start a collective, and return a function that waits for it. All ranks start as many that `counts`."""
        assert self.liveness is not None
        self.before_starting()
        staging = None
        if self.staged:
            staging = HostStaging(output, given)
            output = staging.output
            given = staging.given
        with self._explain_errors(what):
            self.liveness.check()
            if counts:
                self.liveness.report_progress(what)
            work = call(output, given, group=self._world.group, async_op=True)
        self._unfinished.add(work)

        def wait() -> None:
            with self._explain_errors(what):
                self._wait(work, what)
            self._unfinished.discard(work)
            if staging is not None:
                staging.copy_back()

        return wait

    def _wait(self, work: Any, what: str) -> None:
        """Wait as long as all ranks are alive, but no longer than the timeout."""
        assert self.liveness is not None
        if self._on_device:
            work.wait(timedelta(seconds=self.timeout))  # one wait only: NCCL aborts a collective whose wait times out
            self.liveness.check()  # it also ends, with any result, if it was aborted because a rank is lost
            return
        deadline = self.liveness.clock() + self.timeout
        while True:
            try:
                work.wait(_CHECK_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():  # with an error, or just after the wait timed out
                    work.wait()
                    return
            self.liveness.check()
            self.while_waiting()
            if self.liveness.clock() > deadline:
                reason = self.liveness.report_timeout(what)
                raise RankLost(reason, self.liveness.loss)

    @property
    def _rank_of_all(self) -> int:
        """The number that people know this rank by: the group may be of some ranks only."""
        return self._world.rank if self.liveness is None else self.liveness.rank

    @contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except WaitEnded:
            raise
        except RankLost as error:
            message = f"rank {self._rank_of_all}: {what} failed: {error}"
            raise CommunicationError(message, error.loss) from error
        except RuntimeError as error:
            assert self.liveness is not None
            reason = self.liveness.wait_for_loss() or "all ranks are alive"
            message = f"rank {self._rank_of_all}: {what} failed: {reason} ({_last_line(error)})"
            raise CommunicationError(message, self.liveness.loss) from error


def _last_line(error: BaseException) -> str:
    """A summary of an error of PyTorch, whose text may begin with a C++ stack trace."""
    return str(error).strip().splitlines()[-1]


def sum_in_order(shard: Tensor, parts: Tensor, onto: bool = False) -> None:
    """Add up the rows of `parts` from the first to the last, one by one `onto` what is in the shard if that is asked.

    Microbatches that are reduced one after another then give the sum of a process that runs all of them by itself.
    """
    if not onto:
        shard.copy_(parts[0])
        parts = parts[1:]
    for part in parts:
        shard.add_(part)
