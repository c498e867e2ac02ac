"""Checks of settings, so that a mistake in a file is found before a run starts and is named."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rollgraph.errors import InvalidInput

PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


def check_types(settings: Any) -> None:
    """Each field of a dataclass against its annotation, where that is a plain type or a choice of some.

    YAML reads 1e-3 as a text, and Python takes True for a number.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        allowed = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if all(kind in PLAIN for kind in allowed):
            fits = type(value) in allowed or (type(value) is int and float in allowed)
            check(field.name, fits, value, " or ".join(PLAIN[kind] for kind in allowed))


def check(name: str, fits: bool, value: object, expected: str) -> None:
    if not fits:
        raise InvalidInput(f"expected {expected}, got {value!r}", argument=name)
