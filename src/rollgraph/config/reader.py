"""A YAML file becomes dataclasses: places of values, inheritance, overrides, and everything that is wrong at once.

Owns how files are read and printed, whatever their keys are. PyYAML is imported when a file is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from rollgraph import files
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.schema import COMMAS, PATH, Limit, hints_of, keys_of, spell, unwrap
from rollgraph.files import DEEPEST, TOO_DEEP, FileError, MissingFile

MOST_VALUES = 30_000  # of a file: aliases and interpolations can multiply a few lines without end
MOST_DIGITS = 4300  # of a whole number: Python converts no longer ones
LARGEST_NUMBER = 2**63 - 1


T = TypeVar("T")


class Node(NamedTuple):
    """A value of the file, and where it stands: `run.yaml:3`, or `override 'steps=3'`."""

    value: Any  # None, bool, int, float, str, list[Node] or dict[str, Node]
    place: str


@dataclass
class Budget:
    """How many values a file may still have."""

    left: int = MOST_VALUES

    def spend(self, place: str, depth: int = 0) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConfigError([f"{place}: there are more than {MOST_VALUES} values, with those that aliases repeat"])
        if depth > DEEPEST:
            raise ConfigError([f"{place}: not YAML that can be used: {TOO_DEEP}"])


@dataclass(frozen=True)
class Chain:
    """The files that named the one that is being read, and the trees of all that have been read."""

    above: tuple[Path, ...] = ()
    loaded: dict[Path, Node] = field(default_factory=dict)  # one that is named often is read once


def load_tree(path: Path, text: str | None = None, chain: Chain | None = None) -> Node:
    """A file, or a text in its place, merged with those it names under `defaults`."""
    if text is None:
        text = read_text(path)
    tree = _compose(text, f"{path}:{{line}}")
    if tree.value is None:  # an empty file
        tree = Node({}, tree.place)
    if not isinstance(tree.value, dict):
        raise ConfigError([f"{tree.place}: expected keys, got {_got(tree)}"])
    return merge_bases(tree, path, chain or Chain(), lambda other, chain: load_tree(other, None, chain), _merge, _got)


def read_text(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileError as error:
        raise ConfigError([str(error)]) from None


def merge_bases(
    tree: Node,
    path: Path,
    chain: Chain,
    load: Callable[[Path, Chain], Node],
    merge: Callable[[Node, Node], Node],
    describe: Callable[[Node], str],
) -> Node:
    """The tree of a file over those of the files it names under `defaults`, which `load` reads; `chain` named it."""
    bases = tree.value.pop("defaults", Node([], tree.place))
    inner = Chain((*chain.above, path.resolve()), chain.loaded)
    merged = Node({}, tree.place)
    for base in bases.value if isinstance(bases.value, list) else [bases]:
        if not isinstance(base.value, str):
            raise ConfigError([f"{base.place}: defaults: expected the path of a file, got {describe(base)}"])
        other = _find_base(path.parent / base.value, base.place, inner.above)
        resolved = other.resolve()
        if resolved not in chain.loaded:
            chain.loaded[resolved] = load(other, inner)
        merged = merge(merged, chain.loaded[resolved])
    return merge(merged, tree)


def _find_base(other: Path, place: str, above: tuple[Path, ...]) -> Path:
    """A file that is named under `defaults`, if it can be read and is none of those that named it."""
    try:
        files.regular_file(other)
    except MissingFile:
        raise ConfigError([f"{place}: defaults: there is no file {other}"]) from None
    except FileError as error:
        raise ConfigError([f"{place}: defaults: {error}"]) from None
    if other.resolve() in above:
        names = " -> ".join(step.name for step in (*above, other))
        raise ConfigError([f"{place}: defaults: files name each other: {names}"])
    if len(above) > DEEPEST:
        raise ConfigError([f"{place}: defaults: more than {DEEPEST} files name one another"])
    return other


def _compose(text: str, place: str) -> Node:
    """The tree of a text; `place` may have a {line}."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    problems: list[str] = []
    budget = Budget()

    def at(mark: Any) -> str:
        return place.replace("{line}", str(mark.line + 1 if mark else 1))

    def scalar(node: Any, here: str) -> Any:
        try:
            return _scalar(node.value) if node.style is None else node.value
        except ValueError as error:
            problems.append(f"{here}: {error}")

    def convert(node: Any, depth: int = 0) -> Node:
        here = at(node.start_mark)
        budget.spend(here, depth)
        if not re.fullmatch(r"tag:yaml\.org,2002:[a-z]+", node.tag):
            problems.append(f"{here}: the tag {node.tag} is not supported")
        if isinstance(node, yaml.ScalarNode):
            return Node(scalar(node, here), here)
        if isinstance(node, yaml.SequenceNode):
            return Node([convert(item, depth + 1) for item in node.value], here)
        found: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in found:
                wrong = f"{key.value}: given twice" if isinstance(key, yaml.ScalarNode) else "a key must be text"
                problems.append(f"{at(key.start_mark)}: {wrong}")
                continue
            # A value may start on a later line than its key, which is where people look.
            found[key.value] = convert(value, depth + 1)._replace(place=at(key.start_mark))
        return Node(found, here)

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = Node(None, at(None)) if root is None else convert(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([f"{at(error.problem_mark)}: not YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{at(None)}: not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{at(None)}: not YAML that can be used: {TOO_DEEP}"]) from None
    if problems:
        raise ConfigError(problems)
    return tree


def _scalar(text: str) -> Any:
    """The value of an unquoted word, by YAML 1.2: unlike PyYAML, 1e-6 is a number, and `no` and `on` are text."""
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "~", "null"):
        return None
    if re.fullmatch(r"[-+]?[0-9][0-9_]*", text) and not text.endswith("_") and "__" not in text:
        if len(text) > MOST_DIGITS:
            raise ValueError(f"the number {text[:20]}... has more than {MOST_DIGITS} digits")
        return int(text)
    if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) and math.isfinite(float(text)):
        return float(text)
    return text


