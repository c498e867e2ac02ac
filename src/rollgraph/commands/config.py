"""`rollgraph config`: the resolved configuration of a run, its JSON schema, the table of all keys, or one of theirs."""

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
        help="show the resolved configuration of a run, or import one of NeMo-RL",
        usage="%(prog)s [--schema | --keys] [FILE [key=value ...]]\n       %(prog)s import THEIRS [-o OURS]",
        description="Check a configuration and print it with everything it inherits and all defaults, as YAML. "
        "With `import`, translate a GRPO config of NeMo-RL and list what became of each of its keys. "
        f"Exit code: {DONE} it is right, {BROKEN} something is wrong; every problem has its line on standard error.",
    )
    add_words(parser, "rollout.temperature=0.7", nargs="?")
    parser.add_argument(
        "-o", "--output", metavar="OURS", help="a new file that import writes; default: standard output"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--schema", action="store_true", help="print the JSON schema of such files, for editors")
    shape.add_argument("--keys", action="store_true", help="print a table of all keys, as Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.schema or options.keys:
        print(json.dumps(json_schema(), indent=2) if options.schema else key_tables())
        return DONE
    if options.config == "import":
        return import_theirs(options.overrides, options.output)
    if options.output is not None:
        print("rollgraph config: -o is for import", file=sys.stderr)
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
    """YAML and what became of each key: to a file and standard output, or to standard output and standard error."""
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
        print(f"{output} exists and is not overwritten: name another, or remove it", file=sys.stderr)
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
    titles = {"": "Top level"}
    for key in list_keys():
        if spell(key.kind).startswith("section"):
            titles[key.name] = f"`{key.name}`: {key.text}"
        if spell(key.kind) != "section":  # a section that may be null, or a list of sections, is a value as well
            tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    blocks = []
    for section, keys in tables.items():
        rows = [f"| `{key.name}` | {_cell(spell(key.kind))} | {_default(key)} | {_cell(key.text)} |" for key in keys]
        title = titles.get(section, f"`{section}`: an entry of the list")
        blocks.append("\n".join([f"### {title}", "", "| key | value | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(blocks)


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "required"
    value = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"`{value if value and isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace(" | ", ", ").replace("|", "\\|")
