"""A rank of `torchrun` that kills or stops itself in a given phase: `torchrun -m tests.doomed_rank`.

DOOM is a JSON list with an entry for each attempt: the rank, the phase, the number of the entry into that phase, a
delay in seconds, and the signal. Attempts beyond the list are not disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rollgraph.cli import main
from rollgraph.parallel.ranks.failures import LossReport
from rollgraph.parallel.ranks.liveness import Liveness

START = "start"  # not a phase of a run, but before the rank has joined


def doom_of(attempt: int, rank: int) -> dict[str, Any] | None:
    dooms = json.loads(os.environ["DOOM"])
    if attempt < len(dooms) and dooms[attempt]["rank"] == rank:
        doom: dict[str, Any] = dooms[attempt]
        return doom
    return None


leaving = threading.RLock()  # held from the moment that this rank leaves, when the others no longer miss it


def carry_out(doom: dict[str, Any], note: Path) -> None:
    def send_signal() -> None:
        time.sleep(doom["delay"])
        with leaving:
            note.write_text(str(time.time()))
            os.kill(os.getpid(), getattr(signal, doom["how"]))

    if doom["delay"]:
        threading.Thread(target=send_signal, daemon=True).start()
    else:
        send_signal()


def watch(attempt: int, rank: int, notes: Path) -> None:
    """Carry out the doom, and write notes about its time and about when this rank learns of a loss."""
    doom, entries = doom_of(attempt, rank), 0
    killed, known = notes / f"killed{attempt}", notes / f"known{attempt}.{rank}"
    enter, accept, leave = Liveness.enter_phase, Liveness._accept_loss, Liveness.leave

    def enter_phase(self: Liveness, phase: str) -> None:
        nonlocal entries
        enter(self, phase)
        if doom is not None and phase == doom["phase"]:
            entries += 1
            if entries == doom["entry"]:
                carry_out(doom, killed)

    def accept_loss(self: Liveness, report: LossReport, seconds_left: float) -> None:
        if not known.exists() and not report.stopped:  # not the stop by `torchrun`, which may come first
            known.write_text(json.dumps({"at": time.time(), "rank": report.rank, "phase": report.phase}))
        accept(self, report, seconds_left)

    def say_goodbye(self: Liveness, error: BaseException | None = None) -> None:
        leaving.acquire()
        leave(self, error)

    Liveness.leave = say_goodbye  # type: ignore[method-assign]
    Liveness.enter_phase = enter_phase  # type: ignore[method-assign]
    Liveness._accept_loss = accept_loss  # type: ignore[method-assign]
    if doom is not None and doom["phase"] == START:
        carry_out(doom, killed)


if __name__ == "__main__":
    watch(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), Path(os.environ["NOTES"]))
    sys.exit(main(["train", *sys.argv[1:]]))
