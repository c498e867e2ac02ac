"""One rank of a cluster run, in a process that outlives attempts: what an actor of Ray does when it is asked to.

Every method returns soon; training happens in a thread. Knows no Ray. After a lost rank this process leaves the attempt
and waits for the next one with everything that takes long to make: the model in its memory, and captured graphs.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollgraph.cluster.messages import Outcome
from rollgraph.cluster.news import AttemptEnded, News, NewsBox, StepTaken
from rollgraph.cluster.remote_view import RemoteView
from rollgraph.config import Config
from rollgraph.distributed.attempt import Attempt, join, leave, own_store
from rollgraph.distributed.exit_codes import ExitCode, is_users
from rollgraph.distributed.lost_ranks import LossReport, RankLost, StoppedInSetup
from rollgraph.distributed.world import World
from rollgraph.run.shared_work import FailedElsewhere
from rollgraph.run.stop import StopRequest
from rollgraph.run.tenure import Tenure
from rollgraph.train import train

_SETTLE_SECONDS = 15.0  # for the driver to end a rank that hangs, with which this one has begun something
_ANSWER_SECONDS = 0.5  # after which a worker without news says so


@dataclass(frozen=True)
class RankPlace:
    """Which rank a worker is, and where."""

    rank: int
    size: int
    local_rank: int
    device: str
    run: str  # the same for all workers of a run, and for no other run


class RankWorker:
    """Takes part in one attempt after another."""

    def __init__(self, config: Config, place: RankPlace, folder: str | None) -> None:
        if folder is not None and os.path.isdir(folder):
            os.chdir(folder)
        self._config = config
        self._place = place
        self._news = NewsBox()
        self._tenure = Tenure(place.run)
        self._store: Any = None  # of the present attempt, where this is rank 0
        self._attempt = 0
        self._loss: LossReport | None = None  # why the present attempt has to be left
        self._joining = False
        self._world: World | None = None  # of the present attempt, between joining and leaving it
        self._stop = StopRequest()
        self._node = socket.gethostname()

    # -- what the driver asks for ------------------------------------------------------------------

    def publish(self, host: str) -> str:
        """Open a store where the ranks of an attempt meet; gives its address. That of the attempt before is gone."""
        limit = timedelta(seconds=self._config.ranks.timeout)
        os.environ["MASTER_ADDR"] = host
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        return f"{host}:{self._store.port}"

    def begin(self, attempt: int, address: str, node: str) -> None:
        """Start an attempt, on a node with this name; how it ends is news."""
        self._attempt = attempt
        self._node = node
        self._loss = None
        self._joining = True
        self._stop = StopRequest()
        threading.Thread(target=self._run, args=(attempt, address), name="rollgraph-train", daemon=True).start()

    def abort(self, attempt: int, reason: str, lost_rank: int | None) -> None:
        """Leave an attempt in which a rank was lost."""
        if attempt != self._attempt:
            return
        self._loss = LossReport(lost_rank, reason)
        if self._joining:  # it waits for the lost rank, and nothing can wake it
            os._exit(ExitCode.RANK_LOST)
        world = self._world
        if world is not None and world.liveness is not None and lost_rank not in (None, self._place.rank):
            world.liveness.report_lost(lost_rank, reason)

    def stop(self) -> None:
        self._stop.request("the driver")

    def news(self) -> list[News]:
        """What happened since the last call; waits a moment for something to happen."""
        return self._news.take(_ANSWER_SECONDS)

    # -- an attempt --------------------------------------------------------------------------------

    def _run(self, number: int, address: str) -> None:
        outcome = self._take_part(number, address)
        self._joining = False
        self._world = None
        self._news.put(AttemptEnded(number, outcome))

    def _take_part(self, number: int, address: str) -> Outcome:
        try:
            world = join(self._join_as(number, address), self._config.ranks)
        except BaseException as error:
            return _outcome_of(error)
        self._world = world
        self._joining = False
        view = RemoteView(self._news, shows=self._place.rank == 0, check=self._check)
        try:
            run = train(
                self._config,
                world,
                stop=self._stop,
                view=view,
                on_step=lambda step, _: self._news.put(StepTaken(number, step)),
                tenure=self._tenure,
            )
            leave(world)
        except BaseException as error:
            leave(world, error)
            if isinstance(error, RankLost) and not self._tenure.settle(_SETTLE_SECONDS):
                self._tenure.give_up_policy()  # a new one is safe from whoever still writes to the memory of this one
            return _outcome_of(error)
        if run is not None and run.progress.taken < self._config.steps:
            return Outcome("stopped", f"stopped after {run.progress.taken} of {self._config.steps} steps, as asked")
        return Outcome("finished")

    def _join_as(self, number: int, address: str) -> Attempt:
        place = self._place
        store = self._store
        if place.rank != 0:
            host, _, port = address.rpartition(":")
            limit = timedelta(seconds=self._config.ranks.timeout)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
        return Attempt(
            number - 1,
            place.rank,
            place.size,
            place.local_rank,
            node=self._node,
            store=None if store is None else own_store(store, number),
            device=place.device,
        )

    def _check(self) -> None:
        """Called often by whatever computes: raises if this attempt is over."""
        if self._loss is not None:
            raise RankLost(self._loss.text, self._loss)


def _outcome_of(error: BaseException) -> Outcome:
    """How an attempt ended that raised."""
    if isinstance(error, torch.AcceleratorError):  # nothing works in this process any more
        os.write(2, f"rollgraph: {error}\n".encode())
        os._exit(ExitCode.RANK_LOST)
    if isinstance(error, RankLost):
        return Outcome("lost", str(error), lost_rank=error.lost_rank)
    if isinstance(error, FailedElsewhere):
        return Outcome("lost", str(error), lost_rank=error.rank)
    if isinstance(error, StoppedInSetup):
        return Outcome("stopped", str(error))
    text = str(error) or type(error).__name__
    if isinstance(error, Exception) and is_users(error):
        return Outcome("failed", text, ExitCode.REFUSED)
    traceback.print_exception(error)  # Ray shows it at the driver
    return Outcome("failed", f"{type(error).__name__}: {text}", ExitCode.FAILED)
