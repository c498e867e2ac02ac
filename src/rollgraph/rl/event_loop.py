"""An event loop in a thread of its own, for the user's functions that are coroutines.

It lives as long as its owner, so that what a function keeps between calls, such as an HTTP client, stays usable. It has
a thread, because in a notebook the main thread already runs a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

from rollgraph.rl.worker_messages import Failure, describe

_END_SECONDS = 2.0  # for tasks to notice that they are cancelled


class EventLoop:
    """Runs coroutines at the same time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = Thread(target=self._serve, name="rollgraph event loop", daemon=True)
        self._thread.start()

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float) -> list[Any]:
        """The result of each coroutine; a Failure if it raised or took longer than `timeout` seconds."""

        async def run_all() -> list[Any]:
            return await asyncio.gather(*(_run_limited(coroutine, timeout) for coroutine in coroutines))

        future = asyncio.run_coroutine_threadsafe(run_all(), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: nobody waits for these any more
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is running. What blocks the loop cannot be ended; its thread ends with the process."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2 * _END_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closed:
            with suppress(BaseException):  # a SystemExit in a task that a coroutine started goes through the loop
                self._loop.run_forever()
        with suppress(BaseException):
            self._loop.run_until_complete(_cancel_all())
        self._loop.close()


async def _run_limited(coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()  # of no effect if it is done; and not waited for, because it may refuse
    if not task.done():
        return Failure("timeout", f"no result after {timeout} s")
    try:
        return task.result()
    except BaseException as error:  # a CancelledError of its own as well
        return describe(error)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_SECONDS)
