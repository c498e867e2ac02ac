"""The tokens that a chat template puts between two assistant turns.

We never render or tokenize sampled tokens again. So a reply is rendered alone, after a placeholder for the assistant's
turn, and only the text after the placeholder is used. This is correct if the template only appends: the text of a
conversation must begin with the text of every shorter one. We check that before we use a template.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Message, Tokenizer

_TURN_PLACEHOLDER = "A-TURN-OF-THE-ASSISTANT"  # no template changes it, and nobody else writes it
_OPENING: list[Message] = [{"role": "user", "content": "question"}]
_ASSISTANT: Message = {"role": "assistant", "content": _TURN_PLACEHOLDER}


class ReplyEncoder:
    """Encodes the messages between two assistant turns, such as tool results. Each message has one of `roles`.

    `end_id` is the token that ends an assistant turn in this template. It must be a special token, because the policy
    has to end its turn with it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, roles: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._roles = tuple(roles)
        self._tools = list(tools) if tools else None
        for role in self._roles:
            self._check_append_only(role, role)
        for role, next_role in itertools.permutations(self._roles, 2):
            self._check_append_only(role, next_role)
        self.end_id = self._find_end_id()
        self._end_ids = tokenizer.stop_ids | {self.end_id}

    def encode(self, messages: Sequence[Message], last_token: int | None) -> list[int]:
        """The tokens of these messages, up to the start of the next assistant turn.

        `last_token` is the last token of the previous assistant turn. If it ended that turn, the end is not repeated.
        """
        for message in messages:
            self._check_message(message)
        tokens = self._tokenizer.encode(
            self._render_reply([self._strip_message(message) for message in messages]), special=False
        )
        if last_token in self._end_ids:
            return tokens[1:]  # the policy ended the turn itself
        return tokens

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(messages, tools=self._tools, add_generation_prompt=True)

    def _render_reply(self, messages: Sequence[Message]) -> str:
        """The text after an assistant turn that is followed by these messages."""
        _, _, text = self._render([*_OPENING, _ASSISTANT, *messages]).partition(_TURN_PLACEHOLDER)
        return text

    def _check_append_only(self, role: str, next_role: str) -> None:
        """Check with a reply, another turn and a second reply that the template only appends text."""
        reply = [_example(role, "first")]
        next_reply = [_example(next_role, "second")]
        try:
            first = self._render([*_OPENING, _ASSISTANT, *reply])
            both = self._render([*_OPENING, _ASSISTANT, *reply, _ASSISTANT, *next_reply])
            only_appends = first == self._render(_OPENING) + _TURN_PLACEHOLDER + self._render_reply(reply)
            only_appends &= both == first + _TURN_PLACEHOLDER + self._render_reply(next_reply)
        except TokenizerError as error:
            raise self._unusable_template(next_role, str(error)) from error
        if not only_appends:
            raise self._unusable_template(
                next_role, "its text for the start of a conversation depends on later messages"
            )

    def _find_end_id(self) -> int:
        role = self._roles[0]
        tokens = self._tokenizer.encode(self._render_reply([_example(role, "x")]), special=False)
        if tokens[0] not in self._tokenizer.special_ids:
            raise self._unusable_template(role, "it does not end the assistant's turn with a special token")
        return tokens[0]

    def _unusable_template(self, role: str, why: str) -> TokenizerError:
        return TokenizerError(
            f"the chat template of {self._tokenizer.name} cannot be used for replies with the role {role!r}: {why}"
        )

    def _check_message(self, message: Any) -> None:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise TypeError(f"a reply has messages such as {{'role': ..., 'content': text}}, not {message!r:.80}")
        if message.get("role") not in self._roles:
            expected = " or ".join(map(repr, self._roles))
            raise ValueError(f"a message of a reply has the role {message.get('role')!r}, expected {expected}")

    def _strip_message(self, message: Message) -> Message:
        """Remove special tokens from the texts of a message. With them, a tool result could fake another turn."""
        return {
            key: self._strip_special_tokens(value) if isinstance(value, str) else value
            for key, value in message.items()
        }

    def _strip_special_tokens(self, text: str) -> str:
        cleaned = self._special_pattern.sub("", text)
        while cleaned != text:  # the remaining text may spell another one
            text, cleaned = cleaned, self._special_pattern.sub("", cleaned)
        return text

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        special = self._tokenizer.special_ids
        texts = sorted((text for text, id in self._tokenizer.vocab.items() if id in special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _example(role: str, content: str) -> Message:
    return {"role": role, "name": "tool", "content": content}
