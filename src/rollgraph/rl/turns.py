"""Turns of the policy: the interface through which environments sample them, and appending them to rollouts.

Owns the keys from which the random numbers of a sample are derived. Knows neither the engine nor what happens between
turns. Sampled tokens are never tokenized again: tokens are only ever appended.
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
    """One turn of the policy.

    >>> Turn(tokens=[48, 55, 2], logprobs=[-0.1, -1.2, -0.3], text="42", finish_reason="stop")
    """

    tokens: Sequence[int]  # [T]
    logprobs: Sequence[float]  # [T]
    text: str
    finish_reason: str  # as in Rollout


# (tokens to continue, key of the random numbers). A sample has the same key in all of its turns, and different samples
# of a step have different keys. The random numbers also depend on the position, so turns of a sample differ.
Request = tuple[list[int], int]

# Returns one turn for each request. A function that also has a method `session()` serves requests as they arrive; see
# `open_session`.
Generate = Callable[[list[Request]], list[Turn]]


class GenerateSession(Protocol):
    """Samples turns that are requested one by one, while others are being sampled."""

    @property
    def busy(self) -> bool:
        """Whether any requested turn is unfinished."""

    def submit(self, tokens: list[int], key: int) -> None:
        """Request the turn that continues these tokens."""

    def step(self) -> list[tuple[int, Turn]]:
        """Sample some more tokens; returns (key, turn) for each turn that this finished."""


def open_session(generate: Generate) -> AbstractContextManager[GenerateSession]:
    """The session of `generate`; without one, a session whose step calls it with all requests since the last step."""
    session: Callable[[], AbstractContextManager[GenerateSession]] | None = getattr(generate, "session", None)
    if session is not None:
        return session()
    return nullcontext(_BatchSession(generate))


class _BatchSession:
    """A session for a function without its own: turns are sampled in lockstep."""

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
    turns: int = 0  # number of finished turns
    state: Any = None  # the environment's, for this rollout

    @property
    def request(self) -> Request:
        return [*self.rollout.prompt.tokens, *self.rollout.tokens], self.key


def make_episodes(prompts: Sequence[Prompt], samples: int) -> list[Episode]:
    """Make `samples` empty rollouts for each prompt, with `group` set to the index of the prompt."""
    occurrences: Counter[tuple[int, int]] = Counter()
    episodes = []
    for group, prompt in enumerate(prompts):
        # Keys depend on the prompt and not on its index in `prompts`, so that random numbers do not depend on the
        # number of ranks. A prompt can be in a step twice, even on different ranks: where an epoch ends, or if there
        # are few prompts.
        prompt_key = (prompt.id, prompt.repeat)
        first_key = (occurrences[prompt_key] << 80) + (prompt.repeat << 48) + prompt.id * samples
        occurrences[prompt_key] += 1
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
    """Append tokens that the policy did not sample."""
    start = len(rollout.tokens)
    rollout.tokens += tokens
    rollout.sampled += [False] * len(tokens)
    rollout.logprobs += [0.0] * len(tokens)
    rollout.spans.append(Span(start, len(rollout.tokens), "reply", text))
