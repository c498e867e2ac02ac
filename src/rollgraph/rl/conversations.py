"""The loop of every environment with several turns: turns of the policy with replies in between.

    session.step          some more tokens for every running turn        the engine
    take a turn           append it, and begin the reply to it           ReplyLoop.start
    take a reply          append it, and ask for the next turn           session.submit

Rollouts are not in lockstep: each goes on as soon as its own reply is there, while others still decode or wait. What a
rollout becomes does not depend on that order, because the noise of a sample depends on its key and on positions alone.
Owns the limits of a conversation and what becomes of a reply that fails. What a reply is, a subclass knows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.rl.replies import Reply, ReplyLoop
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
from rollgraph.rl.worker_messages import line_of
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import ENVIRONMENT, Prompt, Rollout, Span


@dataclass(frozen=True)
class Answer:
    """What follows a turn."""

    tokens: Sequence[int] | None = None  # to be appended; None: the rollout is finished
    text: str = ""  # of these tokens
    messages: list[dict[str, Any]] = field(default_factory=list)  # that these tokens spell, if there are messages
    reward: float = 0.0  # of the turn
    failures: list[tuple[str, str]] = field(default_factory=list)  # kind and message; the policy was told of them


class Conversations:
    """Rollouts of several turns.

    A rollout has at most `max_tokens` tokens, sampled or not. It ends with the reason "length" when a turn was cut,
    when a reply leaves no room for another token, or when it would need more than `max_turns` turns. A reply that
    raises, or that takes longer than `timeout` seconds, ends its rollout with "error". `failures` counts these by
    exception type, `messages` has the first message of each type, and `unread()` those nobody has asked for yet.
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
        self._unread: list[str] = []
        self._tokenizer = tokenizer
        self._known_ids = frozenset(tokenizer.vocab.values())
        self._samples_per_prompt = check_positive("samples_per_prompt", samples_per_prompt)
        self._max_turns = check_positive("max_turns", max_turns)
        self._max_tokens = check_positive("max_tokens", max_tokens)
        self._replies = ReplyLoop(timeout=timeout, threads=check_positive("threads", threads))

    # -- what a subclass defines -------------------------------------------------------------------

    def describe(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        """The text of a turn that was just appended; also updates `text` and `messages` of the rollout."""
        raise NotImplementedError

    async def answer(self, episode: Episode, *, ended: bool) -> Answer:
        """What follows the last turn. It must not change the rollout, because it may be given up half-way.

        `ended`: the policy ended the turn itself; otherwise only the reward matters, because nothing can follow.
        """
        raise NotImplementedError

    @property
    def gives_rewards(self) -> bool:
        return False

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        episodes = make_episodes(prompts, self._samples_per_prompt)
        by_key = {episode.key: episode for episode in episodes}
        for episode in episodes:  # a reply may change what it is given, and must not change it for other rollouts
            prompt = episode.rollout.prompt
            columns, messages = copy.deepcopy((prompt.columns, prompt.messages))
            episode.rollout.prompt = replace(prompt, columns=columns, messages=messages)
        try:
            with open_session(generate) as session:
                for episode in episodes:
                    session.submit(*episode.request)
                while session.busy or self._replies.pending:
                    if session.busy:
                        for key, turn in session.step():
                            self._take_turn(by_key[key], turn)
                    for reply in self._replies.collect(wait=not session.busy):
                        self._take_reply(by_key[reply.key], reply, session)
        finally:
            self._replies.drop()
        return [episode.rollout for episode in episodes]

    def unread(self) -> list[str]:
        """The first message of each kind of failure, once."""
        unread, self._unread = self._unread, []
        return unread

    def hear(self, messages: Mapping[str, str]) -> None:
        """Add messages by kind of failure: those of this process, or of another one that samples for the same run."""
        for kind, message in messages.items():
            if kind not in self.messages:
                self.messages[kind] = message
                self._unread.append(f"{kind}: {message}")

    def _count_failure(self, kind: str, message: str) -> None:
        self.failures[kind] += 1
        self.hear({kind: message})

    def _take_turn(self, episode: Episode, turn: Turn) -> None:
        """Append a turn and, unless nothing can follow it, begin the reply to it."""
        rollout = episode.rollout
        start = len(rollout.tokens)
        room = self._max_tokens - start
        append_turn(rollout, turn.tokens[:room], turn.logprobs[:room])
        text = self.describe(rollout, rollout.tokens[start:])
        rollout.spans.append(Span(start, len(rollout.tokens), "turn", text))
        rollout.finish_reason = "length" if len(turn.tokens) > room else turn.finish_reason
        episode.turns += 1
        ended = rollout.finish_reason == "stop"
        if ended or (self.gives_rewards and rollout.finish_reason == "length"):
            self._replies.start(episode.key, lambda: self.answer(episode, ended=ended))

    def _take_reply(self, episode: Episode, reply: Reply, session: GenerateSession) -> None:
        """Append the reply to a turn and ask for the next turn, if there is room for one."""
        rollout = episode.rollout
        if reply.error is not None:
            kind, message = type(reply.error).__name__, f"{reply.error}{line_of(reply.error)}"
            self._count_failure(kind, message)
            rollout.failures[ENVIRONMENT] = f"{kind}: {message}"
            rollout.finish_reason = "error"
            return
        answer: Answer = reply.value
        for kind, message in answer.failures:
            self._count_failure(kind, message)
        rollout.spans[-1] = rollout.spans[-1]._replace(reward=answer.reward)
        rollout.reward += answer.reward
        if answer.tokens is None:
            return
        is_last = episode.turns == self._max_turns
        if is_last or len(rollout.tokens) + len(answer.tokens) >= self._max_tokens:
            # The reply is left out: nothing could follow it, and half of it was never said.
            rollout.finish_reason = "length"
            return
        append_reply(rollout, answer.tokens, answer.text)
        rollout.messages += answer.messages
        session.submit(*episode.request)

    def _decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        # A model may have more ids than its tokenizer.
        return self._tokenizer.decode([token for token in tokens if token in self._known_ids], skip_special)


def check_positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidInput(f"must be at least 1, got {value}", argument=name)
    return value
