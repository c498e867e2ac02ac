"""The migration pages name existing keys, and their code works."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rollgraph.config import list_keys
from rollgraph.rl.algorithms import ALGORITHMS, settings_of
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout
from tools.migration_table import PAGES, rows_of

DOCS = Path(__file__).parents[1] / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def known_keys() -> set[str]:
    known = {key.name for key in list_keys()}
    for make in ALGORITHMS.values():
        known |= {f"algorithm.options.{name}" for name in settings_of(make)}
    return known


@pytest.mark.parametrize(
    ("framework", "minimum"),
    [("GRPOTrainer", 14), ("GRPOConfig", 191), ("Hugging Face", 50), ("verl", 100), ("NeMo-RL", 50)],
)
def test_the_tables_name_existing_keys(framework: str, minimum: int) -> None:
    rows = [row for page in PAGES for row in rows_of(page) if row[0] == framework]
    assert len(rows) >= minimum
    mapped_keys = {key for _, _, ours, _ in rows for key in ours.split()}
    assert mapped_keys - known_keys() == set()
    assert [name for _, name, ours, remark in rows if not (ours or remark)] == []


def test_keys_in_the_prose_about_trl_exist() -> None:
    """Names of TRL have no dots."""
    sections = "|".join(sorted({key.name for key in list_keys() if "." not in key.name}))
    prose = re.sub(r"```.*?```", "", text_of(PAGES[0]), flags=re.DOTALL)
    mentioned = {name.partition(":")[0] for name in re.findall(rf"`((?:{sections})\.[^`]*)`", prose)}
    assert len(mentioned) > 40
    assert mentioned - known_keys() == set()


def code_with(page: str, text: str) -> dict[str, Any]:
    """The names defined by the Python block of a page that contains `text`."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL) if text in block]
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def score(function: Any, columns: dict[str, Any]) -> Rollout:
    prompt = Prompt(0, (1,), "?", columns, [{"role": "user", "content": "?"}])
    rollout = Rollout(prompt, [1], [True], [0.0], " 42")
    with RewardFunctions([{"name": "it", "function": function}]) as rewards:
        rewards.check_columns(columns)
        rewards.score([rollout])
        assert not rewards.failures, rewards.messages
    return rollout


def test_the_documented_reward_function_works() -> None:
    assert score(code_with(PAGES[0], "def exact")["exact"], {"answer": "42"}).reward == 1.0


def test_the_adapter_for_compute_score_of_verl_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        return {"score": float(solution_str.strip() == ground_truth), "source": data_source, "extra": extra_info}

    module = types.ModuleType("my_score")
    monkeypatch.setattr(module, "compute_score", compute_score, raising=False)
    monkeypatch.setitem(sys.modules, "my_score", module)
    adapter = code_with(PAGES[1], "compute_score")["score"]
    columns = {"data_source": "sums", "reward_model": {"ground_truth": "42", "style": "rule"}}
    rollout = score(adapter, columns)
    assert rollout.reward == 1.0
    assert rollout.extra == {"compute_score": {"score": 1.0, "source": "sums", "extra": {}}}
    assert score(adapter, {**columns, "extra_info": {"index": 3}}).extra["compute_score"]["extra"] == {"index": 3}
