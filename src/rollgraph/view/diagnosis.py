"""What a good engineer would notice about a run, said in sentences with their evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from rollgraph.view.findings.finding import FEWEST, History, RunFinding
from rollgraph.view.findings.lengths import find_length_race, find_truncation
from rollgraph.view.findings.optimizer import find_clipping, find_loss_spikes, find_zero_rate
from rollgraph.view.findings.policy import find_disagreement, find_entropy_collapse, find_kl_runaway
from rollgraph.view.findings.rewards import find_equal_rewards, find_failing_rewards
from rollgraph.view.run_data import RunData

FINDERS: tuple[Callable[[History], Iterator[RunFinding]], ...] = (
    find_equal_rewards,
    find_failing_rewards,
    find_truncation,
    find_length_race,
    find_entropy_collapse,
    find_kl_runaway,
    find_disagreement,
    find_clipping,
    find_loss_spikes,
    find_zero_rate,
)
ORDER = ("problem", "warning", "note", "good")


def diagnose(run: RunData) -> list[dict[str, Any]]:
    """What each check found, what is worst first; empty while there are too few steps to say anything."""
    if len(run.metrics.steps()) < FEWEST:
        return []
    history = History(run.metrics, run.files.config.value, np.unique(run.samples.groups["step"]))
    found = [finding for finder in FINDERS for finding in finder(history)]
    found.sort(key=lambda finding: ORDER.index(finding.severity))
    return [asdict(finding) for finding in found]
