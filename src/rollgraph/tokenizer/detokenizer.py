"""Decodes a growing stream of ids into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # the decoded text of an incomplete character
_LONGEST_WINDOW = 8  # ids; an incomplete character has at most three, so a longer window has invalid bytes


class Detokenizer:
    """Decodes a stream of ids. Text is returned once no later id can change it.

    Only the last few ids are decoded again. The new text is the difference between two decodings that begin at the same
    id. So it does not matter if a decoder treats the first id differently.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []  # the ids that are decoded again
        self._emitted = 0  # characters of the window's text that were returned already
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, id: int) -> str:
        """Add an id and return the text that is now final, usually the text of this id."""
        if self._finished:
            raise TokenizerError("this stream is finished; make a new Detokenizer")
        if self._skip_special and id in self._tokenizer.special_ids:
            return ""
        if id in self._tokenizer.byte_ids:
            self._window.append(id)  # a run of bytes is decoded as a whole, because one more byte can change all of it
            return ""
        text = self._decode([*self._window, id])
        self._window.append(id)
        # An incomplete character decodes to one U+FFFD at the end. Only that can still change.
        final = len(text) - text.endswith(_REPLACEMENT)
        self._pieces.append(text[self._emitted : final])
        self._emitted = final
        if final == len(text):
            self._window = [id]  # enough context for the next id
            self._emitted = len(self._decode(self._window))
        elif len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-3:]
            self._emitted = len(self._decode(self._window)) - 1
        return self._pieces[-1]

    def pending(self) -> str:
        """The text that `finish` would return now, without an incomplete character at its end."""
        return self._decode(self._window)[self._emitted :].rstrip(_REPLACEMENT)

    def finish(self) -> str:
        """End the stream and return its remaining text."""
        self._pieces.append(self._decode(self._window)[self._emitted :])
        self._window = []
        self._emitted = 0
        self._finished = True
        return self._pieces[-1]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def make_token_texts(tokenizer: Tokenizer) -> Callable[[Sequence[int]], list[str]]:
    """A function that returns the text of each id. Joined, they are the text of all ids.

    A text may be empty: a character of several ids belongs to the id that completes it. A model may have more ids than
    its tokenizer. Those are shown as numbers.
    """
    known_ids = frozenset(tokenizer.vocab.values())

    def token_texts(ids: Sequence[int]) -> list[str]:
        stream = Detokenizer(tokenizer, skip_special=False)
        texts = [stream.push(id) if id in known_ids else f"<{id}>" for id in ids]
        if texts:
            texts[-1] += stream.finish()
        return texts

    return token_texts
