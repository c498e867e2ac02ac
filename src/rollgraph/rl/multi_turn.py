"""Multi-turn rollouts: the loop over turns and replies, and an event loop for the user's functions that reply.

    session.step      the engine samples some tokens for every running turn
    _append_turn      append a finished turn, and start the reply to it (ReplyLoop.start)
    _append_reply     append a finished reply, and request the next turn (session.submit)

Rollouts are not in lockstep: each continues as soon as its reply is there, while others still decode or wait. The order
does not change the rollouts, because the random numbers of a sample depend only on its key and on positions. Owns the
limits of a conversation and the handling of replies that fail. Subclasses define the replies.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.rl.rewards.process import line_suffix
from rollgraph.rl.turns import (
    Episode,
    Generate,
    GenerateSession,
    Turn,
    append_reply,
    append_turn,
    make_episodes,
    open_session,
)
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import ENVIRONMENT, Prompt, Rollout, Span

# -- functions that reply --------------------------------------------------------------------------
# Every reply is a coroutine on one event loop, which has its own thread and lives as long as the environment, so that a
# function can keep clients of an async library from step to step. A plain function is called in a thread. A reply that
# hangs is abandoned: its thread cannot be killed, but a daemon thread does not keep the process alive.

_POLL_SECONDS = 0.5  # between two checks that the event loop still runs
_GRACE_SECONDS = 5.0  # added to a time-out on a busy machine before the event loop counts as blocked


@dataclass(frozen=True)
class ReplyResult:
    """The value of a reply, or the error that it raised."""

    key: int
    value: Any = None
    error: BaseException | None = None


class ReplyTimeout(TimeoutError):
    """A user's function timed out. It may still be running."""


