"""Ctrl-C while a run takes its steps: pressed once, the step ends first and is saved; pressed again, it ends at once.

Python raises KeyboardInterrupt between any two operations, also between an update and the note of it, where neither the
step before nor the step itself could be saved any more. Here it is raised where something can be saved.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from rollgraph.distributed.world import World

_REPEATED = 5.0  # seconds: torchrun sends every rank again what the terminal has sent to all of them


class Interrupts:
    """Inside, and once steps `begin`, Ctrl-C calls `ask` and is said on the terminal; a second one raises.

    Where it is `held`, it takes a third one. On leaving without an exception, KeyboardInterrupt is raised if Ctrl-C
    had been pressed. Whoever does not leave Ctrl-C to Python, or is not the main thread, keeps what there is.
    """

    def __init__(self, ask: Callable[[], None], world: World) -> None:
        self._ask, self._world = ask, world
        self._pressed, self._first = 0, 0.0
        self._begun = self._late = self._installed = False
        self._depth = 0  # of `held`

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """From now on there is something to save; gives `held`."""
        self._begun = True
        return self.held

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return self
        try:
            signal.signal(signal.SIGINT, self._count)
            self._installed = True
        except ValueError:  # not the main thread: somebody else's matter
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._pressed and kind is None:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the second Ctrl-C is put off to the end: what happens in here happens as a whole."""
        self._depth += 1
        try:
            yield
        except BaseException:
            self._late = False  # it ends already
            raise
        finally:
            self._depth -= 1
        if self._late and not self._depth:
            self._late = False
            raise KeyboardInterrupt

    def _count(self, number: int, frame: Any) -> None:
        if not self._begun:
            raise KeyboardInterrupt
        if self._pressed and self._world.size > 1 and time.monotonic() - self._first < _REPEATED:
            return
        self._pressed += 1
        if self._pressed == 1:
            self._first = time.monotonic()
            self._ask()
            later = f", {_REPEATED:g} s from now or later" * (self._world.size > 1)
            self._say(f"Ctrl-C: the run is saved and ends after this step; once more{later}, and it ends at once")
        elif self._pressed == 2 and self._depth:
            self._late = True
            self._say("Ctrl-C: the run ends after this update; once more, and the update is lost")
        else:
            raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            os.write(2, f"\n{text}\n".encode())  # print might be what was interrupted
