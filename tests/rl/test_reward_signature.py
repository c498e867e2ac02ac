"""Reward functions for TRL work here: chats as messages, the trainer's state, logging, and async."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollgraph.rl.data.rows import DataError, make_rows
from rollgraph.rl.rewards import calls
from rollgraph.rl.rewards import workers as reward_workers
from rollgraph.rl.rewards.arguments import STANDARD_ARGUMENTS, RewardLog, TrainerState
from rollgraph.rl.rewards.calls import EventLoop
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.run.rollouts import gather_logged
from rollgraph.train import train
from rollgraph.types import Prompt, Rollout
from tests.test_train import ONE, SMALL, config_of, metrics_of

FUNCTIONS = """
import asyncio, functools, sys, time

def witness(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
    log_extra("seen", [list(each) for each in zip(prompts, completions, completion_ids, answer)])
    log_extra("step", [trainer_state.global_step] * len(prompts))
    log_metric("batch", len(prompts))
    return [1.0] * len(completions)

def of_kind(completions, **kwargs):
    given = sorted(set(kwargs) - {"answer"})
    assert given == ["completion_ids", "log_extra", "log_metric", "prompts", "trainer_state"], given
    return [1.0 if isinstance(c, list) else None for c in completions]

def careless(completions, log_extra, log_metric):
    log_metric("calls", 1.0)
    if len(completions) > 1:
        log_extra("short", [0])
    if completions == ["bad"]:
        log_metric("calls", float("nan"))
    log_extra("kept", [{"object": object}] * len(completions))
    return [1.0] * len(completions)

met = {}
loops = set()

def event(name):
    return met.setdefault(name, asyncio.Event())

async def first(completions, **columns):
    loops.add(asyncio.get_running_loop())
    event("first").set()
    await event("second").wait()
    return [1.0] * len(completions)

async def second(completions, **columns):
    loops.add(asyncio.get_running_loop())
    event("second").set()
    await event("first").wait()
    return [None if text == "none" else float(len(loops)) for text in completions]

async def risky(completions, log_metric, **columns):
    async def leave():
        sys.exit(3)
    if "exit" in completions:
        await asyncio.create_task(leave())
    if "raise" in completions:
        raise RuntimeError("no idea")
    if "cancel" in completions:
        raise asyncio.CancelledError
    log_metric("risky", 1.0)
    return (0.5 for _ in completions)

async def scaled(completions, factor):
    return [factor * len(text) for text in completions]

class Judge:
    async def __call__(self, completions, factor, **columns):
        return [factor] * len(completions)

judge = functools.partial(Judge(), factor=4.0)

async def stuck(completions, **columns):
    await asyncio.Event().wait()

async def stubborn(completions, **columns):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def blocking(completions, **columns):
    while True:
        time.sleep(1)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("signature") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


def rollout(text: str, messages: list[Any] | None = None, answer: str = "a") -> Rollout:
    prompt = Prompt(7, (1, 2), "user: Hi", {"answer": answer}, messages)
    return Rollout(prompt, [5, 6, 99], [True, True, False], [0.0] * 3, text)


HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_get_the_arguments_of_trl(functions: str, workers: int) -> None:
    samples = [rollout("a", HI), rollout("b")]
    specs = [f"{functions}:witness", f"{functions}:of_kind", "exact_match", {"name": "length", "options": {"limit": 4}}]
    with RewardFunctions(specs, workers=workers) as rewards:
        rewards.score(samples, TrainerState(global_step=3, max_steps=9, epoch=0.5))
        assert not rewards.failures, rewards.messages
        assert rewards.logged == {"batch": [2.0]}
    chat, text = samples
    assert chat.extra == {"seen": [HI, [{"role": "assistant", "content": "a"}], [5, 6], "a"], "step": 3}
    assert text.extra == {"seen": ["user: Hi", "b", [5, 6], "a"], "step": 3}  # a chat as messages, text as text
    assert chat.rewards == {"witness": 1.0, "of_kind": 1.0, "exact_match": 1.0, "length": -0.5}
    assert text.rewards == {"witness": 1.0, "exact_match": 0.0, "length": -0.5}


def test_functions_get_all_messages_after_the_prompt(functions: str) -> None:
    sample = rollout("a", HI)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    sample.messages = [call, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "a"}]
    with RewardFunctions([f"{functions}:witness", "exact_match"]) as rewards:
        rewards.score([sample])
    assert sample.extra["seen"] == [HI, sample.messages, [5, 6], "a"]
    assert sample.rewards["exact_match"] == 1.0


