"""Rules for names in the source: one concept per public name, and results named for what they hold."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/rollgraph"
VAGUE = {"found", "given", "made", "wanted", "place", "own", "other"}
MOST_LINES = 5  # the longest that a vague name may live
# Entry points of programs, and the name of a function of another library.
SHARED = {"main", "make_graphed_callables"}
KEYS = {("config/keys.py", "place"), ("compat/graph_keys.py", "place")}  # keys of YAML and JSON

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_trees(root: Path) -> dict[str, ast.Module]:
    """Every module of the package. Starters are programs of their own."""
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
    return {name: ast.parse(path.read_text("utf-8")) for name, path in files.items() if "starters/" not in name}


def find_homonyms(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public functions and classes that two packages define, with their files."""
    files: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and node.name not in SHARED:
                files[node.name].append(file)
    return {name: named for name, named in files.items() if len({file.split("/")[0] for file in named}) > 1}


def find_vague(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Parameters and fields with a vague name, and variables that have one for more than a few lines."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            lines: dict[str, list[int]] = defaultdict(list)
            for inner in ast.walk(node):
                if isinstance(inner, ast.arg) and inner.arg in VAGUE and not node.name.startswith("__"):
                    yield inner.lineno, inner.arg
                elif isinstance(inner, ast.Name) and inner.id in VAGUE:
                    lines[inner.id].append(inner.lineno)
            for name, uses in lines.items():
                if max(uses) - min(uses) > MOST_LINES:
                    yield min(uses), name
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id in VAGUE:
                    yield field.lineno, field.target.id


def test_no_public_name_is_in_two_packages() -> None:
    assert find_homonyms(read_trees(SOURCE)) == {}


def test_results_are_named_for_what_they_hold() -> None:
    vague = {
        f"{file}:{line} {name}"
        for file, tree in read_trees(SOURCE).items()
        for line, name in find_vague(tree)
        if (file, name) not in KEYS
    }
    assert vague == set()


def test_the_checker_finds_homonyms() -> None:
    trees = {"a/x.py": "def pack(): ...", "b/y.py": "class pack: ...", "b/z.py": "def _pack(): ...\ndef main(): ..."}
    parsed = {file: ast.parse(source) for file, source in trees.items()}
    assert find_homonyms(parsed) == {"pack": ["a/x.py", "b/y.py"]}


def test_the_checker_finds_vague_names() -> None:
    long_lived = "def f():\n    found = g()\n" + "    h()\n" * 5 + "    return found\n"
    assert list(find_vague(ast.parse(long_lived))) == [(2, "found")]
    assert list(find_vague(ast.parse("def f():\n    found = g()\n    return found\n"))) == []
    assert list(find_vague(ast.parse("def f(given): ...\nclass R:\n    place: int\n"))) == [(1, "given"), (3, "place")]
    assert list(find_vague(ast.parse("class R:\n    def __eq__(self, other): ...\n"))) == []
