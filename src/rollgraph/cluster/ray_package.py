"""The package Ray, which is optional, and the connection of this process to a cluster."""

from __future__ import annotations

import builtins
import importlib
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

INSTALL = "pip install 'rollgraph[ray]'"


def import_ray(key: str) -> Any:
    """The package, for what a configuration key asks for."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f"{key} needs Ray, which cannot be imported ({error}): {INSTALL}", name="ray") from error


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Ray may connect inside. It then handles SIGTERM by an exit, which would end a run unsaved; that is taken back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # otherwise a handler that Python does not know
            with suppress(ValueError):  # not the main thread, in which Ray handles no signals either
                signal.signal(signal.SIGTERM, before)


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
        with keeping_sigterm():
            ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "no Ray cluster could be started" if address is None else f"no Ray cluster answers at {address}"
        raise ConnectionError(f"cluster.address: {where} ({error})") from error
    try:
        yield ray
    finally:
        ray.shutdown()
        builtins.print = own_print
