"""Runs learn from their rewards: with rewards shuffled among completions, a run learns nothing."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from rollgraph.commands.init import write_starter
from rollgraph.config import load_config
from rollgraph.train import train
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

REWARDS = """
import random

order = random.Random(0)

def right(completions, answer, **columns):
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]

def shuffled(completions, answer, **columns):
    rewards = right(completions, answer)
    order.shuffle(rewards)  # keeps their mean, and so that of a validation
    return rewards

def even(completions, **columns):
    return [sum(b % 2 == 0 for b in c.encode()) / max(1, len(c.encode())) for c in completions]

def shuffled_even(completions, **columns):
    rewards = even(completions)
    order.shuffle(rewards)
    return rewards
"""


def validations(run: Path) -> list[float]:
    """The mean reward of held-out prompts at each validation."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["validation/reward"] for entry in entries if "validation/reward" in entry]


def test_a_policy_learns_from_rewards_and_not_from_shuffled_ones(folder: Path) -> None:
    """The reward counts even bytes; the model has one layer."""
    (folder / "rewards.py").write_text(REWARDS)
    options = ["steps=40", "optimizer={lr: 1e-2, schedule: constant}", "algorithm.options={}", "checkpoint.every=100"]
    options += ["validation={every: 40, max_prompts: 10, samples: 32, temperature: 1.0}", "data.prompts_per_step=8"]
    options += ["rollout.rows=32", "train.token_buckets=[256]"]  # few batches, to take only seconds
    final_rewards = {}
    for name in ("even", "shuffled_even"):
        reward = f"reward.functions=[{{name: '{folder / 'rewards.py'}:{name}'}}]"
        train(config_of(folder, *options, reward, f"output={folder / name}"), ONE)
        _, final_rewards[name] = validations(folder / name)
    assert final_rewards["even"] > 0.9
    assert final_rewards["shuffled_even"] < 0.3  # it starts at 0.2


class Quickstart:
    """The quickstart, shortened: a warm start, then runs of GRPO that start from its weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        write_starter("quickstart", folder)
        (folder / "rewards.py").write_text(REWARDS)
        files = {"data.train": "train", "data.validation": "held_out", "warm_start.data": "demonstrations"}
        self._common = [f"{key}={folder / 'data' / name}.jsonl" for key, name in files.items()]
        self._common += ["log={progress: none, sinks: [jsonl]}", "checkpoint.export_at_end=false"]
        self._common += ["optimizer.schedule=constant"]
        self.start = self._held_out("warm", "right", "steps=1", "optimizer.lr=0")

    def _held_out(self, name: str, function: str, *overrides: str) -> float:
        reward = f"reward.functions=[{{name: '{self._folder / 'rewards.py'}:{function}'}}]"
        options = [*self._common, reward, f"output={self._folder / name}", *overrides]
        train(load_config(self._folder / "config.yaml", options), ONE)
        return validations(self._folder / name)[-1]

    def learn(self, name: str, function: str, *overrides: str) -> float:
        """The mean reward of held-out prompts after 60 steps."""
        model = f"model={{path: {self._folder / 'warm' / 'reference'}}}"
        return self._held_out(name, function, model, "warm_start=null", "steps=60", "validation.every=60", *overrides)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    return Quickstart(tmp_path_factory.mktemp("quickstart"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_shuffled_rewards_teach_nothing(quickstart: Quickstart) -> None:
    assert quickstart.learn("right", "right") > quickstart.start + 0.25
    assert quickstart.learn("shuffled", "shuffled") < quickstart.start + 0.05


@pytest.mark.slow
@pytest.mark.timeout(3600)  # six runs of a minute or two
def test_bf16_and_int8_optimizer_state_learns_as_well_as_fp32(quickstart: Quickstart) -> None:
    """Within noise: the range of two fp32 runs, or four standard errors of 512 samples, whichever is larger."""
    final_rewards: dict[str, list[float]] = {"fp32": [], "bf16": [], "int8": []}
    for state, runs in final_rewards.items():
        for seed in range(2):
            settings = [f"seed={seed}", f"optimizer.state={state}"]
            runs.append(quickstart.learn(f"{state}_{seed}", "right", *settings))
    mean = statistics.mean(final_rewards["fp32"])
    noise = max(max(final_rewards["fp32"]) - min(final_rewards["fp32"]), 4 * math.sqrt(mean * (1 - mean) / 512))
    for state in ("bf16", "int8"):
        assert min(final_rewards[state]) > mean - noise, final_rewards
        assert min(final_rewards[state]) > quickstart.start + 0.25, final_rewards
