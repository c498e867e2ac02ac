"""The migration pages name keys that exist, leave no field of TRL out, and their code works."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollgraph.config import list_keys
from rollgraph.rl.algorithms import ALGORITHMS, settings_of
from rollgraph.rl.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("migrating_trl.md", "migrating_verl.md")
QUOTED = re.compile(r"`([^`]+)`")


class Translation(NamedTuple):
    """A row of a table: names elsewhere, keys here, and what else there is to say."""

    theirs: list[str]
    ours: list[str]
    remark: str


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def rows_of(page: str, heading: str) -> list[Translation]:
    """The rows of all tables whose columns are `heading`, rollgraph and a remark."""
    rows = []
    head = rf"^\| {heading} \| rollgraph \| \|\n\|---\|---\|---\|\n"
    for table in re.findall(head + r"((?:\|.*\n)+)", text_of(page), re.MULTILINE):
        for line in table.splitlines():
            theirs, ours, remark = line.strip("|").split("|")
            rows.append(Translation(QUOTED.findall(theirs), QUOTED.findall(ours), remark.strip()))
    return rows


def known_keys() -> set[str]:
    known = {key.name for key in list_keys()}
    for make in ALGORITHMS.values():
        known |= {f"algorithm.options.{name}" for name in settings_of(make)}
    return known


@pytest.mark.parametrize(
    ("page", "heading", "least"),
    [(PAGES[0], "GRPOTrainer", 10), (PAGES[0], "GRPOConfig", 60), (PAGES[1], "verl", 60)],
)
def test_the_tables_name_keys_that_exist(page: str, heading: str, least: int) -> None:
    rows = rows_of(page, heading)
    assert len(rows) >= least
    named = {key for row in rows for key in row.ours}
    assert named - known_keys() == set()
    assert [row.theirs for row in rows if not row.theirs or not (row.ours or row.remark)] == []


def test_keys_in_the_text_about_trl_exist() -> None:
    """TRL's own names have no dots."""
    sections = "|".join(sorted({key.name for key in list_keys() if "." not in key.name}))
    prose = re.sub(r"```.*?```", "", text_of(PAGES[0]), flags=re.DOTALL)
    mentioned = {name.partition(":")[0] for name in re.findall(rf"`((?:{sections})\.[^`]*)`", prose)}
    assert len(mentioned) > 40
    assert mentioned - known_keys() == set()


def test_each_field_of_trl_is_there_once() -> None:
    fields = [name for row in rows_of(PAGES[0], "GRPOConfig") for name in row.theirs]
    assert len(fields) == len(set(fields)) > 180
    config: Any = pytest.importorskip("trl.trainer.grpo_config", exc_type=ImportError)
    assert {field.name for field in dataclasses.fields(config.GRPOConfig)} - set(fields) == set()


def code_with(page: str, text: str) -> dict[str, Any]:
    """What the Python block of a page that contains `text` defines."""
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


def test_the_reward_function_for_both_works() -> None:
    assert score(code_with(PAGES[0], "def exact")["exact"], {"answer": "42"}).reward == 1.0


def test_the_adapter_of_a_score_of_verl_works(monkeypatch: pytest.MonkeyPatch) -> None:
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
