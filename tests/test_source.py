"""Rules for the source: sizes of files, unique class names, and no parsing of exception messages."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rollgraph"
FILES = sorted(SOURCE.rglob("*.py"))
SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "sub", "split"}
TEXT_METHODS = {"startswith", "endswith", "replace", "removeprefix", "removesuffix", "find", "index", "count"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_top_level_has_few_files() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_files_are_of_readable_size() -> None:
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES)
    assert 150 < lengths[len(lengths) // 2] < 250
    assert lengths[-1] < 600


def test_every_class_name_occurs_once() -> None:
    names = Counter(node.name for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def parsed_messages(tree: ast.AST) -> Iterator[int]:
    """Lines that examine the text of a caught exception. Passing on the text, or its first line, is allowed."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for node in ast.walk(handler):
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
                if any(is_text_of(operand, handler.name) for operand in operands):
                    yield node.lineno
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            searched = (
                node.func.attr in SEARCHES and isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            )
            if searched and any(is_text_of(argument, handler.name) for argument in node.args):
                yield node.lineno
            if node.func.attr in TEXT_METHODS and is_text_of(node.func.value, handler.name):
                yield node.lineno


def is_text_of(node: ast.AST, name: str) -> bool:
    """Whether an expression is `str(name)` or `name.args[...]`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(isinstance(argument, ast.Name) and argument.id == name for argument in node.args)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "args":
        return isinstance(node.value.value, ast.Name) and node.value.value.id == name
    return False


def test_no_message_is_parsed() -> None:
    parsed = [f"{path.relative_to(SOURCE)}:{line}" for path in FILES for line in parsed_messages(parse(path))]
    assert parsed == []


@pytest.mark.parametrize(
    "code",
    [
        "'x' in str(e)",
        "re.search('x', str(e))",
        "str(e).startswith('x')",
        "e.args[0] == 'x'",
        "re.sub('a', 'b', str(e))",
    ],
)
def test_the_checker_finds_parsed_messages(code: str) -> None:
    assert list(parsed_messages(ast.parse(f"try:\n    f()\nexcept E as e:\n    g({code})"))) == [4]


def test_the_checker_allows_messages_to_be_passed_on() -> None:
    code = "try:\n    f()\nexcept E as e:\n    raise V(f'{e}', str(e), str(e).partition('x')[0]) from e"
    assert list(parsed_messages(ast.parse(code))) == []
