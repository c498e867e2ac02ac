"""One rank of a cluster run, in a process that outlives attempts. It sends its progress to the driver.

Every method returns quickly; training runs in a thread. Does not call Ray. When a rank is lost, this process leaves the
attempt and stays warm for the next one: it keeps the model in memory and all captured graphs.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollgraph.cluster.messages import AttemptEnded, DisplayCall, News, NewsBox, Outcome, StepTaken
from rollgraph.config import Config
from rollgraph.errors import user_line
from rollgraph.log import ProgressDisplay
from rollgraph.log.streams import write_to_stderr
from rollgraph.parallel.data.together import FailedElsewhere
from rollgraph.parallel.ranks.failures import ExitCode, LossReport, RankLost, StoppedInSetup, is_user_error
from rollgraph.parallel.ranks.join import Attempt, join, leave, own_store
from rollgraph.parallel.ranks.stop import StopRequest
from rollgraph.parallel.ranks.world import World
from rollgraph.run.setup import WarmWorker
from rollgraph.train import train

# -- the progress display --------------------------------------------------------------------------
# A rank calls it very often while it computes, so this is also where it notices that its attempt was aborted.


class RemoteDisplay(ProgressDisplay):
    """Sends rank 0's progress to the driver. `check` runs on every rank and raises if the attempt was aborted."""

    def __init__(self, news_box: NewsBox, *, shows: bool, check: Callable[[], None]) -> None:
        self._news_box = news_box
        self._shows = shows
        self._raise_if_aborted = check

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        self._raise_if_aborted()
        if self._shows:
            self._news_box.show_progress(DisplayCall("phase", (name, done, total, detail), {"in_bytes": in_bytes}))

    def end_phase(self) -> None:
        self._show("end_phase")

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        plain = {name: float(value) for name, value in values.items()}
        self._show("step", step, plain, dict(seconds_by_phase))

    def samples(self, cells: Sequence[str]) -> None:
        self._show("samples", list(cells))

    def note(self, text: str) -> None:
        self._show("note", text)

    def show_last_lines(self, lines: Sequence[str]) -> None:
        self._show("show_last_lines", list(lines))

    def _show(self, method: str, *arguments: object) -> None:
        if self._shows:
            self._news_box.put(DisplayCall(method, arguments))


# -- the worker ------------------------------------------------------------------------------------

_COLLECTIVES_TIMEOUT = 15.0  # seconds for collectives to end: the driver kills a peer that hangs
_POLL_TIMEOUT = 0.5  # seconds after which a worker answers even without news


@dataclass(frozen=True)
class RankIdentity:
    """The rank of a worker, and its device."""

    rank: int
    size: int
    local_rank: int
    device: str
    run: str  # hexadecimal, unique to this run


