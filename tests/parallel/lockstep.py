"""Several ranks in one process: each rank is a thread, and a `Room` replaces the process group.

Its collectives are as strict as possible. They write their results only when they are waited for, refuse to be matched
with a different collective, and notice if their input is written while they are in flight. Each can be made to fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollgraph.parallel.data.collectives import Collectives, CommunicationError, PendingCollective, sum_in_order
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.parallel.ranks.world import World

PATIENCE = 120.0  # seconds until a rank that does not take part is an error
CHECK_INTERVAL = 0.05  # seconds between two checks whether a wait must end


class Room:
    """The inputs of each rank to each collective, by the number of the collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.HashStore()
        self.announcements: dict[str, str] = {}
        self._changed = threading.Condition()
        self._inputs: dict[int, dict[int, tuple[str, Any]]] = {}
        self._failed: BaseException | None = None

    def put(self, rank: int, number: int, what: str, value: Any) -> None:
        with self._changed:
            self._inputs.setdefault(number, {})[rank] = (what, value)
            self._changed.notify_all()

    def take(self, number: int, while_waiting: Callable[[], None]) -> list[Any]:
        """Wait for the inputs of all ranks; return them in the order of ranks."""
        with self._changed:
            complete = False
            deadline = time.monotonic() + PATIENCE
            while not complete and time.monotonic() < deadline:
                complete = self._changed.wait_for(
                    lambda: bool(self._failed) or len(self._inputs[number]) == self.size, CHECK_INTERVAL
                )
                if not complete:
                    while_waiting()
            self.raise_if_failed()
            assert complete, f"ranks {sorted(self._inputs[number])} wait for the other ranks: {self._inputs[number]}"
            entries = [self._inputs[number][rank] for rank in range(self.size)]
        names = {what for what, _ in entries}
        assert len(names) == 1, f"different collectives were matched: {[what for what, _ in entries]}"
        return [value for _, value in entries]

    def fail(self, error: BaseException) -> None:
        """Make all ranks raise instead of waiting."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        if self._failed is not None:
            raise AssertionError("another rank failed") from self._failed


class RoomLiveness(Liveness):
    """A liveness check in which no rank is lost unless a test says so; announcements are kept in the room."""

    def __init__(self, room: Room) -> None:
        self.loss = None
        self.operations: list[str] = []  # that this rank reported, apart from collectives
        self._announcements = room.announcements

    def check(self) -> None:
        pass

    def clock(self) -> float:
        return time.monotonic()

    def report_progress(self, operation: str) -> None:
        self.operations.append(operation)

    def report_timeout(self, operation: str) -> str:
        return f"some rank did not reach {operation}"

    def announce(self, key: str, text: str) -> str:
        return self._announcements.setdefault(key, text)


class RoomStore:
    """The store of a room, for one rank. `before_looking` is called before it looks for the keys of all ranks."""

    def __init__(self, room: Room, before_looking: Callable[[], None]) -> None:
        self._room = room
        self._before_looking = before_looking

    def check(self, keys: list[str]) -> bool:
        if len(keys) == self._room.size:  # the keys that a wait looks for
            self._before_looking()
            self._room.raise_if_failed()
        return self._room.store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._room.store, name)


class RoomCollectives(Collectives):
    """The collectives of one rank. Its store gets `before_looking`."""

    def __init__(
        self, room: Room, rank: int, timeout: float = 60.0, before_looking: Callable[[], None] = lambda: None
    ) -> None:
        self.timeout = timeout
        self.liveness: RoomLiveness = RoomLiveness(room)
        self._before_looking = before_looking
        self._room = room
        self._rank = rank
        self._number = 0  # of the next collective
        self.before_starting: Callable[[], None] = lambda: None
        self.before_blocking: Callable[[], None] = lambda: None
        self.while_waiting: Callable[[], None] = lambda: None
        self._failure: tuple[Literal["start", "wait"], int] | None = None

    @property
    def store(self) -> Any:
        return RoomStore(self._room, self._before_looking)

    def enter(self, room: Room) -> None:
        """Continue in another room, as in a new attempt of all ranks. Collectives in flight stay in the old one."""
        self._room = room
        self._number = 0
        self.liveness = RoomLiveness(room)

    def rejoin(self, world: World) -> None:
        assert (world.rank, world.size) == (self._rank, self._room.size)

    def fail_at(self, moment: Literal["start", "wait"], after: int) -> None:
        """Make the collective that follows `after` others fail."""
        self._failure = (moment, after)

    def fail_no_more(self) -> None:
        self._failure = None

    def _count_down(self, moment: str, what: str) -> None:
        if self._failure is None or self._failure[0] != moment:
            return
        kind, left = self._failure
        if left:
            self._failure = (kind, left - 1)
            return
        self._failure = None
        raise CommunicationError(f"{what} was made to fail at its {moment}")

    def _begin(self, what: str, value: Any) -> Callable[[], list[Any]]:
        self.before_starting()
        self._count_down("start", what)
        number = self._number
        self._number += 1
        self._room.put(self._rank, number, what, value)

        def wait() -> list[Any]:
            values = self._room.take(number, self.while_waiting)
            self._count_down("wait", what)
            return values

        return wait

    def gather(self, full: Tensor, shard: Tensor, what: str) -> PendingCollective:
        wait = self._begin(what, shard.clone())
        shards: list[Tensor] = []

        def copy_out() -> None:
            full.copy_(torch.cat(shards))

        return PendingCollective(lambda: shards.extend(wait()), copy_out)

    def reduce(self, gradients: Tensor, shard: Tensor, what: str, *, accumulate: bool = False) -> PendingCollective:
        sent = gradients.clone()
        wait = self._begin(what, sent)
        received: list[Tensor] = []

        def check_and_wait() -> None:
            assert torch.equal(gradients, sent), f"the gradients were written during {what}"
            received.extend(wait())

        def copy_out() -> None:
            parts = [part.view(self._room.size, -1)[self._rank] for part in received]
            sum_in_order(shard, torch.stack(parts), accumulate)

        return PendingCollective(check_and_wait, copy_out)

    def sum(self, value: Tensor, what: str = "the sum of a scalar") -> Tensor:
        self.before_blocking()
        parts = self._begin(what, value.clone())()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather_text(self, text: str) -> list[str]:
        self.before_blocking()
        return self._begin("the exchange of strings", text)()


def run_ranks(size: int, function: Callable[[int, Room], Any]) -> list[Any]:
    """Call `function(rank, room)` on all ranks at once. Raises the first error of any rank."""
    room = Room(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank, room)
        except BaseException as error:
            errors.append(error)
            room.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
