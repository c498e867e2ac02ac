"""A cluster in memory: nodes, workers, messages that may be late, and a folder with a fenced lock.

Workers do what ranks do: meet, load the last checkpoint, take steps together, save. Any of them can die, hang or be cut
off from the driver at any moment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollgraph.cluster.lifecycle import Lifecycle, Phase, Timeouts
from rollgraph.cluster.messages import (
    AbortAttempt,
    Event,
    KillWorker,
    OpenStore,
    Order,
    Outcome,
    PlaceWorker,
    ShowLine,
    ShowWaiting,
    StartAttempt,
    StopWorker,
    StoreOpened,
    WorkerAlive,
    WorkerDone,
    WorkerLost,
    WorkerPlaced,
)

TIMEOUTS = Timeouts(heartbeat=30.0, abort=20.0, reported_lost=5.0, reminder=10.0)


@dataclass
class Folder:
    """The folder of a run. Whoever holds the lock for the newest attempt may write."""

    attempt: int = 0
    saved: int = 0  # steps in the checkpoint
    writers: list[int] = field(default_factory=list)  # the attempt that wrote each step

    def lock(self, attempt: int) -> bool:
        if attempt <= self.attempt:
            return False
        self.attempt = attempt
        return True

    def save(self, attempt: int, steps: int) -> bool:
        if attempt != self.attempt:
            return False
        assert steps == self.saved + 1, "a step was lost or taken twice"
        assert not self.writers or attempt >= self.writers[-1], "an old attempt wrote after a newer one"
        self.saved = steps
        self.writers.append(attempt)
        return True


@dataclass
class SimulatedWorker:
    number: int
    rank: int
    node: str | None = None
    alive: bool = True
    hung: bool = False
    cut_off: bool = False  # from the driver, and from its orders
    attempt: int = 0  # that it takes part in; 0: none
    last_attempt: int = 0
    weights: int = -1
    stopping: bool = False
    inbox: deque[Order] = field(default_factory=deque)
    outbox: deque[Event] = field(default_factory=deque)

    @property
    def works(self) -> bool:
        return self.alive and not self.hung


class SimulatedCluster:
    def __init__(self, ranks: int, nodes: int, steps: int, *, max_attempts: int = 10**6) -> None:
        self.ranks, self.steps = ranks, steps
        self.now = 0.0
        self.nodes = {f"node{index}": True for index in range(nodes)}
        self.workers: dict[int, SimulatedWorker] = {}
        self.folder = Folder()
        self.lines: list[str] = []
        self.waiting_ranks: list[tuple[int, ...]] = []
        self.worker_numbers: dict[tuple[int, int], int] = {}  # by attempt and rank
        self.user_error = ""  # the next step raises it on rank 1
        self.lifecycle = Lifecycle(ranks, TIMEOUTS, max_attempts=max_attempts)
        self.carry_out(self.lifecycle.start(self.now))

    # -- orders ------------------------------------------------------------------------------------

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case PlaceWorker():
                    self.workers[order.worker] = SimulatedWorker(order.worker, order.rank)
                case KillWorker():
                    worker = self.workers[order.worker]
                    if not worker.cut_off:  # otherwise the kill does not reach it
                        worker.alive = False
                case ShowLine():
                    self.lines.append(order.text)
                case ShowWaiting():
                    assert order.ranks
                    self.waiting_ranks.append(order.ranks)
                case StartAttempt() | OpenStore() | AbortAttempt() | StopWorker():
                    self.workers[order.worker].inbox.append(order)

    def obey(self, worker: SimulatedWorker) -> None:
        """Let a worker carry out its oldest order."""
        if not worker.inbox or not worker.works or worker.cut_off:
            return
        order = worker.inbox.popleft()
        match order:
            case OpenStore():
                worker.outbox.append(StoreOpened(worker.number, order.attempt, f"{worker.node}:{order.attempt}"))
            case StartAttempt():
                self._begin(worker, order)
            case AbortAttempt():
                if worker.attempt == order.attempt:
                    self._end(worker, Outcome("lost", order.reason, lost_rank=order.lost_rank))
            case StopWorker():
                worker.stopping = True

    def _begin(self, worker: SimulatedWorker, order: StartAttempt) -> None:
        assert worker.attempt == 0, "an attempt began on a worker that had not left the one before"
        assert order.attempt > worker.last_attempt, "an attempt began twice"
        key = (order.attempt, worker.rank)
        assert self.worker_numbers.setdefault(key, worker.number) == worker.number, "two workers have the same rank"
        worker.attempt = worker.last_attempt = order.attempt
        worker.weights = -1
        worker.stopping = False

    def _end(self, worker: SimulatedWorker, outcome: Outcome) -> None:
        worker.outbox.append(WorkerDone(worker.number, worker.attempt, outcome))
        worker.attempt = 0

    # -- events ------------------------------------------------------------------------------------

    def find_room(self) -> None:
        """Place waiting workers, one on each free node."""
        for worker in self.workers.values():
            used = {other.node for other in self.workers.values() if other.alive}
            free = [node for node, alive in self.nodes.items() if alive and node not in used]
            if worker.alive and worker.node is None and free:
                worker.node = free[0]
                worker.outbox.append(WorkerPlaced(worker.number, free[0]))

    def deliver(self, worker: SimulatedWorker) -> None:
        """Deliver the oldest event of a worker to the driver."""
        if worker.cut_off or not worker.outbox:
            return
        self.carry_out(self.lifecycle.handle(worker.outbox.popleft(), self.now))

    def answer(self, worker: SimulatedWorker) -> None:
        if worker.works and not worker.cut_off and worker.node is not None:
            self.carry_out(self.lifecycle.handle(WorkerAlive(worker.number), self.now))

    def kill(self, worker: SimulatedWorker) -> None:
        if worker.alive:
            worker.alive = False
            worker.outbox.append(WorkerLost(worker.number, "killed"))

    def cut_off(self, worker: SimulatedWorker) -> None:
        """Break the network to a worker. The driver hears that the worker is lost; the worker does not."""
        if worker.alive and worker.node is not None and not worker.cut_off:
            worker.cut_off = True
            self.carry_out(self.lifecycle.handle(WorkerLost(worker.number, "its node does not answer"), self.now))

    def lose_node(self, node: str) -> None:
        self.nodes[node] = False
        for worker in self.workers.values():
            if worker.node == node:
                self.kill(worker)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.lifecycle.tick(self.now))

    def members(self, attempt: int) -> dict[int, SimulatedWorker]:
        """The workers that began an attempt, by rank, whether or not they are still in it."""
        return {
            rank: self.workers[number]
            for (started_attempt, rank), number in self.worker_numbers.items()
            if started_attempt == attempt
        }

    def take_step(self, attempt: int) -> None:
        """Let the ranks of an attempt reach a collective: set-up, a step, or the end."""
        members = self.members(attempt)
        inside = {rank: worker for rank, worker in members.items() if worker.attempt == attempt and worker.works}
        if len(inside) < self.ranks:
            missing = min(set(range(self.ranks)) - set(inside))
            lost = members.get(missing)
            if lost is not None and not (lost.works and lost.attempt == attempt):
                for worker in inside.values():
                    self._end(worker, Outcome("lost", f"rank {missing} disappeared", lost_rank=missing))
            return
        first = inside[0]
        if first.weights < 0:
            if not self.folder.lock(attempt):
                assert first.cut_off, "the newest attempt was refused"
                return
            for worker in inside.values():
                worker.weights = self.folder.saved
            return
        assert len({worker.weights for worker in inside.values()}) == 1, "ranks of one attempt have different weights"
        if self.user_error:
            self._end(inside[1], Outcome("failed", self.user_error, code=2))
            return
        if first.weights == self.steps or any(worker.stopping for worker in inside.values()):
            how = "finished" if first.weights == self.steps else "stopped"
            for worker in inside.values():
                self._end(worker, Outcome(how, how))
            return
        if not self.folder.save(attempt, first.weights + 1):
            assert attempt < self.folder.attempt, "the newest attempt was fenced"
            return
        for worker in inside.values():
            worker.weights += 1
        first.outbox.append(WorkerAlive(first.number, attempt, first.weights))

    def write_late(self, worker: SimulatedWorker) -> bool:
        """Let a rank 0 that was cut off during a save finish it and hang. Returns whether it wrote anything."""
        if worker.rank != 0 or not 0 <= worker.weights < self.steps or worker.hung:  # no save follows the last step
            return False
        worker.hung = True
        return self.folder.save(worker.last_attempt, worker.weights + 1)

    # -- the end -----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.lifecycle.phase is Phase.OVER

    def run_undisturbed(self, rounds: int = 400) -> None:
        """Let all workers act in turn, without further losses, until the run is over."""
        while len([node for node, alive in self.nodes.items() if alive]) < 3 * self.ranks:
            self.nodes[f"spare{len(self.nodes)}"] = True
        for _ in range(rounds):
            if self.over:
                return
            self.find_room()
            for worker in list(self.workers.values()):
                self.answer(worker)
                while worker.inbox and worker.works and not worker.cut_off:
                    self.obey(worker)
                while worker.outbox and not worker.cut_off:
                    self.deliver(worker)
            for attempt in {worker.attempt for worker in self.workers.values() if worker.attempt}:
                self.take_step(attempt)
            self.pass_time(1.0)
        raise AssertionError(f"the run hangs in {self.lifecycle.phase}, {self.lifecycle.slots}")
