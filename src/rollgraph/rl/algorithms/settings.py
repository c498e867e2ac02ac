"""Checks of an algorithm's settings, so that a mistake is found and named before a run starts."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rollgraph.errors import InvalidInput

PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


def check_types(settings: Any) -> None:
    """Check each field of a dataclass whose annotation is a plain type or a union of plain types.

    This matters because YAML 1.1 reads 1e-3 as text, and Python accepts True as a number.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        hint = hints[field.name]
        allowed = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if all(kind in PLAIN for kind in allowed):
            fits = type(value) in allowed or (type(value) is int and float in allowed)
            check(field.name, fits, value, " or ".join(PLAIN[kind] for kind in allowed))


def check(name: str, fits: bool, value: object, expected: str) -> None:
    if not fits:
        raise InvalidInput(f"expected {expected}, got {value!r}", argument=name)
