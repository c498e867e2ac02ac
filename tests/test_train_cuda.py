"""Runs of `test_train.py` on a GPU, with CUDA graphs and in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollgraph.parallel.ranks.world import World
from rollgraph.train import train
from tests.test_train import assert_same_weights, config_of, folder, kill_at_random_moments, metrics_of

__all__ = ["folder"]  # the fixture
pytestmark = pytest.mark.gpu

GPU = World(0, 1, "cuda:0")
ON_A_GPU = (
    "model.dtype=bfloat16",
    "model.tiny={layers: 2, width: 32, heads: 2, kv_heads: 1, mlp: 64, max_length: 16}",
    "memory.cache_gib=0.01",
    "steps=6",
)


@pytest.mark.parametrize("reference_location", ["device", "host"])
def test_a_run_is_exact_and_captures_each_graph_once(folder: Path, reference_location: str) -> None:
    run = train(config_of(folder, *ON_A_GPU, f"memory.reference={reference_location}", "algorithm.minibatches=1"), GPU)
    values = metrics_of(folder / "run")
    assert [entry["step"] for entry in values] == [0, 1, 2, 3, 4, 5]
    assert values[0]["policy/kl"] == 0.0  # exact, though scored in other buckets than training
    for entry in values:
        assert entry["policy/token_mult_prob_error"] == 1.0
        assert entry["policy/token_mult_prob_error_max"] == 1.0
    assert values[-1]["reward"] > values[0]["reward"]
    report = json.loads((folder / "run" / "graphs.json").read_text())
    assert {graph["backend"] for graph in report["graphs"]} == {"cuda"}
    assert all(graph["captures"] == 1 and not graph["eager_runs"] for graph in report["graphs"])
    assert not run.policy.sharded.hooks.modules


def test_a_resumed_run_is_the_same_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sums have a fixed order, also in the backward, so a GPU gives the same bits twice."""
    halves = config_of(folder, *ON_A_GPU, f"output={folder / 'halves'}", "checkpoint.keep_last=9")
    monkeypatch.setenv("STOP_AT", "3")
    train(halves, GPU)
    assert metrics_of(folder / "halves")[-1]["step"] < 5
    monkeypatch.delenv("STOP_AT")
    resumed = train(halves, GPU)
    train(config_of(folder, *ON_A_GPU), GPU)
    assert_same_weights(folder / "run", folder / "halves", step=5)
    for first, second in zip(metrics_of(folder / "run"), metrics_of(folder / "halves"), strict=True):
        for name in ("step", "reward", "loss", "optimizer/grad_norm", "policy/kl", "optimizer/lr"):
            assert first[name] == second[name]
    assert resumed.policy.pool.report().eager_runs == 0


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_supervised_training_captures_no_generation(folder: Path, name: str) -> None:
    rows = [{"prompt": f"{i}?", "completion": "yes", "chosen": "yes", "rejected": "no"} for i in range(8)]
    (folder / "written.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"data.{key}={folder / 'written.jsonl'}" for key in ("train", "validation")]
    options = [f"algorithm={{name: {name}}}", "reward.functions=[]", "data.max_prompt_tokens=null"]
    run = train(config_of(folder, *ON_A_GPU, *files, *options), GPU)
    assert run is not None
    assert run.policy.engine is None
    values = metrics_of(folder / "run")
    assert values[-1]["validation/loss"] < values[0]["loss"]
    report = json.loads((folder / "run" / "graphs.json").read_text())
    assert {graph["name"].split()[0] for graph in report["graphs"]} == {"score", "train"}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1800)
def test_ten_kills_at_random_moments_change_nothing(folder: Path) -> None:
    options = [*ON_A_GPU[:-1], "steps=250", "checkpoint.every=1", "validation.every=100"]
    train(config_of(folder, *options), GPU)
    kill_at_random_moments(folder, 10, *options)
    assert_same_weights(folder / "run", folder / "killed", step=249)
