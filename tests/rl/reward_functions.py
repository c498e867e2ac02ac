"""Rewards that misbehave, for workers on a cluster."""

from __future__ import annotations

import os
import time
from typing import Any


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def hangs(completions: list[str], **_: Any) -> list[float]:
    if "hang" in completions:
        time.sleep(600)
    return [1.0] * len(completions)


def crashes(completions: list[str], **_: Any) -> list[float]:
    if "crash" in completions:
        os._exit(3)
    return [2.0] * len(completions)


def raises(completions: list[str], **_: Any) -> list[float]:
    if "raise" in completions:
        raise KeyError("no such answer")
    return [3.0] * len(completions)


def kills_host_once(completions: list[str], marker: str, **_: Any) -> list[float]:
    """The first call kills its host, as a failing node would."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return [4.0] * len(completions)
    with open(f"{marker}.host") as file:
        os.kill(int(file.read()), 9)
    time.sleep(600)
    return []
