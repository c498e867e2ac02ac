"""Where indexes are kept between two looks at a run: a folder in the user's cache, one for each run.

An index is a header and arrays that are mapped into memory, so that opening it reads next to nothing. The header names
the generation of its arrays and is replaced last: whoever reads sees one generation or the other, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollgraph.files import write_atomically

FORMAT = 1  # of the files here; others are ignored, and written anew


@dataclass(frozen=True)
class SavedIndex:
    """What an index was saved as: numbers and names in `header`, and arrays by name."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


class IndexStore:
    """The saved indexes of one run. Without a `folder`, or where it cannot be written, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of_run(cls, run: Path) -> IndexStore:
        """In the folder that XDG_CACHE_HOME or ~/.cache names."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # there is no home
            return cls(None)
        key = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
        return cls(cache / "rollgraph" / "view" / key)

    def load(self, name: str) -> SavedIndex | None:
        """None if there is none, or none that can be used."""
        if self._folder is None:
            return None
        try:
            header = json.loads((self._folder / f"{name}.json").read_bytes())
            if header["format"] != FORMAT:
                return None
            arrays = {}
            for array in header["arrays"]:
                arrays[array] = np.load(self._place(name, header["generation"], array), mmap_mode="r")
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return SavedIndex(header, arrays)

    def save(self, name: str, index: SavedIndex) -> bool:
        """Whether it could be kept."""
        if self._folder is None:
            return False
        generation = secrets.token_hex(4)
        header = {**index.header, "format": FORMAT, "generation": generation, "arrays": list(index.arrays)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for array, values in index.arrays.items():
                np.save(self._place(name, generation, array), values, allow_pickle=False)
            write_atomically(self._folder / f"{name}.json", json.dumps(header))
        except OSError:
            return False
        self._remove_others(name, generation)
        return True

    def _place(self, name: str, generation: str, array: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.{generation}.{array}.npy"

    def _remove_others(self, name: str, generation: str) -> None:
        """Older arrays; who has mapped one keeps it."""
        assert self._folder is not None
        for path in self._folder.glob(f"{name}.*.npy"):
            if not path.name.startswith(f"{name}.{generation}."):
                with suppress(OSError):
                    path.unlink()
