"""Adapters learn what all weights learn."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from rollgraph.commands.init import write_starter
from rollgraph.config import load_config
from rollgraph.train import train
from tests.test_learning import validations
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

SEEDS = (1, 2, 3)


def test_adapters_learn_what_is_rewarded(folder: Path) -> None:
    """Bytes that are even, by adapters of a random model with one layer: of its samples, a fifth are right."""
    options = ["steps=30", "optimizer={lr: 2e-2, schedule: constant}", "algorithm.options={}", "checkpoint.every=100"]
    options += ["validation={every: 30, max_prompts: 10, samples: 32, temperature: 1.0}", "data.prompts_per_step=8"]
    options += ["rollout.rows=32", "train.token_buckets=[256]", "adapter={rank: 8, alpha: 16}"]
    train(config_of(folder, *options, "graph.impl=none"), ONE)
    before, after = validations(folder / "run")
    assert before < 0.3
    assert after > 0.6  # the mean of 320 samples: more than ten standard errors above


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_adapters_learn_the_quickstart_as_all_weights_do(tmp_path: Path) -> None:
    """GRPO of the quickstart, after a warm start that goes on until the model knows what its demonstrations teach.

    Adapters change projections only, so they need a base whose embedding has learned what digits are, as that of any
    pretrained model has. Rates are those that are best for each.
    """
    write_starter("quickstart", tmp_path)
    files = {"data.train": "train", "data.validation": "held_out", "warm_start.data": "demonstrations"}
    common = [f"{key}={tmp_path / 'data' / name}.jsonl" for key, name in files.items()]
    common += [f"reward.functions=[{{name: '{tmp_path / 'rewards.py'}:exact'}}]", "optimizer.schedule=constant"]
    common += ["log={progress: none, sinks: [jsonl]}", "checkpoint.export_at_end=false"]

    def held_out(name: str, *overrides: str) -> float:
        train(load_config(tmp_path / "config.yaml", [*common, f"output={tmp_path / name}", *overrides]), ONE)
        return validations(tmp_path / name)[-1]

    warm = ["warm_start.stop_at=0.315", "warm_start.steps=8000"]
    start = held_out("warm", *warm, "steps=1", "optimizer.lr=0")
    again = [f"model={{path: {tmp_path / 'warm' / 'reference'}}}", "warm_start=null", "steps=60", "validation.every=60"]
    ways = {"all": ["optimizer.lr=5e-4"], "adapters": ["optimizer.lr=5e-3", "adapter={rank: 32, alpha: 32}"]}
    found = {way: [held_out(f"{way}{seed}", *again, *ways[way], f"seed={seed}") for seed in SEEDS] for way in ways}
    noise = max(max(values) - min(values) for values in found.values())
    assert min(found["adapters"]) > start + 0.25
    assert abs(mean(found["adapters"]) - mean(found["all"])) <= noise
