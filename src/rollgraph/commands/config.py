"""`rollgraph config`: print a resolved configuration, its JSON schema or a table of all keys, or import a config."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from rollgraph.commands.arguments import add_config_arguments
from rollgraph.config import ConfigError, Key, describe_type, json_schema, list_keys, load_config, to_yaml
from rollgraph.files import FileError, check_path
from rollgraph.inputs.built_in_names import find_name_problems

DONE, BROKEN = 0, 2


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "config",
        help="print the resolved configuration of a run, or import one from NeMo-RL",
        usage="%(prog)s [--schema | --keys] [FILE [key=value ...]]\n       %(prog)s import THEIRS [-o OURS]",
        description="Check a configuration and print it as YAML, with inherited values and all defaults. "
        "With `import`, translate a GRPO config of NeMo-RL and list how each key was translated. "
        f"Exit code: {DONE} if it is valid, {BROKEN} if not. Each problem is one line on standard error.",
    )
    add_config_arguments(parser, "rollout.temperature=0.7", nargs="?")
    parser.add_argument(
        "-o", "--output", metavar="OURS", help="new file for the result of `import` (default: standard output)"
    )
    listing = parser.add_mutually_exclusive_group()
    listing.add_argument(
        "--schema", action="store_true", help="print the JSON schema of configuration files, for editors"
    )
    listing.add_argument("--keys", action="store_true", help="print a table of all keys, as Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.schema:
        print(json.dumps(json_schema(), indent=2))
        return DONE
    if options.keys:
        print(key_tables())
        return DONE
    if options.config == "import":
        return import_nemo_config(options.overrides, options.output)
    if options.output is not None:
        hint = f"the folder of a run is output={options.output}"
        print(f"rollgraph config: -o only works with import; {hint}", file=sys.stderr)
        return BROKEN
    if options.config is None or ("=" in options.config and not Path(options.config).is_file()):
        print("rollgraph config: expected the YAML file of a run, --schema or --keys", file=sys.stderr)
        return BROKEN
    try:
        print(to_yaml(load_config(options.config, options.overrides, find_name_problems)), end="")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BROKEN
    return DONE


def import_nemo_config(files: Sequence[str], output: str | None) -> int:
    """Print the translated YAML, and a report of how each key was translated.

    With `output`, the YAML goes to that file and the report to standard output. Otherwise the YAML goes to standard
    output and the report to standard error.
    """
    from rollgraph.compat.nemo import import_nemo

    if len(files) != 1:
        print("rollgraph config import: expected one file, a GRPO config of NeMo-RL", file=sys.stderr)
        return BROKEN
    try:
        translation = import_nemo(files[0])
        if output is not None:
            with Path(check_path(output)).open("x", encoding="utf-8") as file:
                file.write(translation.to_yaml())
    except FileExistsError:
        print(f"{output} exists and is not overwritten; choose another name or remove it", file=sys.stderr)
        return BROKEN
    except (ConfigError, FileError, OSError) as error:
        print(error, file=sys.stderr)
        return BROKEN
    if output is None:
        print(translation.to_yaml(), end="")
    print(translation.describe(), file=sys.stderr if output is None else sys.stdout)
    return DONE


def key_tables() -> str:
    """A Markdown table of the top-level keys, then one for each section."""
    tables: dict[str, list[Key]] = {"": []}
    descriptions: dict[str, str] = {}
    for key in list_keys():
        kind = describe_type(key.kind)
        if kind.startswith("section"):
            descriptions[key.name] = key.text
        if kind != "section":  # a section that may be null, or a list of sections, is also a value
            section = key.name.rpartition(".")[0]
            tables.setdefault(section, []).append(key)
    blocks = []
    for section, keys in tables.items():
        title = f"`{section}`" if section else "Top level"
        lines = [f"### {title}", ""]
        if section:
            entry_text = f"An entry of `{section.removesuffix('[]')}`."
            lines += [descriptions.get(section, entry_text), ""]
        lines += ["| key | value | default | description |", "|---|---|---|---|"]
        for key in keys:
            lines.append(f"| `{key.name}` | {_cell(describe_type(key.kind))} | {_default(key)} | {_cell(key.text)} |")
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
