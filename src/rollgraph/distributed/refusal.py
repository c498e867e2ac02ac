"""A note in the store of `torchrun` that says why it is no use to start the ranks again.

`torchrun --max-restarts` starts all ranks again after any error. If what a person gave was wrong, the next attempt
would load, capture and fail like the one before. The store outlives the ranks, so the rank that fails leaves the reason
in it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rollgraph.distributed.exit_codes import is_users
from rollgraph.errors import UserError

_KEY = "rollgraph/refused"


class RefusedBefore(UserError):
    """An earlier attempt of the same run failed because of what a person gave."""


def refuse_retries(store: Any, error: BaseException) -> None:
    """Leave a note if trying again would not help."""
    if _outlives_ranks(store) and is_users(error) and not isinstance(error, RefusedBefore):
        with suppress(RuntimeError):  # the store is gone, and nobody will start the ranks again either
            store.set(_KEY, str(error))


def raise_if_refused(store: Any) -> None:
    """Raise if an earlier attempt left a note."""
    if not _outlives_ranks(store):
        return
    with suppress(RuntimeError):  # the store is gone: joining says so
        if store.check([_KEY]):
            raise RefusedBefore(f"an earlier attempt failed, and so would this one: {store.get(_KEY).decode()}")


def _outlives_ranks(store: Any) -> bool:
    return store is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
