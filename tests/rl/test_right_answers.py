"""Which rollouts are right: the best possible reward follows from the weights of the functions."""

from __future__ import annotations

from typing import Any

import pytest

from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout

EXACT = {"name": "exact_match"}
SHORT = {"name": "length", "options": {"limit": 4}}
BOXED = {"name": "regex_format", "options": {"pattern": "^<"}}


def is_right(functions: list[dict[str, Any]], text: str, answer: str | None = "<7>", **settings: Any) -> bool:
    prompt = Prompt(0, (1,), "3+4=", {"answer": answer})
    rollout = Rollout(prompt, [1, 2], [True, True], [0.0, 0.0], text=text, reward=settings.pop("base", 0.0))
    with RewardFunctions(functions, **settings) as rewards:
        rewards.score([rollout])
        return rewards.is_correct(rollout)


@pytest.mark.parametrize("weight", [0.1, 0.9, 1.0, 3.0, 1e-9])
def test_a_single_function_is_right_at_1_with_any_weight(weight: float) -> None:
    assert is_right([{**EXACT, "weight": weight}], "<7>")
    assert not is_right([{**EXACT, "weight": weight}], "<8>")


def test_a_format_alone_is_not_a_right_answer() -> None:
    assert not is_right([EXACT, BOXED], "<8>")
    assert is_right([EXACT, BOXED], "<7>")


def test_weights_may_add_up_to_1_only_roughly() -> None:
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    assert is_right([{**EXACT, "label": label, "weight": weight} for label, weight in weights.items()], "<7>")


@pytest.mark.parametrize("penalty", [{**SHORT, "weight": 0.1}, {**BOXED, "weight": -0.5}])
def test_penalties_do_not_make_an_answer_wrong(penalty: dict[str, Any]) -> None:
    assert is_right([EXACT, penalty], "<7>")
    assert not is_right([EXACT, penalty], "8")


def test_a_function_without_a_reward_for_the_rollout_does_not_count() -> None:
    assert is_right([EXACT, BOXED], "<8>", answer=None)
    assert not is_right([EXACT], "<7>", answer=None)  # nothing says that it is right


def test_penalties_alone_make_nothing_right() -> None:
    assert not is_right([SHORT], "<7>")


def test_the_reward_of_an_environment_counts() -> None:
    assert is_right([], "", base=1.0, includes_environment=True)
    assert not is_right([], "", base=0.5, includes_environment=True)
    assert not is_right([EXACT], "<7>", base=0.0, includes_environment=True)
    assert is_right([{**EXACT, "weight": 0.5}], "<7>", base=1.0, includes_environment=True)
