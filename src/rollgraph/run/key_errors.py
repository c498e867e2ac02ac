"""Errors by the names people wrote: keys of the configuration, where code has arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rollgraph.config import ConfigError
from rollgraph.errors import InvalidInput
from rollgraph.model import ArchitectureError


@contextmanager
def about(section: str, *arguments: str) -> Iterator[None]:
    """What is raised inside about an argument names the key `section.argument` instead; about anything else, it begins
    with the section."""
    names = "|".join(map(re.escape, arguments)) or "(?!)"
    begin = section.removesuffix(".options")
    try:
        yield
    except ConfigError:
        raise
    except InvalidInput as error:
        if error.argument is not None:
            raise error.renamed(lambda name: f"{section}.{name}") from error
        named = error.renamed(lambda name: f"{section}.{name}")
        raise type(error)(named.detail, argument=begin, place=named.place, alternative=named.alternative) from error
    except (ValueError, ImportError) as error:  # of parts whose errors have no fields yet
        text = re.sub(rf"(?<![\w.'\"])((?:{names})(?==| is ))", rf"{section}.\1", str(error))
        kinds = (ArchitectureError, ImportError, ValueError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        raise kind(text if text != str(error) else f"{begin}: {error}") from error
