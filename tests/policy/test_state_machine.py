"""Any order of calls, changes and failures on three ranks gives the bits of a plain model, and leaks no hook.

A small model of which transitions are allowed draws a script of them from a seed. A plain replicated model, with plain
AdamW and sums in the order of ranks, runs it first. Then three simulated ranks run it through hooks, buckets, slots and
phases, and must agree with the plain model bit for bit.

    ROLLGRAPH_TRANSITIONS=20000 ROLLGRAPH_SEED=7 python -m pytest tests/policy/test_state_machine.py

chooses how many transitions to run and which. A failure reports its seed and the transitions that led to it.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.lockstep import Room, run_ranks
from tests.policy.state_machine_model import (
    RANKS,
)
from tests.policy.state_machine_plain import Plain
from tests.policy.state_machine_rank import Rank
from tests.policy.state_machine_script import Script

EPISODE = 250  # transitions between two fresh models


def follow_as_rank(rank: int, room: Room, script: Script, expected: list[Any], folder: Path) -> Counter[str]:
    return Rank(script, expected, rank, room, folder).follow()


def run_machine(transitions: int, seed: int, folder: Path) -> Counter[str]:
    """Run scripts until there were at least `transitions` transitions."""
    done: Counter[str] = Counter()
    while done["transitions"] < transitions:
        script = Script(seed, EPISODE)
        work = partial(follow_as_rank, script=script, expected=Plain(seed).follow(script), folder=folder)
        done.update(run_ranks(RANKS, work)[0])
        done["transitions"] += len(script.transitions)
        seed += 1
    return done


DEFAULT = 2_500
SEED = int(os.environ.get("ROLLGRAPH_SEED", 0))


def transition_count(default: int) -> int:
    return int(os.environ.get("ROLLGRAPH_TRANSITIONS", default))


@pytest.mark.slow
def test_any_order_of_transitions_gives_the_bits_of_a_plain_model(tmp_path: Path) -> None:
    done = run_machine(transition_count(DEFAULT), SEED, tmp_path)
    if done["transitions"] >= DEFAULT:
        kinds = {name.removeprefix("do_") for name in dir(Rank) if name.startswith("do_")}
        kinds |= {"a collective that failed", "a gradient that came late"}
        assert not kinds - set(done), f"never drawn: {kinds - set(done)}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_transitions(tmp_path: Path) -> None:
    run_machine(transition_count(100_000), SEED + 10_000, tmp_path)
