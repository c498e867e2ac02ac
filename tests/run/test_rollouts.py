"""Rollouts are kept or dropped before they are scored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollgraph.policy import PolicyWorker
from rollgraph.train import train
from rollgraph.types import Rollout
from tests.test_train import ONE, folder, metrics_of, sparse_config

__all__ = ["folder"]


def test_only_kept_groups_are_scored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    original = PolicyWorker.score

    def score(self: PolicyWorker, rollouts: Sequence[Rollout], weights: str = "reference") -> None:
        scored.append(sum(len(rollout.prompt.tokens) + len(rollout.tokens) for rollout in rollouts))
        groups: dict[int, set[float]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, set()).add(rollout.reward)
        assert all(len(rewards) > 1 for rewards in groups.values()), "scored a group whose rewards are all equal"
        original(self, rollouts, weights)

    monkeypatch.setattr(PolicyWorker, "score", score)
    train(sparse_config(folder, "graph.impl=none"), ONE)
    metrics = metrics_of(folder / "run")
    assert sum(values["groups/dropped"] for values in metrics) > 0
    assert sum(values["tokens/score"] for values in metrics) == sum(scored)