class ReplyLoop:
    """Runs replies: at most `threads` plain functions at once, and each function for at most `timeout` seconds."""

    def __init__(self, *, timeout: float, threads: int) -> None:
        self._timeout = timeout
        self._threads = threads
        self._loop: _LoopThread | None = None  # started by the first reply
        self._reply_count = 0
        self._pending: dict[int, int] = {}  # the key of each unfinished reply, by its number
        self._results: queue.SimpleQueue[tuple[int, ReplyResult]] = queue.SimpleQueue()

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def start(self, key: int, make_coroutine: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Start a reply. `make_coroutine` returns a coroutine that calls the user's functions through `call`."""
        if self._loop is None:
            self._loop = _LoopThread(self._threads)
            weakref.finalize(self, self._loop.stop)
        number = self._reply_count  # not the key, which may recur in another step while a dropped reply still runs
        self._reply_count += 1
        self._pending[number] = key
        results = self._results

        async def run() -> None:
            try:
                reply = ReplyResult(key, await make_coroutine())
            except BaseException as error:  # replies work on a policy's output: some exit or panic
                reply = ReplyResult(key, error=error)
            results.put((number, reply))

        self._loop.run(run)

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Call a user's function, plain or async, from a coroutine that was passed to `start`."""
        if _is_async(function):
            return await self._with_timeout(function(*arguments, **options), function)
        loop = self._loop
        if loop is None or not loop.is_current:
            raise ReplyTimeout("this reply was given up")
        async with loop.thread_slots:
            value = await self._with_timeout(_in_thread(function, arguments, options), function)
        if inspect.isawaitable(value):  # a plain function that returns a coroutine, such as a lambda
            value = await self._with_timeout(value, function)
        return value

    async def _with_timeout(self, work: Awaitable[Any], function: Callable[..., Any]) -> Any:
        task = asyncio.ensure_future(_catch_error(work))
        try:
            await asyncio.wait({task}, timeout=self._timeout)
        finally:
            task.cancel()  # no effect on a task that is done; we do not wait, because a task can refuse
        if not task.done():
            name = getattr(function, "__name__", repr(function))
            raise ReplyTimeout(f"{name} took longer than {self._timeout:g} s")
        value, error = task.result()
        if error is not None:
            raise error
        return value

    def collect(self, *, wait: bool) -> list[ReplyResult]:
        """The replies that finished since the last call. With `wait`, blocks for at least one if any is pending."""
        replies: list[ReplyResult] = []
        wait_start = time.monotonic()
        while self._pending:
            try:
                number, reply = self._results.get(block=wait and not replies, timeout=_POLL_SECONDS)
            except queue.Empty:
                if not wait or replies:
                    break
                if self._is_blocked(wait_start):
                    replies = self._abandon_loop()
                continue
            if self._pending.pop(number, None) is not None:  # otherwise it was dropped
                replies.append(reply)
        for reply in replies:
            if isinstance(reply.error, KeyboardInterrupt):
                raise reply.error
        return replies

    def drop(self) -> None:
        """Forget all unfinished replies."""
        self._pending.clear()

    def _is_blocked(self, wait_start: float) -> bool:
        """Whether the event loop has run nothing for longer than the time-out of a function."""
        assert self._loop is not None, "a reply is pending"
        self._loop.ping()
        return time.monotonic() - max(wait_start, self._loop.last_answered) > self._timeout + _GRACE_SECONDS

    def _abandon_loop(self) -> list[ReplyResult]:
        """Abandon a blocked event loop with all replies on it; later replies get a new loop."""
        self._loop = None
        error = ReplyTimeout(
            f"an async function has blocked the event loop for more than {self._timeout:g} s: "
            "await what takes long, or make it a plain function, which runs in a thread"
        )
        replies = [ReplyResult(key, error=error) for key in self._pending.values()]
        self._pending.clear()
        return replies


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, threads: int) -> None:
        self.last_answered = time.monotonic()  # when the loop last answered a ping
        self.thread_slots = asyncio.Semaphore(threads)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio has only weak references to tasks
        threading.Thread(target=self._serve, name="rollgraph-replies", daemon=True).start()

    def _serve(self) -> None:
        self._loop.run_forever()
        for task in list(self._tasks):
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
        self._loop.run_until_complete(asyncio.sleep(0))  # lets functions handle their cancellation
        self._loop.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop."""
        return asyncio.get_running_loop() is self._loop

    def run(self, make_coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            task = self._loop.create_task(make_coroutine())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    def ping(self) -> None:
        self._loop.call_soon_threadsafe(self._record_answer)

    def _record_answer(self) -> None:
        self.last_answered = time.monotonic()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the `__call__` of an object, is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _catch_error(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return (value, exception) of an awaitable. A task must not raise: SystemExit would end the event loop."""
    try:
        return await work, None
    except BaseException as error:
        return None, error


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function in a new thread. After a time-out the thread runs on, and its result is ignored."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not outcome.done():  # it is cancelled after a time-out
            outcome.set_result((value, error))  # not `set_exception`: SystemExit would end the event loop

    def work() -> None:
        value: Any = None
        caught: BaseException | None = None
        try:
            value = function(*arguments, **options)
        except BaseException as error:
            caught = error
        with suppress(RuntimeError):  # the loop is closed because the run is over
            loop.call_soon_threadsafe(settle, value, caught)

    threading.Thread(target=work, name="rollgraph-reply", daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return value


# -- the loop --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvResponse:
    """The environment's response to a turn.

    >>> EnvResponse([27, 84, 27], "<result>84</result>", reward=0.5)
    """

    tokens: Sequence[int] | None = None  # to append to the rollout; None: the rollout is finished
    text: str = ""  # of these tokens
    messages: list[dict[str, Any]] = field(
        default_factory=list
    )  # rendered as these tokens, in environments of messages
    reward: float = 0.0  # of the turn
    failures: list[tuple[str, str]] = field(default_factory=list)  # (kind, message) of failures the policy was told of


class Conversations:
    """Base class of environments with several turns.

    A rollout has at most `max_tokens` tokens, sampled or not. It ends with the reason "length" when a turn was cut,
    when a reply leaves no room for another token, or when it would need more than `max_turns` turns. A reply that
    raises, or that takes longer than `timeout` seconds, ends its rollout with "error". `failures` counts these by
    exception type, `messages` has the first message of each type, and `unread()` returns each message once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        samples_per_prompt: int,
        max_turns: int,
        max_tokens: int,
        timeout: float,
        threads: int,
        stop: Sequence[str],
    ) -> None:
        if isinstance(stop, str):
            raise InvalidInput(f"expected a list of strings, got {stop!r}", argument="stop")
        if timeout <= 0:
            raise InvalidInput(f"must be more than 0 seconds, got {timeout}", argument="timeout")
        self.stop = tuple(stop)
        self.failures: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self._unread_messages: list[str] = []
        self._tokenizer = tokenizer
        self._known_ids = frozenset(tokenizer.vocab.values())
        self._samples_per_prompt = check_positive("samples_per_prompt", samples_per_prompt)
        self._max_turns = check_positive("max_turns", max_turns)
        self._max_tokens = check_positive("max_tokens", max_tokens)
        self._reply_loop = ReplyLoop(timeout=timeout, threads=check_positive("threads", threads))

    # -- defined by subclasses ---------------------------------------------------------------------

    def record_turn(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        """Update `text` and `messages` of a rollout after a turn of `tokens` was appended; returns the turn's text."""
        raise NotImplementedError

    async def env_response(self, episode: Episode, *, policy_ended: bool) -> EnvResponse:
        """The response to the last turn. It must not change the rollout, because it may be abandoned half-way.

        `policy_ended`: the policy ended the turn itself. If not, only the reward counts, because nothing can follow.
        """
        raise NotImplementedError

    @property
    def gives_rewards(self) -> bool:
        return False

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        episodes = make_episodes(prompts, self._samples_per_prompt)
        by_key = {episode.key: episode for episode in episodes}
        for episode in episodes:  # copies, because a reply may modify its prompt
            prompt = episode.rollout.prompt
            columns, messages = copy.deepcopy((prompt.columns, prompt.messages))
            episode.rollout.prompt = replace(prompt, columns=columns, messages=messages)
        try:
            with open_session(generate) as session:
                for episode in episodes:
                    session.submit(*episode.request)
                while session.busy or self._reply_loop.has_pending:
                    if session.busy:
                        for key, turn in session.step():
                            self._append_turn(by_key[key], turn)
                    for reply in self._reply_loop.collect(wait=not session.busy):
                        self._append_reply(by_key[reply.key], reply, session)
        finally:
            self._reply_loop.drop()
        return [episode.rollout for episode in episodes]

    def unread(self) -> list[str]:
        """The first message of each kind of failure, once."""
        unread_messages, self._unread_messages = self._unread_messages, []
        return unread_messages

    def hear(self, messages: Mapping[str, str]) -> None:
        """Add messages by kind of failure, from this process or another one that samples for the same run."""
        for kind, message in messages.items():
            if kind not in self.messages:
                self.messages[kind] = message
                self._unread_messages.append(f"{kind}: {message}")

    def _count_failure(self, kind: str, message: str) -> None:
        self.failures[kind] += 1
        self.hear({kind: message})

    def _append_turn(self, episode: Episode, turn: Turn) -> None:
        """Append a turn and, unless nothing can follow it, start the reply to it."""
        rollout = episode.rollout
        start = len(rollout.tokens)
        room = self._max_tokens - start
        append_turn(rollout, turn.tokens[:room], turn.logprobs[:room])
        text = self.record_turn(rollout, rollout.tokens[start:])
        rollout.spans.append(Span(start, len(rollout.tokens), "turn", text))
        rollout.finish_reason = "length" if len(turn.tokens) > room else turn.finish_reason
        episode.turns += 1
        policy_ended = rollout.finish_reason == "stop"
        if policy_ended or (self.gives_rewards and rollout.finish_reason == "length"):
            self._reply_loop.start(episode.key, lambda: self.env_response(episode, policy_ended=policy_ended))

    def _append_reply(self, episode: Episode, reply: ReplyResult, session: GenerateSession) -> None:
        """Append a reply and request the next turn, if there is room for one."""
        rollout = episode.rollout
        if reply.error is not None:
            kind, message = type(reply.error).__name__, f"{reply.error}{line_suffix(reply.error)}"
            self._count_failure(kind, message)
            rollout.failures[ENVIRONMENT] = f"{kind}: {message}"
            rollout.finish_reason = "error"
            return
        response: EnvResponse = reply.value
        for kind, message in response.failures:
            self._count_failure(kind, message)
        rollout.spans[-1] = rollout.spans[-1]._replace(reward=response.reward)
        rollout.reward += response.reward
        if response.tokens is None:
            return
        is_last_turn = episode.turns == self._max_turns
        if is_last_turn or len(rollout.tokens) + len(response.tokens) >= self._max_tokens:
            # Drop the reply: no turn could follow it, and half a reply would make no sense.
            rollout.finish_reason = "length"
            return
        append_reply(rollout, response.tokens, response.text)
        rollout.messages += response.messages
        session.submit(*episode.request)

    def _decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        # A model may have more token ids than its tokenizer.
        return self._tokenizer.decode([token for token in tokens if token in self._known_ids], skip_special)


def check_positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidInput(f"must be at least 1, got {value}", argument=name)
    return value
