"""On a real engine, rollouts do not take their turns in lockstep, and the order of replies changes no token."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollgraph.inference import Progress, SamplingParams
from rollgraph.policy import PolicyWorker
from rollgraph.policy.generate import TurnGenerator
from rollgraph.rl.environment import MultiTurn
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.types import Prompt, Rollout
from tests.policy.small_worker import make_worker

PROMPTS = [Prompt(id, tokens, "") for id, tokens in enumerate([(1, 2), (3,), (4, 5, 6)])]
LONG_ENOUGH = 120  # seconds; only something that never happens takes as long
REPLY = "\x01\x02"  # two tokens of a model that has only 40


@pytest.fixture(scope="module")
def worker() -> Iterator[PolicyWorker]:
    eager = make_worker(backend="eager", reference=False)
    yield eager
    eager.close()


def generator(worker: PolicyWorker, **options: Any) -> TurnGenerator:
    """About every third token ends a turn."""
    return worker.generator(seed="s", params=SamplingParams(max_tokens=9, stop_ids=tuple(range(13))), **options)


def environment(reply: Callable[..., Any], **options: Any) -> MultiTurn:
    settings = {"samples_per_prompt": 2, "max_turns": 5, "max_tokens": 24, "timeout": LONG_ENOUGH} | options
    return MultiTurn(ByteTokenizer(), reply, **settings)


def at_once(text: str, prompt: Prompt) -> str:
    return REPLY


@pytest.fixture(scope="module")
def expected(worker: PolicyWorker) -> list[Rollout]:
    return environment(at_once).run(generator(worker), PROMPTS)


def test_each_turn_continues_the_tokens_before_it(worker: PolicyWorker, expected: list[Rollout]) -> None:
    """A turn equals that of a separate `generate` with the same tokens and key."""
    turns = 0
    for index, rollout in enumerate(expected):
        for span in rollout.spans:
            tokens = rollout.tokens[span.start : span.end]
            assert rollout.sampled[span.start : span.end] == [span.kind == "turn"] * len(tokens)
            if span.kind == "reply":
                assert tokens == [1, 2]
                continue
            turns += 1
            context = [*rollout.prompt.tokens, *rollout.tokens[: span.start]]
            (alone,) = generator(worker)([(context, rollout.prompt.id * 2 + index % 2)])
            assert tokens == alone.tokens[: len(tokens)]
            assert rollout.logprobs[span.start : span.end] == alone.logprobs[: len(tokens)]
        assert [span.start for span in rollout.spans[1:]] == [span.end for span in rollout.spans[:-1]]
        assert rollout.spans[-1].end == len(rollout.tokens)
    assert turns > 2 * len(expected)


def test_a_rollout_takes_all_its_turns_while_the_reply_of_another_is_pending(
    worker: PolicyWorker, expected: list[Rollout]
) -> None:
    """In lockstep, the first reply would wait for turns that wait for it."""
    replies: Counter[int] = Counter()
    turns = Counter(rollout.prompt.id for rollout in expected for span in rollout.spans if span.kind == "turn")
    several = threading.Event()
    assert turns[1] >= 4

    def reply(text: str, prompt: Prompt) -> str:
        replies[prompt.id] += 1
        if prompt.id == 0:
            assert several.wait(LONG_ENOUGH), "no other rollout continued meanwhile"
        if prompt.id == 1 and replies[1] >= 3:
            several.set()
        return REPLY

    assert environment(reply).run(generator(worker), PROMPTS) == expected


def test_the_order_of_replies_does_not_matter(worker: PolicyWorker, expected: list[Rollout]) -> None:
    """Async replies come as late as possible: none before every rollout has asked for one or ended."""
    pending: list[asyncio.Future[str]] = []

    async def reply(text: str, prompt: Prompt) -> str:
        pending.append(asyncio.get_running_loop().create_future())
        future = pending[-1]
        if len(pending) == ended_first.count("stop"):
            for earlier in reversed(pending):
                earlier.set_result(REPLY)
            del pending[:]
            ended_first[:] = ["stop"]  # from now on, replies come at once
        return await future

    turns = generator(worker)([([*r.prompt.tokens], r.prompt.id * 2 + i % 2) for i, r in enumerate(expected)])
    ended_first = [turn.finish_reason for turn in turns]
    assert ended_first.count("stop") > 1
    assert environment(reply).run(generator(worker), PROMPTS) == expected


def test_a_reply_that_hangs_or_raises_ends_only_its_rollout(worker: PolicyWorker, expected: list[Rollout]) -> None:
    never = threading.Event()

    def reply(text: str, prompt: Prompt) -> str:
        if prompt.id == 0:
            never.wait()
        raise OSError("no disk")

    hung = environment(reply, timeout=0.05, samples_per_prompt=1)
    (rollout,) = hung.run(generator(worker), PROMPTS[:1])
    assert rollout.finish_reason == "error"
    assert rollout.tokens == expected[0].tokens[: expected[0].spans[0].end]
    assert hung.failures == {"ReplyTimeout": 1}
    assert hung.unread() == ["ReplyTimeout: reply took longer than 0.05 s"]
    hung.hear({"ReplyTimeout": "of another rank", "OSError": "on another rank"})
    assert hung.unread() == ["OSError: on another rank"]
    assert hung.unread() == []
    never.set()

    def raise_for_prompt_1(text: str, prompt: Prompt) -> str:
        return reply(text, prompt) if prompt.id == 1 else REPLY

    raises = environment(raise_for_prompt_1)
    rollouts = raises.run(generator(worker), PROMPTS)
    assert [r for r in rollouts if r.prompt.id != 1] == [r for r in expected if r.prompt.id != 1]
    assert {r.finish_reason for r in rollouts if r.prompt.id == 1} == {"error"}
    assert raises.failures == {"OSError": 2}


def test_an_error_in_the_environment_leaves_the_engine_clean(worker: PolicyWorker, expected: list[Rollout]) -> None:
    def interrupt(text: str, prompt: Prompt) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment(interrupt).run(generator(worker), PROMPTS)
    assert worker.phases.current == "idle"
    reports: list[Progress] = []
    assert environment(at_once).run(generator(worker, on_progress=reports.append), PROMPTS) == expected
    turns = sum(span.kind == "turn" for rollout in expected for span in rollout.spans)
    assert reports[-1].finished == turns
    # A turn that exceeds the limit of its rollout is cut.
    assert reports[-1].tokens >= sum(sum(rollout.sampled) for rollout in expected)


def test_a_session_refuses_what_the_engine_refuses(worker: PolicyWorker) -> None:
    with generator(worker).session() as session:
        with pytest.raises(ValueError, match="a prompt of 1 tokens cannot be continued: token 40 is not in"):
            session.submit([40], 0)
        session.submit([1], 0)
        with pytest.raises(ValueError, match="the sample with key 0 has a turn that is not finished"):
            session.submit([1], 0)
        assert session.busy
    assert worker.phases.current == "idle"
