"""The ledger of a translation: one line for each key of a NeMo-RL config, which says what became of it.

Owns the rule that each key gets exactly one line (the first one written stays), and the table of keys that are
translated independently of other keys.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollgraph.compat.nemo.keys import TABLE, Ignored, Rule, To
from rollgraph.config.yaml_tree import Node, strip_locations


class Status(StrEnum):
    TRANSLATED = "translated"
    IGNORED = "ignored"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class LedgerLine:
    """What became of one key. For example `LedgerLine(Status.TRANSLATED, "a.yaml:3", "grpo.seed", 42, "seed: 42")`."""

    status: Status
    location: str  # file:line
    key: str
    value: Any
    text: str  # rollgraph's key and its value, or the reason


class Ledger:
    """Collects rollgraph's settings and one line per key.

    In the methods, `key` is a dotted key of NeMo-RL, and `target` a dotted key of rollgraph.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.leaves = dict(_leaves(tree, ""))
        self.lines: dict[str, LedgerLine] = {}
        self.settings: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}  # key of rollgraph -> the keys of NeMo-RL that set it
        self.to_do: list[str] = []

    @property
    def uses_megatron(self) -> bool:
        """Whether the file uses the Megatron backend; otherwise it uses DTensor's."""
        return bool(self.get("policy.megatron_cfg.enabled"))

    @property
    def ranks(self) -> int:
        return (self.positive_int("cluster.num_nodes") or 1) * (self.positive_int("cluster.gpus_per_node") or 1)

    def node(self, key: str) -> Node:
        """The node of a key; if it is missing, a null node at the location of the section without it."""
        node = self.tree
        for name in key.split("."):
            if not isinstance(node.value, dict) or name not in node.value:
                return Node(None, node.location)
            node = node.value[name]
        return node

    def get(self, key: str) -> Any:
        return strip_locations(self.node(key))

    def integer(self, key: str) -> int | None:
        """The value if it is an integer; anything else is refused and treated as missing."""
        value = self.get(key)
        if value is not None and type(value) is not int:
            self.refuse(key, f"expected a whole number, got {value!r}")
            return None
        return value

    def positive_int(self, key: str) -> int | None:
        """The value if it is an integer of at least 1; anything else is refused and treated as missing."""
        value = self.integer(key)
        if value is not None and value < 1:
            self.refuse(key, f"expected a whole number ≥ 1, got {value}")
            return None
        return value

    def keys_below(self, *prefixes: str) -> list[str]:
        """NeMo-RL's keys with one of these prefixes."""
        return [key for key in self.leaves if key.startswith(prefixes)]

    def set_key(self, target: str, value: Any) -> None:
        """Set one of rollgraph's keys to a value that is known to be valid."""
        *sections, name = target.split(".")
        mapping = self.settings
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[name] = value

    def translate(self, key: str, target: str, value: Any, note: str = "") -> None:
        """Set one of rollgraph's keys because of `key`, if the file has that and it has no line yet.

        If rollgraph does not accept the value, `take_back` unsets it once the translation is complete.
        """
        if key not in self.leaves or key in self.lines:
            return
        self.set_key(target, value)
        self.sources.setdefault(target, []).append(key)
        text = f"{target}: {short_yaml(value)}"
        if note:
            text += f" ({note})"
        self.add_line(Status.TRANSLATED, key, text)

    def ignore(self, key: str, reason: str) -> None:
        self.add_line(Status.IGNORED, key, reason)

    def refuse(self, key: str, reason: str) -> None:
        self.add_line(Status.UNSUPPORTED, key, reason)

    def add_line(self, status: Status, key: str, text: str) -> None:
        """Add the line of a key, if the file has the key and it has no line yet."""
        if key in self.leaves and key not in self.lines:
            node = self.leaves[key]
            self.lines[key] = LedgerLine(status, node.location, key, strip_locations(node), text)

    def finish(self) -> None:
        """Apply the table to all keys without a line; afterwards every key has one."""
        for key in self.leaves:
            if key not in self.lines:
                self._apply(_find_rule(key), key, strip_locations(self.leaves[key]))

    def revoke(self, target: str, reason: str) -> bool:
        """Unset one of rollgraph's keys, or its nearest parent that was set, and refuse NeMo-RL's keys that set it.

        Returns False if no key of NeMo-RL set it.
        """
        while target and target not in self.sources:
            target = target[: max(target.rfind("."), target.rfind("["), 0)]
        for key in self.sources.pop(target, ()):
            self.lines[key] = replace(self.lines[key], status=Status.UNSUPPORTED, text=reason)
        if target:
            self._unset(self.settings, target.split("."))
        return bool(target)

    def _unset(self, mapping: dict[str, Any], names: list[str]) -> None:
        if names[1:]:
            self._unset(mapping[names[0]], names[1:])
        if not names[1:] or not mapping[names[0]]:  # leave no empty section
            del mapping[names[0]]

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
    """Every dotted key with a value. A list is one value."""
    if isinstance(node.value, dict) and (node.value or not key):
        for name, inner in node.value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, node


def short_yaml(value: Any) -> str:
    """A value as in YAML, truncated to 80 characters."""
    text = str(value)
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= 80 else f"{text[:77]}..."
