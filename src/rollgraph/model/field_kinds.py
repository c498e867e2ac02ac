"""Reads fields of a Hugging Face `config.json`: the values that each may have, and the error for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollgraph.config.keys import MAX_SIZES
from rollgraph.errors import InvalidInput

REQUIRED: Any = object()  # as a default: the field must be present
_HUGE = 1e300  # JSON has integers that no float can hold


class ArchitectureError(InvalidInput):
    """A config.json that the decoder cannot be built from."""


class FieldKind(NamedTuple):
    """The values that a field may have."""

    description: str
    accepts: Callable[[Any], bool]


def positive_int(what: str) -> FieldKind:
    """A positive integer, at most `MAX_SIZES[what]`."""
    largest = MAX_SIZES[what]
    return FieldKind(f"a positive integer up to {largest}", lambda v: type(v) is int and 0 < v <= largest)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value < _HUGE


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_flat_object(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(isinstance(item, Mapping) for item in value.values())


TEXT = FieldKind("a string", lambda v: isinstance(v, str))
TEXTS = FieldKind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v))
FLAG = FieldKind("true or false", lambda v: isinstance(v, bool))
NATURAL = FieldKind("an integer of at least 0", lambda v: type(v) is int and v >= 0)
POSITIVE = FieldKind("a positive number", _is_positive)
POSITIVE_OR_NULL = FieldKind("a positive number or null", lambda v: v is None or _is_positive(v))
NOT_NEGATIVE = FieldKind("a number of at least 0", lambda v: _is_number(v) and v >= 0)
ABOVE_ONE = FieldKind("a number above 1", lambda v: _is_number(v) and v > 1)
OPTIONS = FieldKind("an object with one set of options for all layers", _is_flat_object)


def take_field(fields: dict[str, Any], name: str, kind: FieldKind, default: Any = REQUIRED) -> Any:
    """Remove a field and return its value. Null is accepted if the default is None."""
    if name not in fields:
        if default is REQUIRED:
            raise ArchitectureError(f"config.json has no {name!r}")
        return default
    value = fields.pop(name)
    if value is None and default is None:
        return None
    if not kind.accepts(value):
        raise ArchitectureError(f"config.json: {name}={value!r:.80}: must be {kind.description}")
    return value
