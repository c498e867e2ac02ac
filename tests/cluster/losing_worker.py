"""A rank worker that is lost at planned moments: killed, stopped, cut off, or lost with its node."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollgraph.cluster.rank_worker import RankIdentity, RankWorker
from rollgraph.config import Config
from rollgraph.parallel.ranks.liveness import Liveness

PLAN = "losses.json"  # beside the output folder: [[rank, phase, entries before the loss, kind of loss], ...]


def read_plan(output: str) -> list[list[Any]]:
    try:
        plan: list[list[Any]] = json.loads((Path(output).parent / PLAN).read_text())
    except FileNotFoundError:
        return []
    return plan


def marks(output: str) -> list[Path]:
    """One file for each loss that has happened."""
    return sorted(Path(output).parent.glob("loss_*"))


class LosingWorker(RankWorker):
    """Loses ranks as planned, one after another, in whichever process has the rank by then."""

    def __init__(self, config: Config, identity: RankIdentity, folder: str | None) -> None:
        super().__init__(config, identity, folder)
        plan = read_plan(config.output)
        counts: Counter[tuple[int, str]] = Counter()
        enter_phase = Liveness.enter_phase

        def enter(liveness: Liveness, phase: str) -> None:
            enter_phase(liveness, phase)
            loss_count = len(marks(config.output))
            if loss_count == len(plan):
                return
            rank, loss_phase, before, how = plan[loss_count]
            if rank == identity.rank and phase == loss_phase:
                counts[loss_count, phase] += 1
                if counts[loss_count, phase] > before:
                    (Path(config.output).parent / f"loss_{loss_count:03}").write_text(f"{os.getpid()} {os.getppid()}")
                    lose(how)

        Liveness.enter_phase = enter  # type: ignore[method-assign]


def lose(how: str) -> None:
    """Lose this process (kill), its node too (node), or only the node, so that nobody reaches the process (cut).

    With `stop`, the process hangs.
    """
    sys.stderr.flush()
    if how in ("node", "cut"):
        os.kill(os.getppid(), signal.SIGKILL)  # the raylet
    if how == "cut":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