def _is_text(text: str) -> bool:
    """Whether a word that is not quoted is read as itself."""
    try:
        return bool(_scalar(text) == text)
    except ValueError:
        return False


def _merge(base: Node, top: Node) -> Node:
    """Mappings key by key; anything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    both = {name: _merge(base.value[name], node) if name in base.value else node for name, node in top.value.items()}
    return Node({**base.value, **both}, top.place)


def _put(tree: Node, names: Sequence[str], leaf: Node) -> Node:
    if not names:
        return leaf
    inside, place = (tree.value, tree.place) if isinstance(tree.value, dict) else ({}, leaf.place)
    below = _put(inside.get(names[0], Node({}, leaf.place)), names[1:], leaf)
    return Node({**inside, names[0]: below}, place)


def read_tree(
    kind: type[T], tree: Node, overrides: Sequence[str], rules: Callable[[T], list[tuple[str, str, str]]]
) -> T:
    """The dataclass of a tree; `rules` gives (rule, key, what is wrong) for each rule across keys that is broken."""
    reader = _Reader(kind)
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        place = f"override {_cut(repr(override))}"
        try:
            if not equals or not all(names):
                raise ConfigError([f"{place}: expected key=value"])
            tree = _put(tree, names, _compose(text, place))
        except ConfigError as error:
            reader.problems += error.problems
    config: T = reader.section(kind, tree, "")
    if not reader.problems:
        for rule, key, wrong in rules(config):
            reader.problems.append(ConfigProblem(wrong, key, reader.place(key), rule))
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


_WRONG = object()


class _Reader:
    """Turns nodes into dataclasses, collecting what is wrong on the way."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.problems: list[ConfigProblem] = []
        self.places: dict[str, str] = {}

    def place(self, key: str) -> str:
        while key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key]

    def section(self, kind: Any, node: Node, key: str) -> Any:
        self.places[key] = node.place
        hints, dot = hints_of(kind), f"{key}." if key else ""
        before = len(self.problems)
        for name in [name for name in node.value if name not in hints]:
            detail = f"unknown key; {_nearest(name, dot, hints, self.root)}"
            self.problems.append(ConfigProblem(detail, dot + name, node.value[name].place))
        values = {}
        for item in fields(kind):
            inner, _ = unwrap(hints[item.name])
            if item.name in node.value:
                values[item.name] = self.read(hints[item.name], node.value[item.name], dot + item.name)
            elif is_dataclass(inner):
                values[item.name] = self.section(inner, Node({}, node.place), dot + item.name)
            elif item.default is MISSING and item.default_factory is MISSING:
                self.problems.append(ConfigProblem("required, but missing", dot + item.name, node.place))
        return kind(**values) if len(self.problems) == before else _WRONG

    def read(self, kind: Any, node: Node, key: str) -> Any:
        self.places[key] = node.place
        before = len(self.problems)
        value = self._convert(kind, node, key)
        if value is _WRONG and len(self.problems) == before:
            self.problems.append(ConfigProblem(f"expected {spell(kind)}, got {_got(node)}", key, node.place))
        return value

    def _convert(self, kind: Any, node: Node, key: str) -> Any:
        kind, notes = unwrap(kind)
        origin, args, value = get_origin(kind), get_args(kind), node.value
        if origin in (Union, UnionType):
            return None if value is None else self._convert(args[0], node, key)
        if is_dataclass(kind):
            return self.section(kind, node, key) if isinstance(value, dict) else _WRONG
        if origin is tuple:
            if COMMAS in notes and isinstance(value, str):
                value = [Node(part.strip(), node.place) for part in value.split(",")]
            fixed = args[-1] is not Ellipsis
            if not isinstance(value, list) or (fixed and len(value) != len(args)):
                return _WRONG
            kinds = args if fixed else args[:1] * len(value)
            return tuple(self.read(*pair, f"{key}[{i}]") for i, pair in enumerate(zip(kinds, value, strict=True)))
        if origin is Mapping:
            return self._mapping(node, key) if isinstance(value, dict) else _WRONG
        if origin is Literal:
            return value if value in args else _WRONG
        if kind in (int, float) and type(value) is int and abs(value) > LARGEST_NUMBER:
            self.problems.append(ConfigProblem(f"{_got(node)} is larger than 2^63 - 1", key, node.place))
            return _WRONG
        if kind is float and type(value) is int:
            value = float(value)
        if PATH in notes and isinstance(value, str) and "\0" in value:
            detail = f"a path cannot hold a NUL character, got {_got(node)}"
            self.problems.append(ConfigProblem(detail, key, node.place))
            return _WRONG
        limits = [note for note in notes if isinstance(note, Limit)]
        return value if type(value) is kind and all(limit.holds(value) for limit in limits) else _WRONG

    def _mapping(self, node: Node, key: str) -> Any:
        """Of any keys; rules can be about some of them."""
        self.places |= {f"{key}.{name}": inner.place for name, inner in node.value.items()}
        return _plain(node)


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {name: _plain(inner) for name, inner in node.value.items()}
    return [_plain(inner) for inner in node.value] if isinstance(node.value, list) else node.value


