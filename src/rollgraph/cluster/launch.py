"""`cluster.engine: ray`: a run whose ranks are placed on a cluster, driven and shown from here."""

from __future__ import annotations

import os
import uuid
from contextlib import closing
from dataclasses import dataclass

from rollgraph.cluster.driver import drive
from rollgraph.cluster.lifecycle import Lifecycle, Patience
from rollgraph.cluster.rank_worker import RankWorker
from rollgraph.cluster.ray_package import connected
from rollgraph.cluster.ray_transport import RayTransport
from rollgraph.config import Config
from rollgraph.distributed.exit_codes import ExitCode
from rollgraph.distributed.world import World
from rollgraph.run.stop import StopRequest, StopSignals
from rollgraph.telemetry import View, make_view

_LEAVING_SECONDS = 60.0  # for a rank to notice that another one is lost; more if rewards may take longer


@dataclass(frozen=True)
class Ending:
    """How a run on a cluster ended: its exit code, and what to say about it; nothing if it is finished."""

    code: int
    verdict: str


def train_on_cluster(
    config: Config,
    *,
    stop: StopRequest | None = None,
    view: View | None = None,
    worker: type[RankWorker] = RankWorker,
) -> Ending:
    """Take all steps of a run on a Ray cluster, from its last checkpoint if there is one. Lost ranks are replaced."""
    cluster = config.cluster
    stop = stop or StopRequest()
    view = view or make_view(config.log.progress, config.steps)
    folder = None if cluster.working_dir is not None else os.getcwd()
    patience = Patience(
        silence=config.ranks.heartbeat_timeout, leaving=max(_LEAVING_SECONDS, 2 * config.reward.timeout)
    )
    lifecycle = Lifecycle(cluster.ranks, patience, most=cluster.attempts, gave_up=ExitCode.RANK_LOST)
    with (
        connected(cluster.address, "cluster.engine: ray", cluster.working_dir) as ray,
        closing(RayTransport(ray, config, uuid.uuid4().hex, folder, worker)) as transport,
        StopSignals(World(0, 1, "cpu"), stop) as signals,
        signals.in_steps(),
        view,
    ):
        drive(lifecycle, transport, view, stop)
    return Ending(lifecycle.code, lifecycle.verdict)
