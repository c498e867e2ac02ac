"""Rewards that are Python functions: called here, sent to workers, or refused with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollgraph import Trainer
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.rewards.loading import RewardSpec
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout

SOURCE = Path(__file__).parents[2] / "src"


def rollout(text: str = "abc") -> Rollout:
    return Rollout(Prompt(0, (1,), "?", {"answer": "abc"}), [1, 2], [True] * 2, [0.0] * 2, text)


def score(*specs: Any, workers: int = 0) -> dict[str, float]:
    sample = rollout()
    with RewardFunctions(specs, workers=workers) as rewards:
        rewards.check_columns(["answer"])
        rewards.score([sample])
        assert not rewards.failures, rewards.messages
    return sample.rewards


def test_a_function_may_have_a_name_a_weight_and_options() -> None:
    sample = rollout()

    async def later(completions: list[str], **columns: Any) -> list[float]:
        return [2.0] * len(completions)

    specs = [
        {"name": "exact", "function": lambda completions, answer, **_: [float(completions == answer)], "weight": 0.5},
        RewardSpec("later", function=later, label="judge"),
        {"name": "times", "function": lambda completions, factor: [factor], "options": {"factor": 3}},
    ]
    with RewardFunctions(specs) as rewards:
        rewards.score([sample])
    assert sample.rewards == {"exact": 1.0, "judge": 2.0, "times": 3.0}
    assert sample.reward == 0.5 + 2.0 + 3.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"function": len}, r"functions\[0\]\.name: a reward needs a name"),
        ({"name": "x", "function": 5}, r"functions\[0\]\.function: reward 'x' is 5, not a function"),
        ({"name": "x", "function": lambda prompts: []}, r"has the signature \(prompts\)"),
        ({"name": "x", "functoin": len}, "did you mean 'function'"),
    ],
)
def test_invalid_entries_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        RewardFunctions([entry])


MODULE = """
class Judge:
    def __init__(self, value):
        self.value = value
    def __call__(self, completions, **columns):
        return [self.value] * len(completions)
    def method(self, completions, answer):
        return [self.value + 1] * len(completions)

def exact(completions, answer, bonus=0.0, **columns):
    return [float(c == a) + bonus for c, a in zip(completions, answer)]

async def later(completions, **columns):
    return [7.0] * len(completions)

def make():
    def inner(completions, **columns):
        return [9.0] * len(completions)
    return inner
"""


def test_functions_of_a_module_travel_to_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "travelling_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = __import__("travelling_rewards")
    specs = [
        {"name": "exact", "function": module.exact, "options": {"bonus": 1.0}},
        {"name": "partial", "function": partial(module.exact, bonus=2.0)},
        {"name": "object", "function": module.Judge(5.0)},
        {"name": "method", "function": module.Judge(5.0).method},
        {"name": "later", "function": module.later},
        "exact_match",
    ]
    found = score(*specs, workers=1)
    assert found == {"exact": 2.0, "partial": 3.0, "object": 5.0, "method": 6.0, "later": 7.0, "exact_match": 1.0}


def test_a_module_that_workers_cannot_import_is_refused(tmp_path: Path) -> None:
    """It is loaded here, but a worker could not import it by its name."""
    (tmp_path / "apart.py").write_text(MODULE)
    apart = load_object(f"{tmp_path / 'apart.py'}:exact")
    with pytest.raises(LoadError) as caught:
        RewardFunctions([{"name": "exact", "function": apart}], workers=1)
    assert caught.value.argument == "functions[0]"
    assert caught.value.alternative == ("workers", 0)
    message = str(caught.value)
    assert "reward 'exact' cannot be sent to reward workers: it is defined in the module apart_" in message
    assert message.endswith("; move the function into a module that can be imported, or set workers=0")
    assert score({"name": "exact", "function": apart}) == {"exact": 1.0}


SCRIPT = """
import sys
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout

bonus = 0.25

def helper(text):
    return len(text) + bonus

def mine(completions, **columns):
    return [helper(text) for text in completions]

class Judge:
    def __call__(self, completions, **columns):
        return [8.0] * len(completions)

sample = Rollout(Prompt(0, (1,), "?"), [1], [True], [0.0], "abc")
functions = [
    {"name": "mine", "function": mine},
    {"name": "judge", "function": Judge()},
    {"name": "inline", "function": lambda completions, **columns: [bonus]},
]
with RewardFunctions(functions, workers=int(sys.argv[1])) as rewards:
    rewards.score([sample])
    print(sample.rewards, dict(rewards.messages))
"""
SCORES = "{'mine': 3.25, 'judge': 8.0, 'inline': 0.25} {}\n"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_functions_of_a_script_travel_to_workers(tmp_path: Path, workers: str) -> None:
    (tmp_path / "train_mine.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "train_mine.py", workers]
    script = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert script.stdout == SCORES, script.stderr


def test_functions_inside_functions_travel_to_workers() -> None:
    bonus = 0.5

    def inner(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 + bonus] * len(completions)

    assert score({"name": "inner", "function": inner}, workers=1) == {"inner": 1.5}
    made: dict[str, Any] = {}
    exec("def made(completions): return [2.0] * len(completions)", made)  # a function of no module
    assert score({"name": "made", "function": made["made"]}, workers=1) == {"made": 2.0}
    lock = threading.Lock()

    def locked(completions: list[str], **columns: Any) -> list[float]:
        with lock:
            return [1.0] * len(completions)

    with pytest.raises(LoadError, match=r"'locked' cannot be sent .*: cloudpickle cannot pickle it .*lock.*; move"):
        score({"name": "locked", "function": locked}, workers=1)
    assert score({"name": "locked", "function": locked}) == {"locked": 1.0}


def test_a_run_refuses_unsendable_functions_and_names_its_own_keys(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(completions: list[str]) -> list[float]:
        with lock:
            return []

    rows = [{"prompt": "1", "answer": "1"}]
    tiny = {"tiny": {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "mlp": 8, "max_length": 16}}
    trainer = Trainer(tiny, rows, rewards=locked, reward_workers=1, max_tokens=3, output=tmp_path, progress="none")
    with pytest.raises(LoadError, match=r"^reward\.functions\[0\]: .*, or set reward\.workers=0$"):
        trainer.train(steps=1)
