"""The loop of a cluster run at the machine of whoever started it: events in, orders out, and the view in between.

Decides nothing (`lifecycle.py` does) and knows no Ray (`ray_transport.py` does).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rollgraph.cluster.lifecycle import Lifecycle, Phase
from rollgraph.cluster.messages import Event, Order, Tell, TellWaiting
from rollgraph.cluster.news import Shown
from rollgraph.run.stop import StopRequest
from rollgraph.telemetry import View

_LOOK_EVERY = 0.25  # seconds between two looks at the time and at requests to stop


class Transport(Protocol):
    """How orders reach workers, and news the driver."""

    def send(self, order: Order) -> None: ...

    def wait(self, seconds: float) -> Sequence[Event | Shown]:
        """What has happened; waits for something to happen, but no longer than this."""

    def describe_room(self, ranks: Sequence[int]) -> str:
        """What these ranks wait for."""


def drive(lifecycle: Lifecycle, transport: Transport, view: View, stop: StopRequest) -> None:
    """Run until the lifecycle is over."""

    def carry_out(orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Tell():
                    view.note(order.text)
                case TellWaiting():
                    view.note(transport.describe_room(order.ranks))
                case _:
                    transport.send(order)

    asked = False
    carry_out(lifecycle.start(time.monotonic()))
    while lifecycle.phase is not Phase.OVER:
        for event in transport.wait(_LOOK_EVERY):
            if isinstance(event, Shown):
                getattr(view, event.method)(*event.arguments, **event.options)
            else:
                carry_out(lifecycle.handle(event, time.monotonic()))
        carry_out(lifecycle.tick(time.monotonic()))
        if stop.requested and not asked:
            asked = True
            carry_out(lifecycle.stop(time.monotonic()))