def test_chats_are_given_as_text_on_request(functions: str) -> None:
    sample = rollout("a", HI)
    with RewardFunctions([f"{functions}:witness", "exact_match"], chat="text") as rewards:
        rewards.score([sample])
    assert sample.extra["seen"] == ["user: Hi", "a", [5, 6], "a"]
    assert sample.rewards == {"witness": 1.0, "exact_match": 1.0}


def test_the_state_is_frozen_and_argument_names_are_reserved() -> None:
    state = TrainerState(1, 2, 0.5)
    with pytest.raises(AttributeError):
        state.global_step = 0  # type: ignore[misc]
    for name in STANDARD_ARGUMENTS:
        with pytest.raises(DataError, match=f"the column '{name}' has the name of an argument"):
            make_rows([{"prompt": "a", name: 1}])


def test_invalid_logs_are_failures_of_the_call(functions: str) -> None:
    """If a call fails and is repeated for each rollout, only the repeated calls are logged."""
    samples = [rollout("good"), rollout("bad")]
    with RewardFunctions([f"{functions}:careless"], on_failure=-1.0) as rewards:
        rewards.score(samples)
        assert rewards.logged == {"calls": [1.0]}
        assert rewards.messages["raised"].startswith(
            "careless: ValueError: log_metric('calls', ...): expected a finite"
        )
    assert [s.reward for s in samples] == [1.0, -1.0]
    assert [s.extra for s in samples] == [{"kept": {"object": "<class 'object'>"}}, {}]
    with pytest.raises(ValueError, match=r"log_extra\('short', ...\): 1 values for 2 completions"):
        RewardLog(2).log_extra("short", [0])


# Coroutines.


@pytest.mark.parametrize("workers", [0, 1])
def test_async_functions_run_at_the_same_time_in_one_loop(functions: str, workers: int) -> None:
    """`first` and `second` wait for each other. The loop stays the same, so that functions can keep their clients."""
    samples = [rollout("abc"), rollout("none")]
    specs = [
        f"{functions}:first",
        {"name": "regex_format", "options": {"pattern": "b"}},
        f"{functions}:second",
        {"name": f"{functions}:scaled", "options": {"factor": 10}},
        f"{functions}:judge",
    ]
    with RewardFunctions(specs, workers=workers, timeout=60) as rewards:
        for _ in range(2):
            rewards.score(samples)
            assert samples[0].rewards == {"first": 1, "regex_format": 1, "second": 1, "scaled": 30, "judge": 4}
            assert samples[1].rewards == {"first": 1, "regex_format": 0, "scaled": 40, "judge": 4}
        assert not rewards.failures


def test_an_async_function_that_raises_fails_only_its_own_rollouts(functions: str) -> None:
    texts = ["fine", "exit", "raise", "fine"]
    samples = [rollout(text) for text in texts]
    with RewardFunctions([f"{functions}:risky"], on_failure=-1.0) as rewards:
        rewards.score(samples)
        assert [s.reward for s in samples] == [0.5, -1.0, -1.0, 0.5]
        assert rewards.failures == {"raised": 2}
        assert "SystemExit: 3" in rewards.messages["raised"]
        assert rewards.logged == {"risky": [1.0, 1.0]}
        rewards.score([rollout("cancel")])
        assert rewards.failures == {"raised": 3}
        rewards.score(samples[:1])  # the loop has survived
        assert samples[0].reward == 0.5


@pytest.mark.parametrize("workers", [0, 1])
def test_an_async_function_that_takes_too_long_is_a_timeout(functions: str, workers: int) -> None:
    """It is only cancelled: the other functions of its call give rewards, and the worker survives."""
    samples = [rollout("a"), rollout("b")]
    specs = [f"{functions}:stuck", {"name": f"{functions}:scaled", "options": {"factor": 10}}]
    with RewardFunctions(specs, workers=workers, timeout=0.5, on_failure=-1.0) as rewards:
        rewards.score(samples)
        assert [s.rewards for s in samples] == [{"stuck": -1.0, "scaled": 10.0}] * 2
        assert rewards.failures == {"timeout": 2}
        assert rewards.messages["timeout"] == "stuck: no result after 0.5 s"


