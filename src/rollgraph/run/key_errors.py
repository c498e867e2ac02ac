"""Reports errors by the configuration keys that people wrote, where code has arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollgraph.config import ConfigError
from rollgraph.errors import InvalidInput


@contextmanager
def about(section: str) -> Iterator[None]:
    """An error about an argument names the key `section.argument` instead; any other error names the section."""
    whole = section.removesuffix(".options")
    try:
        yield
    except ConfigError:
        raise
    except InvalidInput as error:
        named = error.renamed(lambda argument: f"{section}.{argument}")
        if named.argument is None:
            named = type(error)(named.detail, argument=whole, place=named.place, alternative=named.alternative)
        raise named from error
    except ImportError as error:
        raise ImportError(f"{whole}: {error}", name=error.name) from error
    except ValueError as error:
        raise ValueError(f"{whole}: {error}") from error
