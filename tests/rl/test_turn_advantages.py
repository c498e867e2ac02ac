"""Rewards of turns become advantages of turns, as computed by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollgraph.rl.algorithms.advantages import turn_returns
from rollgraph.types import Prompt, Rollout, Span
from tests.rl.test_algorithms import REWARDED, load, make_rollouts

PROMPT = Prompt(1, (7, 8), "?", {"answer": "1"}, [{"role": "user", "content": "?"}])


def make(rewards: list[float], lengths: list[int], at_end: float = 0.0, **options: Any) -> Rollout:
    """A rollout of turns with these rewards and lengths, one-token replies between them, and a final reward."""
    spans: list[Span] = []
    for reward, length in zip(rewards, lengths, strict=True):
        if spans:
            spans.append(Span(spans[-1].end, spans[-1].end + 1, "reply", "r"))
        start = spans[-1].end if spans else 0
        spans.append(Span(start, start + length, "turn", "t", reward))
    sampled = [span.kind == "turn" for span in spans for _ in range(span.start, span.end)]
    logprobs = [-1.0 if on else 0.0 for on in sampled]
    total = sum(rewards) + at_end
    return Rollout(PROMPT, [5] * len(sampled), sampled, logprobs, reward=total, spans=spans, **options)


TWO = [make([0.25, 1.0], [2, 1]), make([0.5, 0.0, 0.25], [1, 2, 1], at_end=1.0)]


def advantages(rollouts: list[Rollout], **settings: Any) -> list[list[float]]:
    batch = load("grpo", normalize_std=False, **settings).make_batch(rollouts)
    by_rollout = {sample.rollout: list(sample.advantages) for sample in batch.samples}
    return [by_rollout[index] for index in range(len(rollouts))]


def test_by_default_every_turn_has_the_advantage_of_its_rollout() -> None:
    """The rollouts earn 1.25 and 1.75, with a mean of 1.5."""
    assert advantages(TWO) == [[-0.25, -0.25, 0, -0.25], [0.25, 0, 0.25, 0.25, 0, 0.25]]


def test_with_reward_to_go_turns_count_only_later_rewards() -> None:
    """The rollouts earn 1.25 and 1.75 from turn 1 on, 1.0 and 1.25 from turn 2 on, and the second 1.25 in turn 3."""
    assert [turn_returns(rollout, rollout.reward) for rollout in TWO] == [[1.25, 1.0], [1.75, 1.25, 1.25]]
    assert advantages(TWO, reward_to_go=True) == [[-0.25, -0.25, 0, -0.125], [0.25, 0, 0.125, 0.125, 0, 0]]


def test_rollouts_that_are_not_trained_on_have_no_advantage() -> None:
    failed = make([9.0, 9.0], [1, 1], finish_reason="error")
    cut = make([0.0, 0.0], [1, 1], finish_reason="length")
    result = advantages([*TWO, failed], reward_to_go=True)
    assert result == [*advantages(TWO, reward_to_go=True), [0, 0, 0]]
    # A rollout that was cut counts in its group, and is not trained on if it is masked.
    assert advantages([make([1.0, 0.0], [1, 1]), cut], reward_to_go=True, mask_truncated=True) == [
        [0.5, 0, 0],
        [0, 0, 0],
    ]


@pytest.mark.parametrize("name", REWARDED)
def test_reward_to_go_changes_nothing_with_one_turn(name: str) -> None:
    rollouts = make_rollouts(3)
    plain = load(name).make_batch(rollouts, minibatches=2, seed=1)
    assert load(name, reward_to_go=True).make_batch(rollouts, minibatches=2, seed=1) == plain


def test_a_group_with_equal_sums_is_worth_keeping_if_its_turns_differ() -> None:
    group = [make([1.0, 0.0], [1, 1]), make([0.0, 1.0], [1, 1])]
    assert not load("dapo").keeps(group)
    assert load("dapo", reward_to_go=True).keeps(group)
    assert not load("dapo", reward_to_go=True).keeps([group[0], group[0]])


def test_spans_and_messages_survive_json() -> None:
    for rollout in TWO:
        rollout.messages = [{"role": "assistant", "content": "1", "tool_calls": []}]
        restored = Rollout.from_dict(json.loads(json.dumps(rollout.to_dict())))
        assert restored == rollout
        assert restored.spans[0].kind == "turn"
        assert restored.prompt.messages == PROMPT.messages
