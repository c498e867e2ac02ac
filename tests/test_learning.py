"""It is the rewards that teach: a run whose rewards are shuffled among its completions learns nothing."""

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
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

def shuffled(completions, answer, **columns):
    rewards = right(completions, answer)
    order.shuffle(rewards)  # which leaves their mean, and so that of a validation, as it is
    return rewards

def even(completions, **columns):
    return [sum(b % 2 == 0 for b in c.encode()) / max(1, len(c.encode())) for c in completions]

def shuffled_even(completions, **columns):
    rewards = even(completions)
    order.shuffle(rewards)
    return rewards
"""


def validations(run: Path) -> list[float]:
    """The mean reward of held-out prompts, each time it was looked at."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["validation/reward"] for entry in entries if "validation/reward" in entry]


def test_a_policy_learns_what_is_rewarded_and_nothing_from_shuffled_rewards(folder: Path) -> None:
    """Bytes that are even, by a model of one layer."""
    (folder / "rewards.py").write_text(REWARDS)
    options = ["steps=40", "optimizer={lr: 1e-2, schedule: constant}", "algorithm.options={}", "checkpoint.every=100"]
    options += ["validation={every: 40, max_prompts: 10, samples: 32, temperature: 1.0}", "data.prompts_per_step=8"]
    options += ["rollout.rows=32", "train.token_buckets=[256]"]  # few batches, so that it takes seconds
    found = {}
    for name in ("even", "shuffled_even"):
        given = f"reward.functions=[{{name: '{folder / 'rewards.py'}:{name}'}}]"
        train(config_of(folder, *options, given, f"output={folder / name}"), ONE)
        _, found[name] = validations(folder / name)
    assert found["even"] > 0.9
    assert found["shuffled_even"] < 0.3  # it begins at 0.2


class Quickstart:
    """The quickstart, shortened: one warm start, then runs of GRPO that begin with its weights."""

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
        given = [*self._common, reward, f"output={self._folder / name}", *overrides]
        train(load_config(self._folder / "config.yaml", given), ONE)
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
def test_moments_of_fewer_bits_learn_as_well_as_fp32(quickstart: Quickstart) -> None:
    """Within the noise of seeds: how much runs in fp32 differ, or how much 512 samples of one policy do, if more."""
    found: dict[str, list[float]] = {"fp32": [], "bf16": [], "int8": []}
    for state, runs in found.items():
        for seed in range(2):
            settings = [f"seed={seed}", f"optimizer.state={state}"]
            runs.append(quickstart.learn(f"{state}_{seed}", "right", *settings))
    mean = statistics.mean(found["fp32"])
    noise = max(max(found["fp32"]) - min(found["fp32"]), 4 * math.sqrt(mean * (1 - mean) / 512))
    for state in ("bf16", "int8"):
        assert min(found[state]) > mean - noise, found
        assert min(found[state]) > quickstart.start + 0.25, found
