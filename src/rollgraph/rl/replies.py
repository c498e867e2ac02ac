"""Functions of the user that answer a policy: run beside the engine, with a time-out, in whatever order they end.

Every reply is a coroutine on one event loop, which lives in a thread of its own as long as the environment does, so
that clients of an async library can be kept from step to step. A plain function is called in a thread. A reply that
hangs is given up: a thread cannot be ended from outside, but as a daemon it does not keep the process alive either.
Nothing here knows what a reply is.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_LOOK_EVERY = 0.5  # seconds between two looks at whether the event loop still runs
_GRACE = 5.0  # seconds that a busy machine may add to a time-out before the event loop counts as blocked


@dataclass(frozen=True)
class Reply:
    """What became of one reply: its value, or why there is none."""

    key: int
    value: Any = None
    error: BaseException | None = None


class ReplyTimeout(TimeoutError):
    """A function of the user took too long. It may still be running."""


class ReplyLoop:
    """Runs replies; at most `threads` plain functions at once, and each function for at most `timeout` seconds."""

    def __init__(self, *, timeout: float, threads: int) -> None:
        self._timeout = timeout
        self._threads = threads
        self._loop: _LoopThread | None = None  # started by the first reply
        self._started = 0
        self._pending: dict[int, int] = {}  # the key of each reply, by its number
        self._done: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def start(self, key: int, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Begin a reply. `make` gives a coroutine that calls the user's functions through `call`."""
        if self._loop is None:
            self._loop = _LoopThread(self._threads)
            weakref.finalize(self, self._loop.stop)
        number = self._started  # a key may come again, in another step, while a reply that was dropped still runs
        self._started += 1
        self._pending[number] = key
        done = self._done

        async def run() -> None:
            try:
                reply = Reply(key, await make())
            except BaseException as error:  # replies run on what a policy makes up, and some of them exit or panic
                reply = Reply(key, error=error)
            done.put((number, reply))

        self._loop.run(run)

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """What a function of the user returns, whether it is async or not; for coroutines given to `start`."""
        if _is_async(function):
            return await self._limited(function(*arguments, **options), function)
        loop = self._loop
        if loop is None or not loop.is_current:
            raise ReplyTimeout("this reply was given up")
        async with loop.slots:
            value = await self._limited(_in_thread(function, arguments, options), function)
        if inspect.isawaitable(value):  # a plain function that returns a coroutine, such as a lambda
            value = await self._limited(value, function)
        return value

    async def _limited(self, work: Awaitable[Any], function: Callable[..., Any]) -> Any:
        task = asyncio.ensure_future(_settle(work))
        try:
            await asyncio.wait({task}, timeout=self._timeout)
        finally:
            task.cancel()  # of no effect if it is done; and not waited for, because it may refuse
        if not task.done():
            name = getattr(function, "__name__", repr(function))
            raise ReplyTimeout(f"{name} took longer than {self._timeout:g} s")
        value, error = task.result()
        if error is not None:
            raise error
        return value

    def collect(self, *, wait: bool) -> list[Reply]:
        """The replies that have ended since the last call; with `wait`, at least one if any is pending."""
        replies: list[Reply] = []
        since = time.monotonic()
        while self._pending:
            try:
                number, reply = self._done.get(block=wait and not replies, timeout=_LOOK_EVERY)
            except queue.Empty:
                if not wait or replies:
                    break
                if self._is_blocked(since):
                    replies = self._give_up()
                continue
            if self._pending.pop(number, None) is not None:  # otherwise it was dropped
                replies.append(reply)
        for reply in replies:
            if isinstance(reply.error, KeyboardInterrupt):
                raise reply.error
        return replies

    def drop(self) -> None:
        """Forget the replies that have not ended."""
        self._pending.clear()

    def _is_blocked(self, since: float) -> bool:
        """Whether the event loop has run nothing for longer than a function may take."""
        assert self._loop is not None, "a reply is pending"
        self._loop.ping()
        return time.monotonic() - max(since, self._loop.seen) > self._timeout + _GRACE

    def _give_up(self) -> list[Reply]:
        """Leave an event loop that is blocked, with all replies on it; later ones get a new loop."""
        self._loop = None
        error = ReplyTimeout(
            f"an async function has blocked the event loop for more than {self._timeout:g} s: "
            "await what takes long, or make it a plain function, which gets a thread"
        )
        replies = [Reply(key, error=error) for key in self._pending.values()]
        self._pending.clear()
        return replies


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, threads: int) -> None:
        self.seen = time.monotonic()  # when the loop last answered a ping
        self.slots = asyncio.Semaphore(threads)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself has only weak references
        threading.Thread(target=self._serve, name="rollgraph-replies", daemon=True).start()

    def _serve(self) -> None:
        self._loop.run_forever()
        for task in list(self._tasks):
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
        self._loop.run_until_complete(asyncio.sleep(0))  # for functions to notice that they are cancelled
        self._loop.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop."""
        return asyncio.get_running_loop() is self._loop

    def run(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            task = self._loop.create_task(make())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    def ping(self) -> None:
        self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self.seen = time.monotonic()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def _is_async(function: Callable[..., Any]) -> bool:
    """Also an object whose `__call__` is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _settle(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What an awaitable gives or raises. As a task of its own, it must not raise: an event loop ends on SystemExit."""
    try:
        return await work, None
    except BaseException as error:
        return None, error


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function in a thread of its own, which is left alone if nobody waits for it any longer."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not outcome.done():  # cancelled when the time was up
            outcome.set_result((value, error))  # not `set_exception`: an event loop ends on SystemExit

    def work() -> None:
        value: Any = None
        caught: BaseException | None = None
        try:
            value = function(*arguments, **options)
        except BaseException as error:
            caught = error
        with suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(settle, value, caught)

    threading.Thread(target=work, name="rollgraph-reply", daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return value
