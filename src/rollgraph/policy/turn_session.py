"""Turns of the policy for environments: many at once, or one by one while others are being sampled.

Owns how a request of an environment becomes a request of the engine, and a completion a turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rollgraph.inference import Engine, Progress, SamplingParams
from rollgraph.inference.requests import Output, RequestError
from rollgraph.policy.phases import Phases
from rollgraph.rl.turns import Request, Turn

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class TurnGenerator:
    """What an environment is given as `generate`. The noise of a turn depends on `seed`, its key and positions alone.

    A sequence has at most `max_length` tokens.
    """

    engine: Engine
    phases: Phases
    seed: str
    params: SamplingParams
    max_length: int
    on_progress: OnProgress | None = None

    def __call__(self, requests: list[Request]) -> list[Turn]:
        """Continue token lists, each given with a key."""
        prompts = [tokens for tokens, _ in requests]
        params = [self.params_of(tokens, key) for tokens, key in requests]
        with self.phases.enter("generate"):
            outputs = self.engine.generate(prompts, params, on_progress=self.on_progress)
        return [make_turn(output) for output in outputs]

    @contextmanager
    def session(self) -> Iterator[TurnSession]:
        """Requests are served as they come; those that are left at the end are aborted."""
        with self.phases.enter("generate"):
            session = TurnSession(self)
            try:
                yield session
            finally:
                self.engine.reset()

    def params_of(self, tokens: list[int], key: int) -> SamplingParams:
        room = max(0, self.max_length - len(tokens))
        return replace(self.params, seed=_hash_seed(f"{self.seed}/{key}"), max_tokens=min(self.params.max_tokens, room))


class TurnSession:
    """Requests of one environment while it runs; `rl.turns.GenerateSession` is what the environment sees of it."""

    def __init__(self, generator: TurnGenerator) -> None:
        self._generator = generator
        self._engine = generator.engine
        self._running: dict[int, Output] = {}  # by key
        self._before = self._engine.progress()  # the engine counts on from what it did for others
        self._finished = self._before.finished

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, tokens: list[int], key: int) -> None:
        if key in self._running:
            raise ValueError(f"the sample with key {key} has a turn that is not finished")
        try:
            self._running[key] = self._engine.submit(tokens, self._generator.params_of(tokens, key))
        except RequestError as error:
            raise ValueError(f"a prompt of {len(tokens)} tokens cannot be continued: {error}") from error

    def step(self) -> list[tuple[int, Turn]]:
        self._engine.step()
        now = self._engine.progress()
        if self._generator.on_progress is not None:
            self._generator.on_progress(self._since_start(now))
        if now.finished == self._finished:
            return []
        self._finished = now.finished
        done = [key for key, output in self._running.items() if output.done]
        return [(key, make_turn(self._running.pop(key))) for key in done]

    def _since_start(self, now: Progress) -> Progress:
        before = self._before
        return Progress(now.tokens - before.tokens, now.running, now.waiting, now.finished - before.finished)


def make_turn(output: Output) -> Turn:
    if output.error is not None:
        raise ValueError(f"a prompt of {len(output.prompt_tokens)} tokens cannot be continued: {output.error}")
    (completion,) = output.completions
    return Turn(completion.tokens, completion.logprobs, completion.text, completion.finish_reason or "abort")


def _hash_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
