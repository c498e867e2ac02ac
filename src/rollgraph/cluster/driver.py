"""The driver of a cluster run, on the machine where it was started: events in, orders out.

Decides nothing (`lifecycle.py` does) and does not call Ray (`ray_transport.py` does).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from rollgraph.cluster.lifecycle import Lifecycle, Phase, Timeouts
from rollgraph.cluster.messages import DisplayCall, Event, Order, ShowLine, ShowWaiting
from rollgraph.cluster.rank_worker import RankWorker
from rollgraph.cluster.ray_transport import RayTransport
from rollgraph.config import Config
from rollgraph.log import ProgressDisplay, make_display
from rollgraph.parallel.ranks.failures import ExitCode
from rollgraph.parallel.ranks.stop import StopRequest, StopSignals
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.rewards.ray_pool import ray_connection

# -- the loop --------------------------------------------------------------------------------------

_POLL_SECONDS = 0.25  # how often the driver checks the time and stop requests


class Transport(Protocol):
    """Carries orders to workers and events to the driver."""

    def send(self, order: Order) -> None: ...

    def wait(self, seconds: float) -> Sequence[Event | DisplayCall]:
        """New events; blocks until there is one, for at most `seconds`."""

    def describe_waiting(self, ranks: Sequence[int]) -> str:
        """A line that says what these ranks wait for."""


def run_lifecycle(lifecycle: Lifecycle, transport: Transport, view: ProgressDisplay, stop: StopRequest) -> None:
    """Feed events to the lifecycle and carry out its orders until it is over."""

    def carry_out(orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case ShowLine():
                    view.note(order.text)
                case ShowWaiting():
                    view.note(transport.describe_waiting(order.ranks))
                case _:
                    transport.send(order)

    stop_sent = False
    carry_out(lifecycle.start(time.monotonic()))
    while lifecycle.phase is not Phase.OVER:
        for event in transport.wait(_POLL_SECONDS):
            if isinstance(event, DisplayCall):
                getattr(view, event.method)(*event.arguments, **event.options)
            else:
                carry_out(lifecycle.handle(event, time.monotonic()))
        carry_out(lifecycle.tick(time.monotonic()))
        if stop.requested and not stop_sent:
            stop_sent = True
            carry_out(lifecycle.stop(time.monotonic()))


# -- `cluster.engine: ray` -------------------------------------------------------------------------

_LEAVE_SECONDS = 60.0  # for a rank to leave an aborted attempt; more if rewards may take longer


@dataclass(frozen=True)
class ClusterOutcome:
    """How a cluster run ended: its exit code, and an explanation; empty if all steps were taken."""

    code: int
    verdict: str


def train_on_cluster(
    config: Config,
    *,
    stop: StopRequest | None = None,
    view: ProgressDisplay | None = None,
    worker: type[RankWorker] = RankWorker,
) -> ClusterOutcome:
    """Take all steps of a run on a Ray cluster, resuming from its last checkpoint. Lost ranks are replaced."""
    cluster = config.cluster
    stop = stop or StopRequest()
    view = view or make_display(config.log.progress, config.steps)
    folder = None if cluster.working_dir is not None else os.getcwd()
    timeouts = Timeouts(heartbeat=config.ranks.heartbeat_timeout, abort=max(_LEAVE_SECONDS, 2 * config.reward.timeout))
    lifecycle = Lifecycle(cluster.ranks, timeouts, max_attempts=cluster.attempts, gave_up_code=ExitCode.RANK_LOST)
    with (
        ray_connection(cluster.address, "cluster.engine: ray", cluster.working_dir) as ray,
        closing(RayTransport(ray, config, uuid.uuid4().hex, folder, worker)) as transport,
        StopSignals(World(0, 1, "cpu"), stop) as signals,
        signals.in_steps(),
        view,
    ):
        run_lifecycle(lifecycle, transport, view, stop)
    return ClusterOutcome(lifecycle.code, lifecycle.verdict)
