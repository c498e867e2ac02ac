"""The ledger of a translation: their keys, what became of each, and our keys as they come together.

Owns that every key of theirs gets exactly one line: the first that is written stays.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollgraph.compat.composed_yaml import plain
from rollgraph.compat.nemo.keys import TABLE, Ignored, To
from rollgraph.config.yaml_tree import Node


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
    text: str  # our key and its value, or the reason


class Ledger:
    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.leaves = dict(_leaves(tree, ""))
        self.lines: dict[str, LedgerLine] = {}
        self.ours: dict[str, Any] = {}
        self.causes: dict[str, list[str]] = {}  # of a key of ours: those of theirs
        self.to_do: list[str] = []

    @property
    def megatron(self) -> bool:
        """Which of their two backends the file is for."""
        return bool(self.get("policy.megatron_cfg.enabled"))

    @property
    def ranks(self) -> int:
        return (self.count("cluster.num_nodes") or 1) * (self.count("cluster.gpus_per_node") or 1)

    def node(self, key: str) -> Node:
        """Of a key with dots; null at the place of what should hold it, where it is not there."""
        node = self.tree
        for name in key.split("."):
            if not isinstance(node.value, dict) or name not in node.value:
                return Node(None, node.place)
            node = node.value[name]
        return node

    def get(self, key: str) -> Any:
        return plain(self.node(key))

    def number(self, key: str) -> int | None:
        """A whole number; anything else is refused, and as good as not there."""
        value = self.get(key)
        if value is not None and type(value) is not int:
            self.refuse(key, f"expected a whole number, got {value!r}")
            return None
        return value

    def count(self, key: str) -> int | None:
        """The same, from 1."""
        value = self.number(key)
        if value is not None and value < 1:
            self.refuse(key, f"expected a whole number ≥ 1, got {value}")
            return None
        return value

    def below(self, *prefixes: str) -> list[str]:
        """Their keys that begin so."""
        return [key for key in self.leaves if key.startswith(prefixes)]

    def put(self, ours: str, value: Any) -> None:
        """Set a key of ours, to what it can take."""
        *sections, name = ours.split(".")
        inside = self.ours
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value

    def translate(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Set a key of ours because of one of theirs, if that is there and has no line yet.

        A value that ours cannot take is taken back when everything is there.
        """
        if key in self.leaves and key not in self.lines:
            self.put(ours, value)
            self.causes.setdefault(ours, []).append(key)
            self.write(Status.TRANSLATED, key, f"{ours}: {short(value)}{f' ({note})' if note else ''}")

    def ignore(self, key: str, reason: str) -> None:
        self.write(Status.IGNORED, key, reason)

    def refuse(self, key: str, reason: str) -> None:
        self.write(Status.UNSUPPORTED, key, reason)

    def finish(self) -> None:
        """Look up in the table what has no line yet; then every key has one."""
        for key in self.leaves:
            if key not in self.lines:
                self._by_table(key, plain(self.leaves[key]))

    def take_back(self, ours: str, reason: str) -> bool:
        """Unset a key of ours, or the one that holds it, and refuse those of theirs that set it; False if none did."""
        while ours and ours not in self.causes:
            ours = ours.rpartition(".")[0]
        for key in self.causes.pop(ours, ()):
            self.lines[key] = replace(self.lines[key], status=Status.UNSUPPORTED, text=reason)
        if ours:
            self._unset(self.ours, ours.split("."))
        return bool(ours)

    def _unset(self, inside: dict[str, Any], names: list[str]) -> None:
        if names[1:]:
            self._unset(inside[names[0]], names[1:])
        if not names[1:] or not inside[names[0]]:  # no section is left empty
            del inside[names[0]]

    def write(self, status: Status, key: str, text: str) -> None:
        if key in self.leaves and key not in self.lines:
            node = self.leaves[key]
            self.lines[key] = LedgerLine(status, node.place, key, plain(node), text)

    def _by_table(self, key: str, value: Any) -> None:
        rule = next((rule for pattern, rule in TABLE if fnmatch.fnmatchcase(key, pattern)), None)
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
            self.ignore(key, "as it is here anyway")
        else:
            self.refuse(key, rule.reason)


def _leaves(node: Node, key: str) -> Iterator[tuple[str, Node]]:
    """Every key that has a value, with dots. A list is one value."""
    if isinstance(node.value, dict) and (node.value or not key):
        for name, inner in node.value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, node


def short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
