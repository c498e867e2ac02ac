"""Rules against contradictory settings: each has a name, and those about memory are documented and tested."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rollgraph"
MEMORY_KEYS = ("adapter.", "optimizer.offload", "optimizer.state", "memory", "model.checkpointing", "train.")


def named_rules() -> Iterator[tuple[str, str]]:
    """Every rule in the source, with its key."""
    for node in ast.walk(ast.parse((SOURCE / "config" / "rules.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
            rule, key, _ = node.value.elts
            assert isinstance(rule, ast.Constant)
            yield rule.value, key.value if isinstance(key, ast.Constant) else ""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "ConfigProblem":
                continue
            names = [
                keyword.value.value
                for keyword in node.keywords
                if keyword.arg == "rule" and isinstance(keyword.value, ast.Constant)
            ]
            keys = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            for name in names:
                yield name, keys[0] if keys else ""


def documented_rules() -> set[str]:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(\w+)` \| ", page.partition("## What is refused")[2], re.MULTILINE))


def test_every_documented_rule_about_memory_has_a_test() -> None:
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert {rule for rule in documented_rules() if not any(re.search(rf"\b{rule}\b", text) for text in tests)} == set()


def test_every_rule_about_memory_is_documented() -> None:
    known = dict(named_rules())
    assert documented_rules() <= known.keys()
    assert {rule for rule, key in known.items() if key.startswith(MEMORY_KEYS)} <= documented_rules()
    assert {"memory_fits", "offload_from_a_device"} <= documented_rules()