class RankWorker:
    """One rank of a cluster run. It takes part in one attempt after another."""

    def __init__(self, config: Config, identity: RankIdentity, folder: str | None) -> None:
        if folder is not None and os.path.isdir(folder):
            os.chdir(folder)
        self._config = config
        self._identity = identity
        self._news_box = NewsBox()
        self._warm_worker = WarmWorker(identity.run)
        self._store: Any = None  # of the current attempt, on rank 0
        self._attempt = 0
        self._abort_reason: LossReport | None = None  # set by the driver: leave the current attempt
        self._is_joining = False
        self._world: World | None = None  # of the current attempt, from joining it to leaving it
        self._stop = StopRequest()
        self._node = socket.gethostname()

    # -- calls of the driver -----------------------------------------------------------------------

    def open_store(self, host: str) -> str:
        """Open a store for the rendezvous of an attempt, and return its address. It replaces the previous one."""
        timeout = timedelta(seconds=self._config.ranks.timeout)
        os.environ["MASTER_ADDR"] = host
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return f"{host}:{self._store.port}"

    def start_attempt(self, attempt: int, address: str, node: str) -> None:
        """Start an attempt in a thread. Its end is reported by `news`."""
        self._attempt = attempt
        self._node = node
        self._abort_reason = None
        self._is_joining = True
        self._stop = StopRequest()
        threading.Thread(target=self._run, args=(attempt, address), name="rollgraph-train", daemon=True).start()

    def abort_attempt(self, attempt: int, reason: str, lost_rank: int | None) -> None:
        """Leave an attempt that lost a rank."""
        if attempt != self._attempt:
            return
        self._abort_reason = LossReport(lost_rank, reason)
        if self._is_joining:  # joining waits for the lost rank and cannot be interrupted
            os._exit(ExitCode.RANK_LOST)
        world = self._world
        if world is not None and world.liveness is not None and lost_rank not in (None, self._identity.rank):
            world.liveness.report_lost(lost_rank, reason)

    def stop(self) -> None:
        self._stop.request("the driver")

    def news(self) -> list[News]:
        """Everything that happened since the last call; waits briefly if nothing has."""
        return self._news_box.take(_POLL_TIMEOUT)

    # -- an attempt --------------------------------------------------------------------------------

    def _run(self, number: int, address: str) -> None:
        outcome = self._run_attempt(number, address)
        self._is_joining = False
        self._world = None
        self._news_box.put(AttemptEnded(number, outcome))

    def _run_attempt(self, number: int, address: str) -> Outcome:
        """Join the other ranks, train, and leave. An error becomes the outcome, too."""
        try:
            world = join(self._make_attempt(number, address), self._config.ranks)
        except BaseException as error:
            return _outcome_from_error(error)
        self._world = world
        self._is_joining = False
        display = RemoteDisplay(self._news_box, shows=self._identity.rank == 0, check=self._raise_if_aborted)
        try:
            run = train(
                self._config,
                world,
                stop=self._stop,
                view=display,
                on_step=lambda step, _: self._news_box.put(StepTaken(number, step)),
                warm_worker=self._warm_worker,
            )
            leave(world)
        except BaseException as error:
            leave(world, error)
            if isinstance(error, RankLost) and not self._warm_worker.wait_for_collectives(_COLLECTIVES_TIMEOUT):
                self._warm_worker.discard_policy()  # hung collectives may still write to its memory: build a new one
            return _outcome_from_error(error)
        if run is None:  # an earlier attempt had taken all steps
            return Outcome("finished")
        taken, steps = run.progress.finished_steps, self._config.steps
        if taken < steps:
            return Outcome("stopped", f"stopped after {taken} of {steps} steps, as asked")
        return Outcome("finished")

    def _make_attempt(self, number: int, address: str) -> Attempt:
        identity = self._identity
        store = self._store
        if identity.rank != 0:
            host, _, port = address.rpartition(":")
            timeout = timedelta(seconds=self._config.ranks.timeout)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        return Attempt(
            number - 1,
            identity.rank,
            identity.size,
            identity.local_rank,
            node=self._node,
            store=None if store is None else own_store(store, number),
            device=identity.device,
        )

    def _raise_if_aborted(self) -> None:
        """Raise if the driver aborted this attempt. Called often during computation."""
        if self._abort_reason is not None:
            raise RankLost(self._abort_reason.text, self._abort_reason)


def _outcome_from_error(error: BaseException) -> Outcome:
    """The outcome of an attempt that raised this error."""
    if isinstance(error, torch.AcceleratorError):  # CUDA is unusable in this process
        write_to_stderr(f"rollgraph: {error}\n")
        os._exit(ExitCode.RANK_LOST)
    if isinstance(error, RankLost):
        return Outcome("lost", str(error), lost_rank=error.lost_rank)
    if isinstance(error, FailedElsewhere):
        return Outcome("lost", str(error), lost_rank=error.rank)
    if isinstance(error, StoppedInSetup):
        return Outcome("stopped", str(error))
    text = str(error) or type(error).__name__
    if line := user_line(error):
        text += f" ({line})"
    if isinstance(error, Exception) and is_user_error(error):
        return Outcome("failed", text, ExitCode.REFUSED)
    traceback.print_exception(error)  # Ray forwards it to the driver's terminal
    return Outcome("failed", f"{type(error).__name__}: {text}", ExitCode.FAILED)
