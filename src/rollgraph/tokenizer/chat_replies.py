"""The tokens that a chat template puts between two turns of the assistant.

What a policy has sampled is never rendered or tokenized again. So a reply is rendered on its own, after an assistant's
turn that stands for any other, and only what follows that turn is used. This is right for a template that grows: the
text of a conversation begins with the text of every shorter one. Whether a template does is checked before it is used.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Message, Tokenizer

_TURN = "A-TURN-OF-THE-ASSISTANT"  # what no template changes, and nobody else writes
_BEGINNING: list[Message] = [{"role": "user", "content": "question"}]
_ASSISTANT: Message = {"role": "assistant", "content": _TURN}


class ChatReplies:
    """Encodes messages with one of `roles` that follow a turn of the assistant, up to where the next turn begins.

    `end_id` is the token with which the template ends an assistant's turn. It must be a special token, because the
    policy has to end its turn there.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, roles: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._roles = tuple(roles)
        self._tools = list(tools) if tools else None
        for role in self._roles:
            self._check_growth(role, role)
        for role, next_role in itertools.permutations(self._roles, 2):
            self._check_growth(role, next_role)
        self.end_id = self._find_end()
        self._ends = tokenizer.stop_ids | {self.end_id}

    def encode(self, messages: Sequence[Message], last_token: int | None) -> list[int]:
        """The tokens of these messages. `last_token` is the last of the turn before, which may have ended it."""
        for message in messages:
            self._check_message(message)
        tokens = self._tokenizer.encode(self._between([self._clean(message) for message in messages]), special=False)
        if last_token in self._ends:
            return tokens[1:]  # the policy ended the turn itself
        return tokens

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(messages, tools=self._tools, add_generation_prompt=True)

    def _between(self, messages: Sequence[Message]) -> str:
        """What follows an assistant's turn when these messages do."""
        _, _, text = self._render([*_BEGINNING, _ASSISTANT, *messages]).partition(_TURN)
        return text

    def _check_growth(self, role: str, next_role: str) -> None:
        """A reply with one role, another turn, and a reply with the other: each time, text is only added."""
        reply = [_example(role, "first")]
        next_reply = [_example(next_role, "second")]
        try:
            short = self._render([*_BEGINNING, _ASSISTANT, *reply])
            long = self._render([*_BEGINNING, _ASSISTANT, *reply, _ASSISTANT, *next_reply])
            grows = short == self._render(_BEGINNING) + _TURN + self._between(reply)
            grows &= long == short + _TURN + self._between(next_reply)
        except TokenizerError as error:
            raise self._refuse(next_role, str(error)) from error
        if not grows:
            raise self._refuse(
                next_role, "what it writes for the beginning of a conversation depends on how it goes on"
            )

    def _find_end(self) -> int:
        role = self._roles[0]
        tokens = self._tokenizer.encode(self._between([_example(role, "x")]), special=False)
        if tokens[0] not in self._tokenizer.special_ids:
            raise self._refuse(role, "it does not end the assistant's turn with a special token")
        return tokens[0]

    def _refuse(self, role: str, why: str) -> TokenizerError:
        return TokenizerError(
            f"the chat template of {self._tokenizer.name} cannot be used for replies with the role {role!r}: {why}"
        )

    def _check_message(self, message: Any) -> None:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise TypeError(f"a reply has messages such as {{'role': ..., 'content': text}}, not {message!r:.80}")
        if message.get("role") not in self._roles:
            expected = " or ".join(map(repr, self._roles))
            raise ValueError(f"a message of a reply has the role {message.get('role')!r}, expected {expected}")

    def _clean(self, message: Message) -> Message:
        """Without special tokens that its texts spell out: with them, a tool's result could pose as another turn."""
        return {
            key: self._without_special(value) if isinstance(value, str) else value for key, value in message.items()
        }

    def _without_special(self, text: str) -> str:
        cleaned = self._special.sub("", text)
        while cleaned != text:  # what is left may spell another one
            text, cleaned = cleaned, self._special.sub("", cleaned)
        return text

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        special = self._tokenizer.special_ids
        texts = sorted((text for text, id in self._tokenizer.vocab.items() if id in special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _example(role: str, content: str) -> Message:
    return {"role": role, "name": "tool", "content": content}