def _nearest(name: str, dot: str, names: Mapping[str, Any], root: Any) -> str:
    import difflib

    if near := difflib.get_close_matches(name, names, 1):
        return f"did you mean {dot}{near[0]}?"
    elsewhere = {key.name.rpartition(".")[2]: key.name for key in reversed(list(keys_of(root)))}
    if near := difflib.get_close_matches(name, elsewhere, 1, 0.8):
        return f"did you mean {elsewhere[near[0]]}?"
    return f"expected one of {', '.join(names)}"


def _got(node: Node) -> str:
    if isinstance(node.value, str):
        return f"the text {_cut(repr(node.value))}"
    if isinstance(node.value, list):
        return f"a list of {len(node.value)}"
    return "a mapping" if isinstance(node.value, dict) else _cut(json.dumps(node.value))


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}..."


def to_dict(config: Any) -> dict[str, Any]:
    """Of dicts, lists, strings and numbers: what JSON and YAML can hold."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(inner) for name, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, tuple | list) else value

    return {name: plain(value) for name, value in asdict(config).items()}


def to_yaml(config: Any) -> str:
    """The resolved configuration; reading it gives an equal one."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
        def represent_text(self, text: str) -> Any:
            style = None if _is_text(text) else "'"  # or it would be read as a number
            if not text.isprintable():
                style = '"'  # the only one that keeps every kind of line break
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))
