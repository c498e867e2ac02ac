"""Functions of the user that run beside the engine: plain, async, slow, hanging and raising ones."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from rollgraph.rl import multi_turn
from rollgraph.rl.multi_turn import ReplyLoop, ReplyResult, ReplyTimeout

LONG_ENOUGH = 120


def run(loop: ReplyLoop, functions: dict[int, Callable[[], Any]]) -> dict[int, ReplyResult]:
    for key, function in functions.items():
        loop.start(key, lambda function=function: loop.call(function))
    replies = {}
    while loop.has_pending:
        replies.update({reply.key: reply for reply in loop.collect(wait=True)})
    return replies


class AsyncObject:
    async def __call__(self) -> str:
        return "object"


def test_values_and_errors_of_plain_and_async_functions() -> None:
    async def coroutine() -> str:
        await asyncio.sleep(0)
        return "async"

    async def leave() -> None:
        raise SystemExit(3)

    def divide() -> float:
        return 1 / 0

    def own_timeout() -> None:
        raise TimeoutError("the server's")

    loop = ReplyLoop(timeout=LONG_ENOUGH, threads=2)
    functions = [lambda: "plain", coroutine, lambda: coroutine(), AsyncObject(), divide, leave, sys.exit, own_timeout]
    replies = run(loop, dict(enumerate(functions)))
    assert [replies[key].value for key in range(4)] == ["plain", "async", "async", "object"]
    errors = [type(replies[key].error) for key in range(4, 8)]
    assert errors == [ZeroDivisionError, SystemExit, SystemExit, TimeoutError]
    assert run(loop, {0: lambda: "still there"})[0].value == "still there"
    with pytest.raises(KeyboardInterrupt):
        run(loop, {0: lambda: (_ for _ in ()).throw(KeyboardInterrupt())})


def test_an_async_function_that_refuses_to_end_is_given_up() -> None:
    """Code that catches everything and tries again also catches its own cancellation."""
    ended = threading.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    loop = ReplyLoop(timeout=0.05, threads=2)
    loop.start(0, lambda: loop.call(stubborn))
    rescue = threading.Timer(20, ended.set)  # a failure must not be a hang
    rescue.start()
    (reply,) = loop.collect(wait=True)
    assert isinstance(reply.error, ReplyTimeout)
    assert not ended.is_set()
    rescue.cancel()
    ended.set()


def test_one_loop_serves_all_steps() -> None:
    """A client of an async library belongs to the loop on which it was created."""
    loop = ReplyLoop(timeout=LONG_ENOUGH, threads=2)

    async def which() -> int:
        return id(asyncio.get_running_loop())

    assert run(loop, {0: which})[0].value == run(loop, {0: which})[0].value


def test_plain_functions_use_all_threads_and_hung_ones_do_not_count() -> None:
    loop = ReplyLoop(timeout=0.05, threads=2)
    never = threading.Event()
    hung = run(loop, dict.fromkeys(range(3), never.wait))
    assert {type(reply.error) for reply in hung.values()} == {ReplyTimeout}
    never.set()

    loop = ReplyLoop(timeout=LONG_ENOUGH, threads=2)
    both = threading.Barrier(2)
    lock = threading.Lock()
    running: list[int] = [0, 0]  # now, and at most

    def enter() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
        both.wait(LONG_ENOUGH)
        with lock:
            running[0] -= 1

    replies = run(loop, dict.fromkeys(range(6), enter))
    assert all(reply.error is None for reply in replies.values())
    assert running == [0, 2]


def test_a_dropped_reply_is_not_mistaken_for_a_later_one_with_its_key() -> None:
    loop = ReplyLoop(timeout=LONG_ENOUGH, threads=2)
    go, ended = threading.Event(), threading.Event()

    def late() -> str:
        go.wait(LONG_ENOUGH)
        ended.set()
        return "of the step before"

    loop.start(7, lambda: loop.call(late))
    assert loop.collect(wait=False) == []
    loop.drop()
    assert not loop.has_pending
    assert loop.collect(wait=True) == []
    go.set()
    assert ended.wait(LONG_ENOUGH)
    assert run(loop, {7: lambda: "of this step"})[7].value == "of this step"


def test_a_blocked_event_loop_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_turn, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(multi_turn, "_POLL_SECONDS", 0.05)
    loop = ReplyLoop(timeout=0.05, threads=2)
    never = threading.Event()

    async def block() -> None:
        never.wait()

    (reply,) = run(loop, {0: block}).values()
    assert isinstance(reply.error, ReplyTimeout)
    assert "has blocked the event loop" in str(reply.error)

    async def fine() -> str:
        return "fine"

    monkeypatch.setattr(multi_turn, "_GRACE_SECONDS", LONG_ENOUGH)
    assert run(loop, {0: fine})[0].value == "fine"
    never.set()
