"""It is the rewards that teach: a run whose rewards are shuffled among its completions learns nothing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from rollgraph.config import load_config
from rollgraph.train import train
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

ROOT = Path(__file__).parents[1]
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    """The quickstart, shortened: one warm start, then the same GRPO with rewards and with shuffled ones."""
    runpy.run_path(str(ROOT / "examples" / "arithmetic.py"))["main"](tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    files = {"data.train": "train", "data.validation": "held_out", "warm_start.data": "demonstrations"}
    common = [f"{key}={tmp_path / name}.jsonl" for key, name in files.items()]
    common += ["log={progress: none, sinks: [jsonl]}", "checkpoint.export_at_end=false", "optimizer.schedule=constant"]

    def held_out(name: str, function: str, *overrides: str) -> float:
        reward = f"reward.functions=[{{name: '{tmp_path / 'rewards.py'}:{function}'}}]"
        given = [*common, reward, f"output={tmp_path / name}", *overrides]
        train(load_config(ROOT / "examples" / "quickstart.yaml", given), ONE)
        return validations(tmp_path / name)[-1]

    start = held_out("warm", "right", "steps=1", "optimizer.lr=0")
    again = [f"model={{path: {tmp_path / 'warm' / 'reference'}}}", "warm_start=null", "steps=60", "validation.every=60"]
    learned = held_out("right", "right", *again)
    shuffled = held_out("shuffled", "shuffled", *again)
    assert learned > start + 0.25
    assert shuffled < start + 0.05
