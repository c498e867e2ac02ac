"""Environments of ranks that divide layers: the first of them runs one, and the others sample along.

What an environment does may be slow, random, or happen outside of the process, so it happens once. The ranks of a group
need each other for every token. Before the first rank samples, it tells the others what it was asked for since; all of
them then give their engines the same requests in the same order. Owns these messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rollgraph.policy.turn_session import TurnGenerator, TurnSession
from rollgraph.rl.environment import Environment
from rollgraph.rl.turns import Request, Turn
from rollgraph.sharding.tensor_peers import TensorPeers
from rollgraph.types import Prompt, Rollout

_OPEN, _STEP, _GENERATE, _CLOSE, _END = "open", "step", "generate", "close", "end"


class _Message(NamedTuple):
    """What the ranks of a group do next."""

    action: str
    submitted: list[Request]  # to the session, since the last message
    requests: list[Request]  # to be generated in one call


def run_in_group(
    environment: Environment, generate: TurnGenerator, prompts: Sequence[Prompt], tensor: TensorPeers | None
) -> list[Rollout]:
    """What `environment.run` gives, on the first of the ranks that divide layers; the others get nothing."""
    if tensor is None:
        return environment.run(generate, prompts)
    if tensor.rank > 0:
        _follow(generate, lambda: _Message(*json.loads(tensor.take_from_first())))
        return []
    leader = _Leader(generate, lambda message: tensor.send_from_first(json.dumps(message)))
    rollouts = environment.run(leader, prompts)
    leader.end()
    return rollouts


# -- the first rank --------------------------------------------------------------------------------


@dataclass
class _Leader:
    """What the environment is given as `generate`."""

    generator: TurnGenerator
    send: Callable[[_Message], None]
    submitted: list[Request] = field(default_factory=list)
    failed: bool = False

    def __call__(self, requests: list[Request]) -> list[Turn]:
        self.say(_GENERATE, [_plain(*request) for request in requests])
        return self.generator(requests)

    @contextmanager
    def session(self) -> Iterator[_LeadingSession]:
        self.say(_OPEN)
        try:
            with self.generator.session() as session:
                yield _LeadingSession(self, session)
                self.say(_CLOSE)
        except BaseException:
            self.failed = True
            raise

    def end(self) -> None:
        self.say(_END)

    def say(self, action: str, requests: Sequence[Request] = ()) -> None:
        if self.failed:
            raise RuntimeError("an exception has ended a session, and the other ranks of the group are still in it")
        submitted, self.submitted = self.submitted, []
        self.send(_Message(action, submitted, list(requests)))


@dataclass
class _LeadingSession:
    """A session that the other ranks learn of; see `rl.turns.GenerateSession`."""

    leader: _Leader
    session: TurnSession

    @property
    def busy(self) -> bool:
        return self.session.busy

    def submit(self, tokens: list[int], key: int) -> None:
        self.session.submit(tokens, key)  # first, because it may be refused
        self.leader.submitted.append(_plain(tokens, key))

    def step(self) -> list[tuple[int, Turn]]:
        self.leader.say(_STEP)
        return self.session.step()


def _plain(tokens: Sequence[int], key: int) -> Request:
    """A request that can be written as JSON, whatever integers an environment has."""
    return [int(token) for token in tokens], int(key)


# -- the others ------------------------------------------------------------------------------------


def _follow(generate: TurnGenerator, hear: Callable[[], _Message]) -> None:
    while (message := hear()).action != _END:
        if message.action == _GENERATE:
            _generate_along(generate, message)
            continue
        with generate.session() as session:
            _follow_session(generate, session, hear)


def _follow_session(generate: TurnGenerator, session: TurnSession, hear: Callable[[], _Message]) -> None:
    while (message := hear()).action != _CLOSE:
        for tokens, key in message.submitted:
            session.submit(tokens, key)
        if message.action == _GENERATE:
            _generate_along(generate, message)
        else:
            session.step()


def _generate_along(generate: TurnGenerator, message: _Message) -> None:
    with suppress(ValueError):  # of a request that is refused: the environment on the first rank gets it, too
        generate([(tokens, key) for tokens, key in message.requests])
