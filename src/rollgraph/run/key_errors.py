"""Errors by the names people wrote: keys of the configuration, where code has arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rollgraph.config import ConfigError
from rollgraph.model import ArchitectureError
from rollgraph.rl.data import DataError
from rollgraph.rl.paths import LoadError


@contextmanager
def about(section: str, *arguments: str) -> Iterator[None]:
    """What is raised inside about one of these arguments, or about one that is required, names the key
    `section.argument` instead; about anything else, it begins with the section."""
    names = "|".join(map(re.escape, arguments)) or "(?!)"
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:
        named = re.sub(rf"(?<![\w.'\"])((?:{names})(?==| is )|\w+(?= is required))", rf"{section}.\1", str(error))
        kinds = (DataError, LoadError, ArchitectureError, ImportError, ValueError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        raise kind(named if named != str(error) else f"{section.removesuffix('.options')}: {error}") from error
