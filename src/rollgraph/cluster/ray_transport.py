"""Workers as Ray actors: one per rank, in a placement group, polled continuously for news.

Owns the placement group and the actors. The group has one bundle per node. When a node dies, Ray moves its bundle to
another node; an actor in that bundle waits until there is one. Ray itself restarts no actor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollgraph.cluster.messages import (
    AbortAttempt,
    AttemptEnded,
    DisplayCall,
    Event,
    KillWorker,
    News,
    OpenStore,
    Order,
    PlaceWorker,
    StartAttempt,
    StepTaken,
    StopWorker,
    StoreOpened,
    WorkerAlive,
    WorkerDone,
    WorkerLost,
    WorkerPlaced,
)
from rollgraph.cluster.rank_worker import RankIdentity, RankWorker
from rollgraph.config import Config

_NODE_CHECK_SECONDS = 1.0  # interval between checks for dead nodes
_MAX_REASON_LENGTH = 300  # characters of Ray's error message


@dataclass
class _Actor:
    """The driver's handle to a worker."""

    number: int
    rank: int
    handle: Any
    node_id: str = ""


@dataclass(frozen=True)
class _PendingCall:
    """A remote call that has not returned yet."""

    actor: _Actor
    method: str
    attempt: int = 0


class RayTransport:
    """The workers of one run. `folder` is their working directory, on nodes that have it."""

    def __init__(
        self, ray: Any, config: Config, run: str, folder: str | None, worker: type[RankWorker] = RankWorker
    ) -> None:
        from ray.util.placement_group import placement_group

        self._ray = ray
        self._config = config
        self._run = run
        self._folder = folder
        self._actors: dict[int, _Actor] = {}
        self._pending_calls: dict[Any, _PendingCall] = {}  # by the `ObjectRef` of the answer
        self._next_node_check = 0.0
        self._worker_class = ray.remote(_with_node_id(ray, worker))
        self._group = placement_group([self._bundle()] * config.cluster.nodes, strategy="STRICT_SPREAD")

    def _bundle(self) -> dict[str, float]:
        cluster = self._config.cluster
        bundle = {"CPU": float(cluster.cpus_per_rank * cluster.ranks_on_node)}
        if cluster.gpus_per_node:
            bundle["GPU"] = float(cluster.gpus_per_node)
        return bundle

    def close(self) -> None:
        """Kill all actors and remove the placement group."""
        from ray.util.placement_group import remove_placement_group

        for number in list(self._actors):
            self._kill_worker(number)
        remove_placement_group(self._group)

    # -- orders ------------------------------------------------------------------------------------

    def send(self, order: Order) -> None:
        match order:
            case PlaceWorker():
                self._start_worker(order)
            case KillWorker():
                self._kill_worker(order.worker)
            case OpenStore():
                self._call(order.worker, "open_store", self._node_host(order.worker), attempt=order.attempt)
            case StartAttempt():
                self._call(order.worker, "start_attempt", order.attempt, order.address, self._node_name(order.worker))
            case AbortAttempt():
                self._call(order.worker, "abort_attempt", order.attempt, order.reason, order.lost_rank)
            case StopWorker():
                self._call(order.worker, "stop")
            case _:
                raise ValueError(f"{order} is not for workers")

    def _start_worker(self, order: PlaceWorker) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cluster = self._config.cluster
        node, local_rank = divmod(order.rank, cluster.ranks_on_node)
        device = "cuda:0" if cluster.gpus_per_node else "cpu"  # Ray makes only its own GPU visible to an actor
        identity = RankIdentity(order.rank, cluster.ranks, local_rank, device, self._run)
        options = {
            "num_cpus": cluster.cpus_per_rank,
            "num_gpus": 1 if cluster.gpus_per_node else 0,
            "max_restarts": 0,
            "max_concurrency": 4,  # orders arrive while a call of `news` is waiting
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, node),
        }
        handle = self._worker_class.options(**options).remote(self._config, identity, self._folder)
        self._actors[order.worker] = _Actor(order.worker, order.rank, handle)
        self._call(order.worker, "node_id")

    def _call(self, worker: int, method: str, *arguments: Any, attempt: int = 0) -> None:
        actor = self._actors.get(worker)
        if actor is not None:  # otherwise it was lost, and the driver has not seen the event yet
            answer_ref = getattr(actor.handle, method).remote(*arguments)
            self._pending_calls[answer_ref] = _PendingCall(actor, method, attempt)

    def _kill_worker(self, number: int) -> None:
        """Ray kills the process, even a stopped one, if it can be reached."""
        actor = self._actors.pop(number, None)
        if actor is None:
            return
        self._pending_calls = {
            answer_ref: pending for answer_ref, pending in self._pending_calls.items() if pending.actor is not actor
        }
        self._ray.kill(actor.handle)

    # -- news --------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> Sequence[Event | DisplayCall]:
        events: list[Event | DisplayCall] = []
        ready: list[Any] = []
        if self._pending_calls:
            answer_refs = list(self._pending_calls)
            ready, _ = self._ray.wait(answer_refs, num_returns=1, timeout=seconds)
            if ready:  # one answer ended the wait: take all others that have arrived, too
                ready, _ = self._ray.wait(answer_refs, num_returns=len(answer_refs), timeout=0)
        else:
            time.sleep(seconds)
        for answer_ref in ready:
            call = self._pending_calls.pop(answer_ref, None)  # None: an earlier answer in this batch released its actor
            if call is not None:
                events += self._read_answer(answer_ref, call)
        return events + self._find_dead_nodes()

    def _read_answer(self, answer_ref: Any, call: _PendingCall) -> list[Event | DisplayCall]:
        """Translate an answer into events; a Ray error means that the worker is lost."""
        actor = call.actor
        try:
            answer = self._ray.get(answer_ref)
        except self._ray.exceptions.RayError as error:
            self._kill_worker(actor.number)
            return [WorkerLost(actor.number, self._describe_loss(error))]
        events: list[Event | DisplayCall] = []
        match call.method:
            case "node_id":
                actor.node_id = answer
                events.append(WorkerPlaced(actor.number, self._node_name(actor.number)))
                self._call(actor.number, "news")
            case "open_store":
                events.append(StoreOpened(actor.number, call.attempt, answer))
            case "news":
                events.append(WorkerAlive(actor.number))
                events += [_event_of(actor.number, news) for news in answer]
                self._call(actor.number, "news")
        return events

    def _describe_loss(self, error: Any) -> str:
        """Why an actor is lost. Ray's message is long, and useful only if the actor could not start."""
        if getattr(error, "actor_init_failed", False):
            return f"it could not start: …{' '.join(str(error).split())[-_MAX_REASON_LENGTH:]}"
        if getattr(error, "preempted", False):
            return "its node was preempted"
        if isinstance(error, self._ray.exceptions.ActorDiedError):
            return "its process died"
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return "its process cannot be reached"
        return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_LENGTH]}"

    def _find_dead_nodes(self) -> list[Event | DisplayCall]:
        """Workers on dead nodes, according to Ray. Their connections may look healthy for minutes."""
        now = time.monotonic()
        if now < self._next_node_check:
            return []
        self._next_node_check = now + _NODE_CHECK_SECONDS
        dead = {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}
        lost: list[Event | DisplayCall] = []
        for actor in list(self._actors.values()):
            if actor.node_id in dead:
                self._kill_worker(actor.number)
                lost.append(WorkerLost(actor.number, "its node is dead"))
        return lost

    # -- nodes -------------------------------------------------------------------------------------

    def _node_of(self, worker: int) -> dict[str, Any]:
        actor = self._actors.get(worker)
        for node in self._ray.nodes():
            if actor is not None and node["NodeID"] == actor.node_id:
                info: dict[str, Any] = node
                return info
        return {}  # it was lost, and the driver has not seen the event yet

    def _node_host(self, worker: int) -> str:
        return str(self._node_of(worker).get("NodeManagerAddress", ""))

    def _node_name(self, worker: int) -> str:
        """The host name and the start of the node id, because one host may run several Ray nodes."""
        node = self._node_of(worker)
        return f"{node.get('NodeManagerHostname', 'a node that is gone')} ({node.get('NodeID', '')[:8]})"

    def describe_waiting(self, ranks: Sequence[int]) -> str:
        cluster = self._config.cluster
        kind = "GPU" if cluster.gpus_per_node else "CPU"
        alive = sum(node["Alive"] for node in self._ray.nodes())
        free = self._ray.available_resources().get(kind, 0)
        total = self._ray.cluster_resources().get(kind, 0)
        needed = " and ".join(f"{count:g} free {name}{'s' * (count != 1)}" for name, count in self._bundle().items())
        names = ", ".join(f"rank {rank}" for rank in ranks)
        return (
            f"waiting for {names}, until there is a node with {needed}; {alive} nodes are alive, and {free:g} of their "
            f"{total:g} {kind}s are free"
        )


def _with_node_id(ray: Any, worker: type[RankWorker]) -> type[RankWorker]:
    """A subclass of the worker that can report its Ray node."""

    class PlacedWorker(worker):  # type: ignore[misc, valid-type]
        def node_id(self) -> str:
            node_id: str = ray.get_runtime_context().get_node_id()
            return node_id

    PlacedWorker.__name__ = PlacedWorker.__qualname__ = worker.__name__  # Ray prefixes each log line with it
    return PlacedWorker


def _event_of(worker: int, news: News) -> Event | DisplayCall:
    match news:
        case DisplayCall():
            return news
        case StepTaken():
            return WorkerAlive(worker, news.attempt, news.step)
        case AttemptEnded():
            return WorkerDone(worker, news.attempt, news.outcome)
