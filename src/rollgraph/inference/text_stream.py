"""The text of a completion while it grows: decoded token by token and cut at the first stop string.

Knows nothing of requests, sequences or steps.
"""

from __future__ import annotations

from rollgraph.tokenizer import Detokenizer


class TextStream:
    """`text` is all text so far. `push` gives each part of it once, when no later token can change it any more."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self.text = ""
        self.stopped = False  # whether a stop string is complete
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest_stop = max(map(len, stops), default=0)
        self._given = 0  # characters of the text that `push` has given

    def push(self, token: int | None, *, last: bool) -> str:
        """Add a token, or None for an id that has no text, and give the text that is now final.

        `last` says that no token follows.
        """
        before = len(self.text)
        if token is not None:
            self.text += self._detokenizer.push(token)
        if last:
            self.text += self._detokenizer.finish()
        self._cut_at_stop(before, last)
        final = len(self.text)
        if not self.stopped and not last:
            final -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        new = self.text[self._given : final]
        self._given = final
        return new

    def finish(self) -> None:
        """Add the text that the detokenizer holds back, because the completion ends here."""
        self.text += self._detokenizer.finish()

    def _cut_at_stop(self, before: int, last: bool) -> None:
        """Search the text from `before` on, and what the detokenizer holds back, for a stop string."""
        text = self.text
        if self._stops and not last:
            text += self._detokenizer.pending()
        found = [text.find(stop, max(0, before - self._longest_stop)) for stop in self._stops]
        places = [place for place in found if place >= 0]
        if places:
            self.text = text[: min(places)]
            self.stopped = True


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
