"""Turns of the policy: how an environment asks for them, and how they become part of a rollout.

Owns the keys that choose the noise of a sample. Knows neither the engine nor what happens between turns. What was
sampled is never tokenized again: tokens are only ever appended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from rollgraph.types import Prompt, Rollout, Span


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one go; `finish_reason` is as in Rollout."""

    tokens: Sequence[int]
    logprobs: Sequence[float]  # one for each token
    text: str
    finish_reason: str


# The tokens to continue, and a key that chooses the noise: a sample has the same key in all of its turns, and different
# samples of a step have different keys. Noise also depends on the position, so turns of a sample differ.
Request = tuple[list[int], int]

# One turn for each request. A function that also has a method `session()` serves requests as they come; see
# `open_session`.
Generate = Callable[[list[Request]], list[Turn]]


class GenerateSession(Protocol):
    """Turns that are asked for one by one, while others are being sampled."""

    @property
    def busy(self) -> bool:
        """Whether a turn that was asked for is not finished."""

    def submit(self, tokens: list[int], key: int) -> None:
        """Ask for the turn that continues these tokens."""

    def step(self) -> list[tuple[int, Turn]]:
        """Sample some more tokens. Gives the turns that this finished, by the keys of their requests."""


def open_session(generate: Generate) -> AbstractContextManager[GenerateSession]:
    """The session of `generate`, or one that calls it for all requests that have come since the last call."""
    session: Callable[[], AbstractContextManager[GenerateSession]] | None = getattr(generate, "session", None)
    if session is not None:
        return session()
    return nullcontext(_BatchSession(generate))


class _BatchSession:
    """Serves a function that has no session of its own: turns are sampled in lockstep."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._requests: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def submit(self, tokens: list[int], key: int) -> None:
        self._requests.append((tokens, key))

    def step(self) -> list[tuple[int, Turn]]:
        requests, self._requests = self._requests, []
        return [(key, turn) for (_, key), turn in zip(requests, generate_all(self._generate, requests), strict=True)]


def generate_all(generate: Generate, requests: list[Request]) -> list[Turn]:
    turns = generate(requests)
    if len(turns) != len(requests):
        raise ValueError(f"generate gave {len(turns)} turns for {len(requests)} requests")
    return turns


@dataclass(eq=False)
class Episode:
    """A rollout while it is being sampled."""

    rollout: Rollout
    key: int
    turns: int = 0  # that have ended
    state: Any = None  # what the environment keeps for it

    @property
    def request(self) -> Request:
        return [*self.rollout.prompt.tokens, *self.rollout.tokens], self.key


def make_episodes(prompts: Sequence[Prompt], samples: int) -> list[Episode]:
    """So many empty rollouts for each prompt, with `group` set to the index of the prompt."""
    seen: Counter[tuple[int, int]] = Counter()
    episodes = []
    for group, prompt in enumerate(prompts):
        # Keys come from the prompt rather than from its place, so that noise does not depend on the number of ranks. A
        # prompt can be in a step twice, where an epoch ends or when there are few prompts, and on different ranks.
        twin = (prompt.id, prompt.repeat)
        first_key = (seen[twin] << 80) + (prompt.repeat << 48) + prompt.id * samples
        seen[twin] += 1
        for i in range(samples):
            rollout = Rollout(prompt, tokens=[], sampled=[], logprobs=[], group=group)
            episodes.append(Episode(rollout, first_key + i))
    return episodes


def append_turn(rollout: Rollout, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(logprobs) != len(tokens):
        raise ValueError(f"a turn has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    rollout.tokens += tokens
    rollout.sampled += [True] * len(tokens)
    rollout.logprobs += logprobs


def append_reply(rollout: Rollout, tokens: Sequence[int], text: str) -> None:
    """Append tokens that are not the policy's."""
    start = len(rollout.tokens)
    rollout.tokens += tokens
    rollout.sampled += [False] * len(tokens)
    rollout.logprobs += [0.0] * len(tokens)
    rollout.spans.append(Span(start, len(rollout.tokens), "reply", text))
