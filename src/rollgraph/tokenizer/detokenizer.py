"""Turns a growing stream of ids into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what the bytes of an incomplete character decode to
_LONGEST_WINDOW = 8  # ids; an incomplete character has at most three, so what is longer consists of invalid bytes


class Detokenizer:
    """Turns a stream of ids into text, and gives each part of it once no later id can change it.

    Only the last ids are decoded again. The new text is the difference between two decodings that begin at the same
    id, so it does not matter that a decoder may treat its first id in a special way.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []  # the ids that are decoded again
        self._given = 0  # characters of the window's text that have been given
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All text that has been given."""
        return "".join(self._pieces)

    def push(self, id: int) -> str:
        """Add an id and give the text that has become final, which is usually the text of this id."""
        if self._finished:
            raise TokenizerError("this stream is finished; make a new Detokenizer")
        if self._skip_special and id in self._tokenizer.special_ids:
            return ""
        if id in self._tokenizer.byte_ids:
            self._window.append(id)  # a run of bytes is decoded as a whole, because one more byte can change all of it
            return ""
        text = self._decode([*self._window, id])
        self._window.append(id)
        # The bytes of an incomplete character decode to one U+FFFD at the end, and only this can still change.
        final = len(text) - text.endswith(_REPLACEMENT)
        self._pieces.append(text[self._given : final])
        self._given = final
        if final == len(text):
            self._window = [id]  # enough context for the next id
            self._given = len(self._decode(self._window))
        elif len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-3:]
            self._given = len(self._decode(self._window)) - 1
        return self._pieces[-1]

    def pending(self) -> str:
        """The text that `finish` would give now, without an incomplete character at its end."""
        return self._decode(self._window)[self._given :].rstrip(_REPLACEMENT)

    def finish(self) -> str:
        """End the stream and give the rest of its text."""
        self._pieces.append(self._decode(self._window)[self._given :])
        self._window = []
        self._given = 0
        self._finished = True
        return self._pieces[-1]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def make_token_texts(tokenizer: Tokenizer) -> Callable[[Sequence[int]], list[str]]:
    """A function that gives the text of each of some ids; together they are the text of all.

    A text may be empty: a character of several ids is given with the one that completes it. A model may have more ids
    than its tokenizer; those are shown as numbers.
    """
    known = frozenset(tokenizer.vocab.values())

    def token_texts(ids: Sequence[int]) -> list[str]:
        stream = Detokenizer(tokenizer, skip_special=False)
        texts = [stream.push(id) if id in known else f"<{id}>" for id in ids]
        if texts:
            texts[-1] += stream.finish()
        return texts

    return token_texts
