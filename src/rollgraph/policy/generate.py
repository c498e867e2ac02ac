"""Generation for environments, on one rank or on a tensor parallel group.

Turns a request of an environment into a request of the engine, and a completion into a turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rollgraph.inference import Engine, Progress, SamplingParams
from rollgraph.inference.requests import Output, RequestError
from rollgraph.parallel.tensor.peers import TensorPeers
from rollgraph.policy.phases import Phases
from rollgraph.rl.environment import Environment
from rollgraph.rl.turns import Request, Turn
from rollgraph.types import Prompt, Rollout

# -- turns -----------------------------------------------------------------------------------------

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class TurnGenerator:
    """The `generate` that is passed to an environment. A turn's noise depends only on `seed`, its key and positions.

    A sequence has at most `max_length` tokens.
    """

    engine: Engine
    phases: Phases
    seed: str
    params: SamplingParams
    max_length: int
    on_progress: OnProgress | None = None

    def __call__(self, requests: list[Request]) -> list[Turn]:
        """Continue (tokens, key) requests."""
        prompts = [tokens for tokens, _ in requests]
        params = [self.sampling_params(tokens, key) for tokens, key in requests]
        with self.phases.enter("generate"):
            outputs = self.engine.generate(prompts, params, on_progress=self.on_progress)
        return [make_turn(output) for output in outputs]

    @contextmanager
    def session(self) -> Iterator[TurnSession]:
        """Serve requests as they come. Requests still running at the end are aborted."""
        with self.phases.enter("generate"):
            session = TurnSession(self)
            try:
                yield session
            finally:
                self.engine.reset()

    def sampling_params(self, tokens: list[int], key: int) -> SamplingParams:
        remaining = max(0, self.max_length - len(tokens))
        return replace(
            self.params, seed=_hash_seed(f"{self.seed}/{key}"), max_tokens=min(self.params.max_tokens, remaining)
        )


class TurnSession:
    """The running requests of one environment, which sees this object as an `rl.turns.GenerateSession`."""

    def __init__(self, generator: TurnGenerator) -> None:
        self._generator = generator
        self._engine = generator.engine
        self._running: dict[int, Output] = {}  # by key
        self._progress_at_start = self._engine.progress()  # the engine's counters may not start at zero
        self._finished = self._progress_at_start.finished

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, tokens: list[int], key: int) -> None:
        if key in self._running:
            raise ValueError(f"the sample with key {key} has a turn that is not finished")
        try:
            self._running[key] = self._engine.submit(tokens, self._generator.sampling_params(tokens, key))
        except RequestError as error:
            raise ValueError(f"a prompt of {len(tokens)} tokens cannot be continued: {error}") from error

    def step(self) -> list[tuple[int, Turn]]:
        self._engine.step()
        now = self._engine.progress()
        if self._generator.on_progress is not None:
            self._generator.on_progress(self._progress_since_start(now))
        if now.finished == self._finished:
            return []
        self._finished = now.finished
        done = [key for key, output in self._running.items() if output.done]
        return [(key, make_turn(self._running.pop(key))) for key in done]

    def _progress_since_start(self, now: Progress) -> Progress:
        before = self._progress_at_start
        return Progress(now.tokens - before.tokens, now.running, now.waiting, now.finished - before.finished)


def make_turn(output: Output) -> Turn:
    if output.error is not None:
        raise ValueError(f"a prompt of {len(output.prompt_tokens)} tokens cannot be continued: {output.error}")
    (completion,) = output.completions
    return Turn(completion.tokens, completion.logprobs, completion.text, completion.finish_reason or "abort")


def _hash_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


# -- generation on a tensor parallel group ---------------------------------------------------------
# An environment may be slow, random, or act outside of the process, so only the first rank of a group runs it. But the
# ranks need each other for every token. Before the first rank samples, it sends the others the requests it received
# since the last message. All ranks then pass the same requests to their engines in the same order. Owns these messages.

_OPEN, _STEP, _GENERATE, _CLOSE, _END = "open", "step", "generate", "close", "end"


class _Message(NamedTuple):
    """The next action of all ranks of a group."""

    action: str
    submitted: list[Request]  # to the session, since the last message
    requests: list[Request]  # to be generated in one call


def run_on_tensor_group(
    environment: Environment, generate: TurnGenerator, prompts: Sequence[Prompt], tensor: TensorPeers | None
) -> list[Rollout]:
    """Run an environment on the first rank of a tensor parallel group. The other ranks return an empty list."""
    if tensor is None:
        return environment.run(generate, prompts)
    if tensor.rank > 0:
        _follow_leader(generate, lambda: _Message(*json.loads(tensor.receive_text())))
        return []
    leader = _Leader(generate, lambda message: tensor.broadcast_text(json.dumps(message)))
    rollouts = environment.run(leader, prompts)
    leader.end()
    return rollouts


# -- the first rank --------------------------------------------------------------------------------


@dataclass
class _Leader:
    """The `generate` of the environment on the first rank: it announces each call to the other ranks."""

    generator: TurnGenerator
    send: Callable[[_Message], None]
    submitted: list[Request] = field(default_factory=list)
    failed: bool = False

    def __call__(self, requests: list[Request]) -> list[Turn]:
        self.tell_followers(_GENERATE, [_json_request(*request) for request in requests])
        return self.generator(requests)

    @contextmanager
    def session(self) -> Iterator[_LeadingSession]:
        self.tell_followers(_OPEN)
        try:
            with self.generator.session() as session:
                yield _LeadingSession(self, session)
                self.tell_followers(_CLOSE)
        except BaseException:
            self.failed = True
            raise

    def end(self) -> None:
        self.tell_followers(_END)

    def tell_followers(self, action: str, requests: Sequence[Request] = ()) -> None:
        if self.failed:
            raise RuntimeError("an exception has ended a session, and the other ranks of the group are still in it")
        submitted, self.submitted = self.submitted, []
        self.send(_Message(action, submitted, list(requests)))


@dataclass
class _LeadingSession:
    """A session that is announced to the other ranks; see `rl.turns.GenerateSession`."""

    leader: _Leader
    session: TurnSession

    @property
    def busy(self) -> bool:
        return self.session.busy

    def submit(self, tokens: list[int], key: int) -> None:
        self.session.submit(tokens, key)  # first: it raises if the request is refused
        self.leader.submitted.append(_json_request(tokens, key))

    def step(self) -> list[tuple[int, Turn]]:
        self.leader.tell_followers(_STEP)
        return self.session.step()


def _json_request(tokens: Sequence[int], key: int) -> Request:
    """A request of plain integers, which can be written as JSON; an environment may pass NumPy's."""
    return [int(token) for token in tokens], int(key)


# -- the other ranks -------------------------------------------------------------------------------


def _follow_leader(generate: TurnGenerator, receive: Callable[[], _Message]) -> None:
    while (message := receive()).action != _END:
        if message.action == _GENERATE:
            _repeat_generate(generate, message)
            continue
        with generate.session() as session:
            _follow_session(generate, session, receive)


def _follow_session(generate: TurnGenerator, session: TurnSession, receive: Callable[[], _Message]) -> None:
    while (message := receive()).action != _CLOSE:
        for tokens, key in message.submitted:
            session.submit(tokens, key)
        if message.action == _GENERATE:
            _repeat_generate(generate, message)
        else:
            session.step()


def _repeat_generate(generate: TurnGenerator, message: _Message) -> None:
    with suppress(ValueError):  # a refused request: the first rank raises it to the environment
        generate([(tokens, key) for tokens, key in message.requests])
