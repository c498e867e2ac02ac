"""Workers as actors of Ray: one for each rank, in a placement group, each asked for its news all the time.

Owns the placement group and the actors. The group has one bundle for each node; Ray moves a bundle to another node when
its own is dead, and an actor that is placed in it waits until there is one. Ray itself restarts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollgraph.cluster.messages import (
    Abort,
    Begin,
    Ended,
    Event,
    Heard,
    Order,
    Place,
    Placed,
    Publish,
    Published,
    Release,
    Stop,
    WorkerLost,
)
from rollgraph.cluster.news import AttemptEnded, News, Shown, StepTaken
from rollgraph.cluster.rank_worker import RankPlace, RankWorker
from rollgraph.config import Config

_LOOK_AT_NODES = 1.0  # seconds between two looks at which nodes Ray holds for dead
_LONGEST_REASON = 300  # characters of what Ray says about a lost actor


@dataclass
class _Actor:
    """A worker from the outside."""

    number: int
    rank: int
    handle: Any
    node_id: str = ""


@dataclass(frozen=True)
class _Question:
    """A call of an actor that has not been answered."""

    actor: _Actor
    about: str  # the method
    attempt: int = 0


class RayTransport:
    """The workers of one run. `folder` is where they work, if their nodes have it."""

    def __init__(
        self, ray: Any, config: Config, run: str, folder: str | None, worker: type[RankWorker] = RankWorker
    ) -> None:
        from ray.util.placement_group import placement_group

        self._ray = ray
        self._config = config
        self._run = run
        self._folder = folder
        self._actors: dict[int, _Actor] = {}
        self._questions: dict[Any, _Question] = {}  # by the reference to their answers
        self._next_look = 0.0
        self._worker_class = ray.remote(_with_node(ray, worker))
        self._group = placement_group([self._bundle()] * config.cluster.nodes, strategy="STRICT_SPREAD")

    def _bundle(self) -> dict[str, float]:
        cluster = self._config.cluster
        bundle = {"CPU": float(cluster.cpus_per_rank * cluster.ranks_on_node)}
        if cluster.gpus_per_node:
            bundle["GPU"] = float(cluster.gpus_per_node)
        return bundle

    def close(self) -> None:
        """End all actors, and give back what was reserved for them."""
        from ray.util.placement_group import remove_placement_group

        for number in list(self._actors):
            self._release(number)
        remove_placement_group(self._group)

    # -- orders ------------------------------------------------------------------------------------

    def send(self, order: Order) -> None:
        match order:
            case Place():
                self._place(order)
            case Release():
                self._release(order.worker)
            case Publish():
                self._ask(order.worker, "publish", self._host_of(order.worker), attempt=order.attempt)
            case Begin():
                self._ask(order.worker, "begin", order.attempt, order.address, self._name_of(order.worker))
            case Abort():
                self._ask(order.worker, "abort", order.attempt, order.reason, order.lost_rank)
            case Stop():
                self._ask(order.worker, "stop")
            case _:
                raise ValueError(f"{order} is not for workers")

    def _place(self, order: Place) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cluster = self._config.cluster
        node, local_rank = divmod(order.rank, cluster.ranks_on_node)
        device = "cuda:0" if cluster.gpus_per_node else "cpu"  # Ray shows an actor no GPU but its own
        place = RankPlace(order.rank, cluster.ranks, local_rank, device, self._run)
        options = {
            "num_cpus": cluster.cpus_per_rank,
            "num_gpus": 1 if cluster.gpus_per_node else 0,
            "max_restarts": 0,
            "max_concurrency": 4,  # news is being waited for while an order arrives
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, node),
        }
        handle = self._worker_class.options(**options).remote(self._config, place, self._folder)
        self._actors[order.worker] = _Actor(order.worker, order.rank, handle)
        self._ask(order.worker, "node_id")

    def _ask(self, worker: int, method: str, *arguments: Any, attempt: int = 0) -> None:
        actor = self._actors.get(worker)
        if actor is not None:  # otherwise it was lost, which the driver has not read yet
            ref = getattr(actor.handle, method).remote(*arguments)
            self._questions[ref] = _Question(actor, method, attempt)

    def _release(self, number: int) -> None:
        """Ray ends the process with force, if it can be reached, even one that is stopped."""
        actor = self._actors.pop(number, None)
        if actor is None:
            return
        self._questions = {ref: asked for ref, asked in self._questions.items() if asked.actor is not actor}
        self._ray.kill(actor.handle)

    # -- news --------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> Sequence[Event | Shown]:
        events: list[Event | Shown] = []
        answered: list[Any] = []
        if self._questions:
            refs = list(self._questions)
            answered, _ = self._ray.wait(refs, num_returns=1, timeout=seconds)
            if answered:
                answered, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        else:
            time.sleep(seconds)
        for ref in answered:
            question = self._questions.pop(ref, None)  # of an actor that an earlier answer was the end of
            if question is not None:
                events += self._read(ref, question)
        return events + self._find_dead_nodes()

    def _read(self, ref: Any, question: _Question) -> list[Event | Shown]:
        """What an answer means, or that there will be none."""
        actor = question.actor
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._release(actor.number)
            return [WorkerLost(actor.number, self._describe(error))]
        events: list[Event | Shown] = []
        match question.about:
            case "node_id":
                actor.node_id = answer
                events.append(Placed(actor.number, self._name_of(actor.number)))
                self._ask(actor.number, "news")
            case "publish":
                events.append(Published(actor.number, question.attempt, answer))
            case "news":
                events.append(Heard(actor.number))
                events += [_translate(actor.number, news) for news in answer]
                self._ask(actor.number, "news")
        return events

    def _describe(self, error: Any) -> str:
        """Why an actor is lost. What Ray says is long, and of use only where the actor could not be made."""
        if getattr(error, "actor_init_failed", False):
            return f"it could not start: …{' '.join(str(error).split())[-_LONGEST_REASON:]}"
        if getattr(error, "preempted", False):
            return "its node was preempted"
        if isinstance(error, self._ray.exceptions.ActorDiedError):
            return "its process died"
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return "its process cannot be reached"
        return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"

    def _find_dead_nodes(self) -> list[Event | Shown]:
        """Workers on nodes that Ray holds for dead. Their connections may look well for minutes."""
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + _LOOK_AT_NODES
        dead = {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}
        lost: list[Event | Shown] = []
        for actor in list(self._actors.values()):
            if actor.node_id in dead:
                self._release(actor.number)
                lost.append(WorkerLost(actor.number, "its node is dead"))
        return lost

    # -- nodes -------------------------------------------------------------------------------------

    def _node_of(self, worker: int) -> dict[str, Any]:
        actor = self._actors.get(worker)
        for node in self._ray.nodes():
            if actor is not None and node["NodeID"] == actor.node_id:
                found: dict[str, Any] = node
                return found
        return {}  # it was lost, which the driver has not read yet

    def _host_of(self, worker: int) -> str:
        return str(self._node_of(worker).get("NodeManagerAddress", ""))

    def _name_of(self, worker: int) -> str:
        """The host and, because several nodes of Ray may share one, the beginning of the node's id."""
        node = self._node_of(worker)
        return f"{node.get('NodeManagerHostname', 'a node that is gone')} ({node.get('NodeID', '')[:8]})"

    def describe_room(self, ranks: Sequence[int]) -> str:
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


def _with_node(ray: Any, worker: type[RankWorker]) -> type[RankWorker]:
    """A worker that knows which node of Ray it is on."""

    class PlacedWorker(worker):  # type: ignore[misc, valid-type]
        def node_id(self) -> str:
            found: str = ray.get_runtime_context().get_node_id()
            return found

    PlacedWorker.__name__ = PlacedWorker.__qualname__ = worker.__name__  # shown beside each line of its log
    return PlacedWorker


def _translate(worker: int, news: News) -> Event | Shown:
    match news:
        case Shown():
            return news
        case StepTaken():
            return Heard(worker, news.attempt, news.step)
        case AttemptEnded():
            return Ended(worker, news.attempt, news.outcome)
