"""What ranks have told each other, by key. The first text under a key counts, and old keys are forgotten."""

from __future__ import annotations

from collections.abc import ItemsView

_MOST = 100  # keys that are remembered


class Announcements:
    """The announcements that one rank knows of."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def add(self, key: str, text: str) -> bool:
        """Whether it is the first one under its key."""
        is_first = key not in self._texts
        self._texts.setdefault(key, text)
        while len(self._texts) > _MOST:
            del self._texts[next(iter(self._texts))]
        return is_first

    def first(self, key: str, text: str) -> str:
        """The text that counts: this one, if there is none yet."""
        self.add(key, text)
        return self._texts[key]

    def get(self, key: str) -> str | None:
        return self._texts.get(key)

    def items(self) -> ItemsView[str, str]:
        return self._texts.items()
