"""What reward functions are told about the run, and the metrics that they log themselves."""

from __future__ import annotations

import json
import math

from rollgraph.rl.rewards import TrainerState
from rollgraph.run.setup import Run

LOGGED = "logged/"  # metric: the mean of what functions passed to `log_metric`, by its name


def trainer_state(run: Run) -> TrainerState:
    return TrainerState(
        global_step=run.progress.taken,
        max_steps=run.config.steps,
        epoch=run.inputs.data.epoch,
    )


def share_logged(run: Run) -> dict[str, float]:
    """Metrics of what functions logged on any rank since it was last shared: the mean over all calls."""
    logged = run.inputs.rewards.logged
    values: dict[str, list[float]] = {}
    for text in run.policy.sharded.exchange_text(json.dumps(logged)):
        for name, found in json.loads(text).items():
            values.setdefault(name, []).extend(found)
    logged.clear()
    return {LOGGED + name: math.fsum(found) / len(found) for name, found in values.items()}