def test_an_async_function_that_refuses_to_end_does_not_block_the_run(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_CANCEL_SECONDS", 0.05)
    with RewardFunctions([f"{functions}:stubborn"], timeout=0.05) as rewards:
        rewards.score([rollout("a")])
        assert rewards.failures == {"timeout": 1}
        rewards.close()
    rewards.close()


@pytest.mark.slow
def test_an_async_function_that_blocks_its_worker_does_not_affect_others(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_workers, "_GRACE_SECONDS", 2.0)
    samples = [rollout("a")]
    specs = [f"{functions}:blocking", {"name": f"{functions}:scaled", "options": {"factor": 10}}]
    with RewardFunctions(specs, workers=1, timeout=3, on_failure=-1.0) as rewards:
        rewards.score(samples)
        assert samples[0].rewards == {"blocking": -1.0, "scaled": 10.0}
        assert rewards.failures == {"timeout": 1}


def test_async_functions_work_beside_a_running_loop(functions: str) -> None:
    """In a notebook, the main thread always has a running loop."""

    async def cell() -> float:
        sample = rollout("abc")
        with RewardFunctions([{"name": f"{functions}:scaled", "options": {"factor": 10}}]) as rewards:
            rewards.score([sample])
        return sample.reward

    assert asyncio.run(cell()) == 30.0


def test_a_closed_loop_leaves_no_task_behind() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def starts() -> None:
        starts.task = asyncio.create_task(waits())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    loop = EventLoop()
    assert loop.gather([starts()], 60) == [None]
    loop.close()
    assert ended == [True]


# In a run.


def test_metrics_that_functions_log_are_means_over_the_calls_of_all_ranks() -> None:
    logged = {"a": [1.0]}
    text_of_rank_1 = '{"a": [4.0, 4.0], "b": [2.0]}'
    sharded = SimpleNamespace(exchange_text=lambda text: [text, text_of_rank_1])
    run: Any = SimpleNamespace(
        inputs=SimpleNamespace(rewards=SimpleNamespace(logged=logged)),
        policy=SimpleNamespace(sharded=sharded),
    )
    assert gather_logged(run) == {"logged/a": 3.0, "logged/b": 2.0}
    assert logged == {}


IN_A_RUN = """
def even(prompts, completions, trainer_state, log_extra, log_metric, answer):
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    log_metric("step", trainer_state.global_step)
    log_metric("epoch", trainer_state.epoch)
    log_metric("share", trainer_state.global_step / trainer_state.max_steps)
    log_extra("answered", answer)
    texts = [completion[0]["content"] for completion in completions]
    return [sum(byte % 2 for byte in text.encode()) / 8 for text in texts]
"""


def test_a_run_passes_its_state_and_writes_logged_values(tmp_path: Path) -> None:
    """A resumed run logs the same as one that was not stopped."""
    (tmp_path / "rewards.py").write_text(IN_A_RUN)
    rows = [{"messages": [{"role": "user", "content": str(i)}], "answer": str(i)} for i in range(8)]
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = SMALL.replace("max_length: 16", "max_length: 48").replace("max_prompt_tokens: 6", "max_prompt_tokens: 40")
    options = ["graph.impl=none", "algorithm.options={}", "log.samples_every=1", "validation.max_prompts=2"]
    for steps in (2, 4):
        assert train(config_of(tmp_path, f"steps={steps}", *options, text=text), ONE) is not None
    metrics = metrics_of(tmp_path / "run")
    assert [entry["logged/step"] for entry in metrics] == [0, 1, 2, 3]
    assert [entry["logged/epoch"] for entry in metrics] == [0.5, 1.0, 1.5, 2.0]
    assert [entry["logged/share"] for entry in metrics] == [0.0, 0.5, 0.5, 0.75]
    assert {e["step"]: e["validation/logged/step"] for e in metrics if "validation/reward" in e} == {1: 2, 3: 4}
    assert all("unrewarded" not in entry or entry["unrewarded"] == 0 for entry in metrics)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["extra"]["answered"] == sample["prompt"].split()[1][0] for sample in samples)
