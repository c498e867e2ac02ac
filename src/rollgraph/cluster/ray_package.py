"""The package Ray, which is optional, and the connection of this process to a cluster."""

from __future__ import annotations

import builtins
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollgraph.run.stop import sigterm_restored

INSTALL = "pip install 'rollgraph[ray]'"


def import_ray(key: str) -> Any:
    """The package, for what a configuration key asks for."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f"{key} needs Ray, which cannot be imported ({error}): {INSTALL}", name="ray") from error


@contextmanager
def connected(address: str | None, key: str, working_dir: str | None = None) -> Iterator[Any]:
    """Ray, connected to a cluster; a process that is connected already stays so, and to the same one.

    Afterwards `print` is Python's own again, and not Ray's.
    """
    ray = import_ray(key)
    if ray.is_initialized():
        yield ray
        return
    own_print = builtins.print
    try:
        environment = {"working_dir": working_dir} if working_dir is not None else None
        with sigterm_restored():  # Ray would end a run unsaved
            ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "no Ray cluster could be started" if address is None else f"no Ray cluster answers at {address}"
        raise ConnectionError(f"cluster.address: {where} ({error})") from error
    try:
        yield ray
    finally:
        ray.shutdown()
        builtins.print = own_print
