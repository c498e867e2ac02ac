"""The loop on a GPU: the same runs as in `test_train.py`, with CUDA graphs and in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollgraph.distributed.world import World
from rollgraph.train import train
from tests.test_train import config_of, folder, metrics_of, weights_of

__all__ = ["folder"]  # the fixture
pytestmark = pytest.mark.gpu

GPU = World(0, 1, "cuda:0")
ON_A_GPU = (
    "model.dtype=bfloat16",
    "model.tiny={layers: 2, width: 32, heads: 2, kv_heads: 1, mlp: 64, max_length: 16}",
    "memory.cache_gib=0.01",
    "steps=6",
)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_run_captures_nothing_after_warm_up_and_is_consistent(folder: Path, place: str) -> None:
    run = train(config_of(folder, *ON_A_GPU, f"memory.reference={place}", "algorithm.minibatches=1"), GPU)
    values = metrics_of(folder / "run")
    assert [entry["step"] for entry in values] == [0, 1, 2, 3, 4, 5]
    assert values[0]["kl"] == pytest.approx(0.0, abs=1e-4)  # the reference is scored in other buckets than it trains in
    assert all(entry["token_mult_prob_error"] < 1.1 for entry in values)
    assert values[-1]["reward"] > values[0]["reward"]
    report = json.loads((folder / "run" / "graphs.json").read_text())
    assert {graph["backend"] for graph in report["graphs"]} == {"cuda"}
    assert all(graph["captures"] == 1 and not graph["eager_runs"] for graph in report["graphs"])
    assert not run.policy.sharded.hooks.modules


def test_a_resumed_run_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels add in any order, so what follows is compared by its direction, and what was saved bit for bit."""
    halves = config_of(folder, *ON_A_GPU, f"output={folder / 'halves'}", "checkpoint.keep_last=9")
    monkeypatch.setenv("STOP_AT", "3")
    train(halves, GPU)
    stopped = metrics_of(folder / "halves")[-1]["step"]
    assert stopped < 5
    saved = weights_of(folder / "halves", stopped)
    monkeypatch.delenv("STOP_AT")
    resumed = train(halves, GPU)
    assert [entry["step"] for entry in metrics_of(folder / "halves")] == [0, 1, 2, 3, 4, 5]
    still = weights_of(folder / "halves", stopped)
    assert all(torch.equal(saved[name], still[name]) for name in saved)
    train(config_of(folder, *ON_A_GPU), GPU)
    whole, halved = metrics_of(folder / "run"), metrics_of(folder / "halves")
    for one, other in zip(whole, halved, strict=True):
        assert one["lr"] == other["lr"]
        assert one["reward"] == pytest.approx(other["reward"], abs=0.25)
    assert resumed.policy.pool.report().eager_runs == 0
