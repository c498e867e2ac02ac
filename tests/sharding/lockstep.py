"""Several ranks in one process: each is a thread, and collectives meet in a room instead of a process group.

A collective of the room is as unkind as one may be: it writes its result only when it is waited for, it refuses to be
paired with another one, and it notices when what it sends is written while it is in flight. Any of them can be made to
fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollgraph.distributed.liveness import Liveness
from rollgraph.sharding.overlap import Collectives, CommunicationError, Flight, _sum_in_order

PATIENCE = 120.0  # seconds until a rank that does not come is an error


class Room:
    """Where the ranks meet: what each of them brought to the n-th collective."""

    def __init__(self, size: int) -> None:
        self.size, self.store = size, dist.HashStore()
        self.board: dict[str, str] = {}
        self._changed = threading.Condition()
        self._brought: dict[int, dict[int, tuple[str, Any]]] = {}
        self._failed: BaseException | None = None

    def bring(self, rank: int, number: int, what: str, value: Any) -> None:
        with self._changed:
            self._brought.setdefault(number, {})[rank] = (what, value)
            self._changed.notify_all()

    def take(self, number: int) -> list[Any]:
        """What all ranks brought, in their order."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._failed or len(self._brought[number]) == self.size, PATIENCE)
            if self._failed is not None:
                raise AssertionError("another rank failed") from self._failed
            assert came, f"ranks {sorted(self._brought[number])} wait for the others: {self._brought[number]}"
            entries = [self._brought[number][rank] for rank in range(self.size)]
        names = {what for what, _ in entries}
        assert len(names) == 1, f"different collectives met: {[what for what, _ in entries]}"
        return [value for _, value in entries]

    def fail(self, error: BaseException) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()


class RoomRollCall(Liveness):
    """A roll call in which nobody is ever missing: a board in the room."""

    def __init__(self, room: Room) -> None:
        self.loss, self._board = None, room.board

    def check(self) -> None:
        pass

    def post(self, key: str, text: str) -> None:
        self._board.setdefault(key, text)


class RoomCollectives(Collectives):
    """The collectives of one rank."""

    def __init__(self, room: Room, rank: int, timeout: float = 60.0) -> None:
        self.timeout, self.liveness = timeout, RoomRollCall(room)
        self._room, self._rank, self._number = room, rank, 0
        self.before_starting: Callable[[], None] = lambda: None
        self.before_meeting: Callable[[], None] = lambda: None
        self._failure: tuple[Literal["start", "wait"], int] | None = None

    @property
    def store(self) -> Any:
        return self._room.store

    def fail_at(self, moment: Literal["start", "wait"], after: int) -> None:
        """The collective that comes after so many others is going to fail."""
        self._failure = (moment, after)

    def fail_no_more(self) -> None:
        self._failure = None

    def _count_down(self, moment: str, what: str) -> None:
        if self._failure is None or self._failure[0] != moment:
            return
        left = self._failure[1]
        self._failure = (self._failure[0], left - 1) if left else None
        if not left:
            raise CommunicationError(f"{what} was made to fail at its {moment}")

    def _begin(self, what: str, value: Any) -> Callable[[], list[Any]]:
        self.before_starting()
        self._count_down("start", what)
        number = self._number
        self._number += 1
        self._room.bring(self._rank, number, what, value)

        def wait() -> list[Any]:
            found = self._room.take(number)
            self._count_down("wait", what)
            return found

        return wait

    def gather(self, full: Tensor, shard: Tensor, what: str) -> Flight:
        wait, found = self._begin(what, shard.clone()), list[Tensor]()

        def finish() -> None:
            full.copy_(torch.cat(found))

        return Flight(lambda: found.extend(wait()), finish)

    def reduce(self, gradients: Tensor, shard: Tensor, what: str) -> Flight:
        sent = gradients.clone()
        wait, found = self._begin(what, sent), list[Tensor]()

        def land() -> None:
            assert torch.equal(gradients, sent), f"gradients were written during {what}"
            found.extend(wait())

        def finish() -> None:
            parts = [part.view(self._room.size, -1)[self._rank] for part in found]
            _sum_in_order(shard, torch.stack(parts))

        return Flight(land, finish)

    def sum(self, value: Tensor) -> Tensor:
        self.before_meeting()
        parts = self._begin("the sum of a scalar", value.clone())()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def agree(self, text: str) -> list[str]:
        self.before_meeting()
        return self._begin("a comparison", text)()


def run_ranks(size: int, function: Callable[[int, Room], Any]) -> list[Any]:
    """`function(rank, room)` on all ranks at once; the first error of any of them is raised."""
    room, results, errors = Room(size), [None] * size, list[BaseException]()

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
