"""The ledger of a translation: NeMo-RL's keys, what became of each, and rollgraph's keys as they accumulate.

Owns the rule that each of NeMo-RL's keys gets exactly one line: the first one written stays.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollgraph.compat.nemo.keys import TABLE, Ignored, Rule, To
from rollgraph.config.yaml_tree import Node, strip_places


class Status(StrEnum):
    TRANSLATED = "translated"
    IGNORED = "ignored"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class LedgerLine:
    """What became of one key, for example `LedgerLine(Status.TRANSLATED, "a.yaml:3", "grpo.seed", 42, "seed: 42")`."""

    status: Status
    place: str  # file:line
    key: str
    value: Any
    text: str  # rollgraph's key and its value, or the reason


class Ledger:
    """In its methods, `key` is one of NeMo-RL's keys and `ours` one of rollgraph's, both with dots."""

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.leaves = dict(_leaves(tree, ""))
        self.lines: dict[str, LedgerLine] = {}
        self.ours: dict[str, Any] = {}
        self.causes: dict[str, list[str]] = {}  # a key of rollgraph's -> the keys that set it
        self.to_do: list[str] = []

    @property
    def megatron(self) -> bool:
        """Whether the file uses the Megatron backend; otherwise it uses DTensor's."""
        return bool(self.get("policy.megatron_cfg.enabled"))

    @property
    def ranks(self) -> int:
        return (self.count("cluster.num_nodes") or 1) * (self.count("cluster.gpus_per_node") or 1)

    def node(self, key: str) -> Node:
        """The node of a key, or a null node at the place of the section where it is missing."""
        node = self.tree
        for name in key.split("."):
            if not isinstance(node.value, dict) or name not in node.value:
                return Node(None, node.place)
            node = node.value[name]
        return node

    def get(self, key: str) -> Any:
        return strip_places(self.node(key))

    def number(self, key: str) -> int | None:
        """A whole number; anything else is refused and treated as missing."""
        value = self.get(key)
        if value is not None and type(value) is not int:
            self.refuse(key, f"expected a whole number, got {value!r}")
            return None
        return value

    def count(self, key: str) -> int | None:
        """A whole number of at least 1; anything else is refused and treated as missing."""
        value = self.number(key)
        if value is not None and value < 1:
            self.refuse(key, f"expected a whole number ≥ 1, got {value}")
            return None
        return value

    def below(self, *prefixes: str) -> list[str]:
        """NeMo-RL's keys with one of these prefixes."""
        return [key for key in self.leaves if key.startswith(prefixes)]

    def put(self, ours: str, value: Any) -> None:
        """Set one of rollgraph's keys, to a value that it accepts."""
        *sections, name = ours.split(".")
        inside = self.ours
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value

    def translate(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Set one of rollgraph's keys because of `key`, if the file has that and it has no line yet.

        If rollgraph does not accept the value, `take_back` unsets it once the translation is complete.
        """
        if key not in self.leaves or key in self.lines:
            return
        self.put(ours, value)
        self.causes.setdefault(ours, []).append(key)
        text = f"{ours}: {short(value)}"
        if note:
            text += f" ({note})"
        self.write(Status.TRANSLATED, key, text)

    def ignore(self, key: str, reason: str) -> None:
        self.write(Status.IGNORED, key, reason)

    def refuse(self, key: str, reason: str) -> None:
        self.write(Status.UNSUPPORTED, key, reason)

    def write(self, status: Status, key: str, text: str) -> None:
        """Write the line of a key, if the file has it and it has none yet."""
        if key in self.leaves and key not in self.lines:
            node = self.leaves[key]
            self.lines[key] = LedgerLine(status, node.place, key, strip_places(node), text)

    def finish(self) -> None:
        """Look up the keys without a line in the table; afterwards every key has one."""
        for key in self.leaves:
            if key not in self.lines:
                self._apply(_find_rule(key), key, strip_places(self.leaves[key]))

    def take_back(self, ours: str, reason: str) -> bool:
        """Unset a key of rollgraph's, or the nearest one above it that was set, and refuse the keys that set it.

        Returns False if no key of NeMo-RL's set it.
        """
        while ours and ours not in self.causes:
            ours = ours[: max(ours.rfind("."), ours.rfind("["), 0)]
        for key in self.causes.pop(ours, ()):
            self.lines[key] = replace(self.lines[key], status=Status.UNSUPPORTED, text=reason)
        if ours:
            self._unset(self.ours, ours.split("."))
        return bool(ours)

    def _unset(self, inside: dict[str, Any], names: list[str]) -> None:
        if names[1:]:
            self._unset(inside[names[0]], names[1:])
        if not names[1:] or not inside[names[0]]:  # leave no empty section
            del inside[names[0]]

    def _apply(self, rule: Rule | None, key: str, value: Any) -> None:
        if rule is None:
            self.refuse(key, "not known here")
        elif isinstance(rule, To):
            try:
                self.translate(key, rule.key, rule.convert(value))
            except (TypeError, ValueError):
                self.refuse(key, f"{value!r} cannot be {rule.key}")
        elif isinstance(rule, Ignored):
            self.ignore(key, rule.reason)
        elif any(type(value) is type(known) and value == known for known in rule.values):
            self.ignore(key, "same as in rollgraph")
        else:
            self.refuse(key, rule.reason)


def _find_rule(key: str) -> Rule | None:
    for pattern, rule in TABLE:
        if fnmatch.fnmatchcase(key, pattern):
            return rule
    return None


def _leaves(node: Node, key: str) -> Iterator[tuple[str, Node]]:
    """Every key that has a value, with dots. A list is one value."""
    if isinstance(node.value, dict) and (node.value or not key):
        for name, inner in node.value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, node


def short(value: Any) -> str:
    """A value as YAML would spell it, cut to 80 characters."""
    text = str(value)
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= 80 else f"{text[:77]}..."
