"""What a worker has to tell its driver, kept until the driver asks for it.

A driver asks every worker all the time, and a worker answers when there is news or when a moment has passed. So news
arrives at once, a worker that does not answer is noticed, and a step costs no call.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollgraph.cluster.messages import Outcome


@dataclass(frozen=True)
class Shown:
    """A call of a method of the view."""

    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTaken:
    attempt: int
    step: int


@dataclass(frozen=True)
class AttemptEnded:
    attempt: int
    outcome: Outcome


News = Shown | StepTaken | AttemptEnded


class NewsBox:
    """Filled by the thread that trains, emptied by the one that answers the driver."""

    def __init__(self) -> None:
        self._news: list[News] = []
        self._progress: Shown | None = None  # only the latest counts, and it can wait
        self._arrived = threading.Condition()

    def put(self, news: News) -> None:
        with self._arrived:
            if self._progress is not None:
                self._news.append(self._progress)
                self._progress = None
            self._news.append(news)
            self._arrived.notify_all()

    def show_progress(self, progress: Shown) -> None:
        """Cheap enough for every token."""
        self._progress = progress

    def take(self, seconds: float) -> list[News]:
        """What there is, as soon as there is anything but progress, and at the latest after so many seconds."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._news), seconds)
            news = self._news
            self._news = []
            if self._progress is not None:
                news.append(self._progress)
                self._progress = None
            return news
