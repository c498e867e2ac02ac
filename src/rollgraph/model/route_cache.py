"""Routes on disk, so that a later start need not find them again. `ROLLGRAPH_CACHE` says in which folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgraph.files import write_atomically
from rollgraph.model.products import Route

_PROBE = 5  # raise it when the probe or a way changes: what was found before is then not used any more


class RouteCache:
    """What was found, by device, versions of the libraries, dtype of a weight, row counts and shape."""

    def __init__(self, weight: Tensor, at_any_cost: bool) -> None:
        self._key = [_PROBE, _device_name(weight.device), *_versions(), str(weight.dtype), at_any_cost]
        self._path: Path | None = None
        self._entries: dict[str, list[tuple[int, Route]]] = {}
        self._changed = False
        if weight.device.type == "cuda":  # elsewhere the probe takes no time worth saving
            self._path = cache_path()
        if self._path is not None:
            self._entries = self._read(self._path)

    @staticmethod
    def _read(path: Path) -> dict[str, list[tuple[int, Route]]]:
        """What the file says, or nothing: a cache that cannot be read is no reason to stop."""
        try:
            stored = json.loads(path.read_text())
            return {
                key: [(int(rows), Route(str(way), int(padded), int(tiling))) for rows, (way, padded, tiling) in entries]  # type: ignore[arg-type]
                for key, entries in stored.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def get(self, shape: tuple[Any, ...], counts: Sequence[int]) -> dict[int, Route] | None:
        entries = self._entries.get(self._key_of(shape, counts))
        return None if entries is None else dict(entries)

    def put(self, shape: tuple[Any, ...], counts: Sequence[int], routes: dict[int, Route]) -> None:
        self._entries[self._key_of(shape, counts)] = list(routes.items())
        self._changed = True

    def _key_of(self, shape: tuple[Any, ...], counts: Sequence[int]) -> str:
        return json.dumps([*self._key, list(shape), list(counts)], default=str)

    def save(self) -> None:
        if self._path is None or not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self._entries, indent=1))
        except OSError:
            return


def cache_path() -> Path | None:
    """Where routes are kept; None if the user has no home, as in some containers."""
    folder = os.environ.get("ROLLGRAPH_CACHE")
    if folder:
        return Path(folder) / "products.json"
    try:
        return Path.home() / ".cache" / "rollgraph" / "products.json"
    except RuntimeError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _versions() -> list[str]:
    try:
        import triton

        kernels = str(triton.__version__)
    except ImportError:
        kernels = ""
    return [torch.__version__, str(torch.version.cuda), str(torch.backends.cuda.preferred_blas_library()), kernels]
