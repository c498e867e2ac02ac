"""`rollgraph config`: print a resolved configuration, the JSON schema or a table of all keys, or import a config."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from rollgraph.commands.config_arguments import add_words
from rollgraph.config import ConfigError, Key, json_schema, list_keys, load_config, spell, to_yaml
from rollgraph.files import FileError, check_path
from rollgraph.run.built_in_names import wrong_names

DONE, BROKEN = 0, 2


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "config",
        help="print the resolved configuration of a run, or import one from NeMo-RL",
        usage="%(prog)s [--schema | --keys] [FILE [key=value ...]]\n       %(prog)s import THEIRS [-o OURS]",
        description="Check a configuration and print it as YAML, with everything it inherits and all defaults. "
        "With `import`, translate a GRPO config of NeMo-RL and list what became of each of its keys. "
        f"Exit code: {DONE} if it is valid, {BROKEN} if not; each problem is one line on standard error.",
    )
    add_words(parser, "rollout.temperature=0.7", nargs="?")
    parser.add_argument(
        "-o", "--output", metavar="OURS", help="new file to which `import` writes; default: standard output"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--schema", action="store_true", help="print the JSON schema of configuration files, for editors"
    )
    shape.add_argument("--keys", action="store_true", help="print a table of all keys, as Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.schema:
        print(json.dumps(json_schema(), indent=2))
        return DONE
    if options.keys:
        print(key_tables())
        return DONE
    if options.config == "import":
        return import_theirs(options.overrides, options.output)
    if options.output is not None:
        instead = f"the folder of a run is output={options.output}"
        print(f"rollgraph config: -o only works with import; {instead}", file=sys.stderr)
        return BROKEN
    if options.config is None or ("=" in options.config and not Path(options.config).is_file()):
        print("rollgraph config: expected the YAML file of a run, --schema or --keys", file=sys.stderr)
        return BROKEN
    try:
        print(to_yaml(load_config(options.config, options.overrides, wrong_names)), end="")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BROKEN
    return DONE


def import_theirs(files: Sequence[str], output: str | None) -> int:
    """Print the translated YAML and what became of each key.

    With `output`, the YAML goes to that file and the rest to standard output; otherwise the YAML goes to standard
    output and the rest to standard error.
    """
    from rollgraph.compat.nemo import import_nemo

    if len(files) != 1:
        print("rollgraph config import: expected one file, a GRPO config of NeMo-RL", file=sys.stderr)
        return BROKEN
    try:
        found = import_nemo(files[0])
        if output is not None:
            with Path(check_path(output)).open("x", encoding="utf-8") as file:
                file.write(found.to_yaml())
    except FileExistsError:
        print(f"{output} exists and is not overwritten; choose another name or remove it", file=sys.stderr)
        return BROKEN
    except (ConfigError, FileError, OSError) as error:
        print(error, file=sys.stderr)
        return BROKEN
    if output is None:
        print(found.to_yaml(), end="")
    print(found.describe(), file=sys.stderr if output is None else sys.stdout)
    return DONE


def key_tables() -> str:
    """Markdown: a table for the top level, then one for each section."""
    tables: dict[str, list[Key]] = {"": []}
    descriptions: dict[str, str] = {}
    for key in list_keys():
        kind = spell(key.kind)
        if kind.startswith("section"):
            descriptions[key.name] = key.text
        if kind != "section":  # a section that may be null, or a list of sections, is a value as well
            section = key.name.rpartition(".")[0]
            tables.setdefault(section, []).append(key)
    blocks = []
    for section, keys in tables.items():
        title = f"`{section}`" if section else "Top level"
        lines = [f"### {title}", ""]
        if section:
            entry = f"An entry of `{section.removesuffix('[]')}`."
            lines += [descriptions.get(section, entry), ""]
        lines += ["| key | value | default | description |", "|---|---|---|---|"]
        for key in keys:
            lines.append(f"| `{key.name}` | {_cell(spell(key.kind))} | {_default(key)} | {_cell(key.text)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "required"
    if key.default and isinstance(key.default, str):
        return f"`{key.default}`"
    return f"`{json.dumps(key.default)}`"


def _cell(text: str) -> str:
    return text.replace(" | ", ", ").replace("|", "\\|")
