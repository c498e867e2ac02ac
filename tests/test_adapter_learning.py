"""Adapters learn as much as all weights do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import pytest
import torch

from rollgraph.commands.init import write_starter
from rollgraph.config import load_config
from rollgraph.model import Architecture, Decoder, save_model
from rollgraph.train import train
from tests.test_learning import validations
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

SEEDS = (1, 2, 3)


def test_adapters_raise_the_reward(folder: Path) -> None:
    """The reward counts even bytes. The base is random, with one layer and a head that can prefer some bytes."""
    write_base(folder / "base")
    options = [f"model={{path: {folder / 'base'}}}", "tokenizer.path=bytes", "adapter={rank: 8, alpha: 8}"]
    options += ["steps=15", "optimizer={lr: 2e-2, schedule: constant}", "algorithm.options={}", "graph.impl=none"]
    options += ["validation={every: 15, max_prompts: 10, samples: 32, temperature: 1.0}", "data.prompts_per_step=8"]
    train(config_of(folder, *options, "rollout.rows=32", "train.token_buckets=[256]"), ONE)
    before, after = validations(folder / "run")
    assert after > before + 0.15  # ten standard errors of the mean of 320 samples


def write_base(folder: Path) -> None:
    torch.manual_seed(0)
    tiny = Architecture("llama", vocabulary=259, hidden=16, mlp=24, layers=1, heads=2, kv_heads=1, head_dim=8)
    model = Decoder(tiny)
    model.reset_parameters(std=0.1)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    save_model(model, folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_adapters_learn_the_quickstart_as_well_as_all_weights(tmp_path: Path) -> None:
    """GRPO of the quickstart, from a model that can add but writes two thirds of its answers backwards.

    Adapters change only projections, so they need a base whose embedding knows digits, as any pretrained model does. A
    validation of 2,000 samples has a standard error of 0.008, and seeds add as much again.
    """
    write_starter("quickstart", tmp_path)
    demonstrations = write_demonstrations(tmp_path)
    files = {"data.train": "train", "data.validation": "held_out"}
    common = [f"{key}={tmp_path / 'data' / name}.jsonl" for key, name in files.items()]
    common += [f"reward.functions=[{{name: '{tmp_path / 'rewards.py'}:exact'}}]", "optimizer.schedule=constant"]
    common += ["log={progress: none, sinks: [jsonl]}", "checkpoint.export_at_end=false", "validation.max_prompts=2000"]

    def held_out(name: str, *overrides: str) -> float:
        train(load_config(tmp_path / "config.yaml", [*common, f"output={tmp_path / name}", *overrides]), ONE)
        return validations(tmp_path / name)[-1]

    warm = [f"warm_start.data={demonstrations}", "warm_start.stop_at=0.3", "warm_start.steps=3000"]
    start = held_out("warm", *warm, "steps=1", "optimizer.lr=0")
    options = [
        f"model={{path: {tmp_path / 'warm' / 'reference'}}}",
        "warm_start=null",
        "steps=40",
        "validation.every=40",
    ]
    trained_parts = {"all": ["optimizer.lr=5e-4"], "adapters": ["optimizer.lr=2e-3", "adapter={rank: 32, alpha: 32}"]}
    scores = {
        part: [held_out(f"{part}{seed}", *options, *trained_parts[part], f"seed={seed}") for seed in SEEDS]
        for part in trained_parts
    }
    assert min(scores["adapters"]) > start + 0.3
    assert abs(mean(scores["adapters"]) - mean(scores["all"])) < 0.05, scores


def write_demonstrations(folder: Path) -> Path:
    """Right answers, two thirds of them backwards."""
    choose = random.Random(0)
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    lines = []
    for row in choose.choices(rows, k=100_000):
        answer = row["answer"] if choose.random() < 1 / 3 else row["answer"][::-1]
        lines.append(json.dumps({"prompt": row["prompt"], "completion": answer}) + "\n")
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(lines))
    return path
