"""A configuration as text again: plain values for JSON, or YAML that reads back as an equal configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollgraph.config.yaml_tree import reads_as_text


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as dicts, lists, strings and numbers: what JSON and YAML can hold."""
    return {name: _plain(value) for name, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value


def to_yaml(config: Any) -> str:
    """The resolved configuration; reading it gives an equal one."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
        def represent_text(self, text: str) -> Any:
            style = None
            if not reads_as_text(text):
                style = "'"  # otherwise it would be read as a number
            if not text.isprintable():
                style = '"'  # the only style that keeps every kind of line break
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))
