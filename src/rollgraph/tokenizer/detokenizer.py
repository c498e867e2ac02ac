"""A stream of ids as text, while it is still growing."""

from __future__ import annotations

from collections.abc import Sequence

from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """A stream of ids as text, each part given out once no later id can change it.

    Only the last ids are decoded again. What is new is the difference between two decodings that begin at the same
    id, so it does not matter that decoders treat their first id apart.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that have been given out
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All that has been given out."""
        return "".join(self._pieces)

    def push(self, id: int) -> str:
        """The text that has become certain with this id, most often its own."""
        if self._finished:
            raise TokenizerError("this stream was finished; make a new Detokenizer")
        if self._skip_special and id in self._tokenizer.special_ids:
            return ""
        if id in self._tokenizer.byte_ids:
            self._window.append(id)  # a run of these is decoded as a whole: one byte more can break all of it
            return ""
        text = self._decode([*self._window, id])
        self._window.append(id)
        # Bytes of an unfinished character decode to one U+FFFD at the end, and only this can still change.
        certain = len(text) - text.endswith("\ufffd")
        self._pieces.append(text[self._given : certain])
        self._given = certain
        if certain == len(text):
            self._window = [id]  # context enough for what follows
            self._given = len(self._decode(self._window))
        elif len(self._window) > 8:  # invalid bytes without end; an unfinished character has three at most
            self._window = self._window[-3:]
            self._given = len(self._decode(self._window)) - 1
        return self._pieces[-1]

    def pending(self) -> str:
        """What `finish` would give now, without an unfinished character at its end."""
        return self._decode(self._window)[self._given :].rstrip("\ufffd")

    def finish(self) -> str:
        """The rest, now that nothing follows."""
        self._pieces.append(self._decode(self._window)[self._given :])
        self._window, self._given, self._finished = [], 0, True
        return self._pieces[-1]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
