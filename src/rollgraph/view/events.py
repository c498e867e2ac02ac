"""Tells the page when a run has grown: server-sent events, from a look at the files once a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from rollgraph.view.catalog import Catalog

INTERVAL = 1.0  # seconds between two looks
BUSY = 0.05  # the same while a large file is being indexed
PATIENCE = 0.5  # seconds of indexing after which the page is told how far it has come
TICK = 0.25  # seconds after which the end of the server is noticed
QUIET = 15  # looks without news, after which a comment keeps the connection open


async def stream_events(catalog: Catalog, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """`data: {"run": id, "size": bytes, "status": text, "first": bool}` for each run that has changed.

    At first all runs are told: what the page knows may be older than the connection, if that was lost for some time.
    """
    yield ": hello\n\n"
    seen: dict[str, Any] = {}
    for change in await run_in_threadpool(look, catalog, seen):
        yield event(change, first=True)
    quiet = 0
    while await pause(catalog, is_ending):
        changed = await run_in_threadpool(look, catalog, seen)
        for change in changed:
            yield event(change, first=False)
        quiet = 0 if changed else quiet + 1
        if quiet == QUIET:
            quiet = 0
            yield ": still here\n\n"


async def pause(catalog: Catalog, is_ending: Callable[[], bool]) -> bool:
    """Wait until the next look; False if there will be none."""
    left = INTERVAL if all(run.is_indexed for run in catalog.known()) else BUSY
    while left > 0 and not is_ending():
        await asyncio.sleep(min(TICK, left))
        left -= TICK
    return not is_ending()


def event(change: dict[str, Any], *, first: bool) -> str:
    return f"data: {json.dumps({**change, 'first': first})}\n\n"


def look(catalog: Catalog, seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs whose files or state differ from what was `seen`, which is brought up to date."""
    changed = []
    runs = catalog.find()
    for run in runs:
        run.catch_up(PATIENCE)
        with run.opened():
            files = [(index.covered, index.replaced) for index in (run.metrics, run.samples)]
            state = (files, run.status)
            change = {"run": run.id, "size": run.size, "status": run.status}
        if seen.get(run.id) != state:
            changed.append(change)
        seen[run.id] = state
    for id in set(seen) - {run.id for run in runs}:
        del seen[id]
        changed.append({"run": id, "size": 0, "status": "gone"})
    return changed
