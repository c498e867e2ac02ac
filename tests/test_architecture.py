"""Rules about imports, checked on the source without importing it.

The rules below are the architecture. A package imports only what its rule names, and a rule names only packages above
it. An import in a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "rollgraph"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE
MOST_FILES = 20  # in one folder

# What each package and top-level file may import of the others. A part of a package, such as `parallel/ranks`, may have
# a rule of its own.
RULES = {
    "types": "",
    "errors": "",
    "files": "errors",
    "config": "errors files",
    "log": "config errors files types",
    "graph": "",
    "tokenizer": "files",
    "parallel/ranks": "config errors log",
    "parallel/tensor/pieces": "",
    "parallel": "errors graph/hooks parallel/ranks parallel/tensor/pieces",
    "model": "config errors files graph/direct_sums parallel/tensor/pieces",
    "inference": "config errors graph model tokenizer",
    "rl": "config errors files log model/weights parallel tokenizer types",
    "checkpoint": "config errors files model parallel rl/data tokenizer",
    "policy": "errors graph inference log model parallel rl tokenizer types",
    "inputs": "checkpoint config errors inference model parallel policy rl tokenizer types",
    "plan": "checkpoint config files inference inputs model parallel policy rl",
    "run": "checkpoint config errors files inference inputs log model parallel plan policy rl tokenizer types",
    "train": "checkpoint config errors files inputs log parallel plan rl run types",
    "cluster": "config errors log parallel rl run train",
    "trainer": "config errors inputs log model parallel rl run train",
    "view": "files types",
    "compat": "config errors files graph inputs tokenizer",
    "commands": "checkpoint cluster compat config errors files graph inference inputs log model parallel plan policy "
    "rl run tokenizer train view",
    "cli": "commands log",
    "__main__": "cli",
    "__init__": "trainer",
}

# Leaves, each with the only files that may import it.
LEAVES = {
    "graph/sanitizer": "graph/__init__.py",
    "view": "commands/view.py",
    "compat": "commands/config.py commands/doctor.py",
    "starters": "",
}

# What a package may import besides the standard library; packages without an entry may import anything. In brackets:
# only inside functions and under TYPE_CHECKING, so that importing the package stays instant.
BASE = "torch numpy safetensors tokenizers numba"
EXTERNAL = {
    "types": "",
    "errors": "",
    "files": "",
    "config": "(yaml)",
    "log": "(torch) (pyarrow) (wandb) (mlflow) (rich) (IPython)",
    "graph": BASE,
    "tokenizer": f"{BASE} jinja2",
    "parallel/ranks": "(torch)",
    "parallel/ranks/join": BASE,
    "parallel": f"{BASE} triton",
    "model": f"{BASE} triton",
    "inference": f"{BASE} triton",
    "rl": f"{BASE} cloudpickle yaml",
    "checkpoint": BASE,
    "__init__": "",
}


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    name: str | None  # of `from module import name`
    lazy: bool


# -- reading the source ----------------------------------------------------------------------------


def read_files(root: Path) -> dict[str, list[Import]]:
    """The imports of each file below `root`."""
    files = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    return {file: list(read_imports(source, file)) for file, source in sorted(files.items())}


def read_imports(source: str, file: str) -> Iterator[Import]:
    package = [PACKAGE, *file.split("/")[:-1]]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: max(0, len(package) - node.level + 1)] if node.level else []
            outside = node.level and not base
            module = "" if outside else ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, module, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                yield from visit(statement, True)
            for statement in node.orelse:
                yield from visit(statement, lazy)
        else:
            lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, lazy)

    yield from visit(ast.parse(source, file), False)


def find_file(item: Import, files: dict[str, list[Import]]) -> str | None:
    """The file that an import reads. In `from package import name`, the name may be a module or not."""
    modules = [item.module] if item.name is None else [f"{item.module}.{item.name}", item.module]
    for module in modules:
        path = "/".join(module.split(".")[1:])
        for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if file in files:
                return file
    return None


def is_in(file: str, packages: str) -> bool:
    """Whether a file is in one of these packages, or is one of these files."""
    return any(f"{file.removesuffix('.py')}/".startswith(f"{package}/") for package in packages.split())


def package_of(file: str, packages: Iterable[str] = tuple(RULES)) -> str | None:
    """The innermost of these packages that contains the file."""
    return max((package for package in packages if is_in(file, package)), key=len, default=None)


# -- checking --------------------------------------------------------------------------------------


def find_violations(root: Path) -> list[str]:
    """Every violation in the package whose source is `root`, as `file:line: problem`."""
    files = read_files(root)
    violations = []
    for file, imports in files.items():
        package = package_of(file)
        if is_in(file, "starters"):
            continue
        if package is None:
            violations.append(f"{file}: is in no package that has a rule")
            continue
        for item in imports:
            if item.module.split(".")[0] == PACKAGE:
                problem = check_internal(file, package, item, files)
            else:
                problem = check_external(file, item)
            if problem:
                violations.append(f"{file}:{item.line}: imports {problem}")
    return violations + [f"{' -> '.join(cycle)}: import each other" for cycle in find_cycles(files)]


def check_internal(file: str, package: str, item: Import, files: dict[str, list[Import]]) -> str | None:
    target = find_file(item, files)
    if target is None:
        return f"{item.module}, which is not there"
    if file == "__init__.py" and not item.lazy:
        return f"{target}, and with it all that imports any part of {PACKAGE}"
    for leaf, importers in LEAVES.items():
        if is_in(target, leaf) and not is_in(file, leaf) and file not in importers.split():
            return f"{target} of the leaf {leaf}"
    if package_of(target) != package and not is_in(target, RULES[package]):
        return f"{target}, which {package} may not"
    return None


def check_external(file: str, item: Import) -> str | None:
    name = item.module.split(".")[0]
    if not name:
        return "from outside the package"
    package = package_of(file, EXTERNAL)
    if name in sys.stdlib_module_names or package is None:
        return None
    allowed = EXTERNAL[package].split()
    if f"({name})" in allowed:
        return None if item.lazy else f"{name} outside a function or TYPE_CHECKING"
    return None if name in allowed else f"{name}, which {package} may not"


def find_cycles(files: dict[str, list[Import]]) -> list[list[str]]:
    """Files that import each other, one list for each cycle that a walk meets."""
    targets = {
        file: sorted({target for item in imports if (target := find_target(item, files)) not in (None, file)})
        for file, imports in files.items()
    }
    done: set[str] = set()
    path: list[str] = []
    cycles = []

    def walk(file: str) -> None:
        if file in path:
            cycles.append([*path[path.index(file) :], file])
        elif file not in done:
            path.append(file)
            for target in targets[file]:
                walk(target)
            done.add(path.pop())

    for file in targets:
        walk(file)
    return cycles


def find_target(item: Import, files: dict[str, list[Import]]) -> str | None:
    return find_file(item, files) if item.module.split(".")[0] == PACKAGE else None


# -- the source ------------------------------------------------------------------------------------


def test_the_package_follows_the_rules() -> None:
    assert (SOURCE / "__init__.py").is_file()
    assert find_violations(SOURCE) == []


def test_rules_go_one_way() -> None:
    """A rule names only packages above it, or parts of them."""
    packages_above = ""
    for package, allowed in RULES.items():
        assert [name for name in allowed.split() if not is_in(name, packages_above)] == []
        packages_above += f" {package}"


def test_no_rule_is_unused() -> None:
    files = read_files(SOURCE)
    assert {*RULES, *LEAVES} - {"starters"} <= {name for name in (*RULES, *LEAVES) for f in files if is_in(f, name)}
    used = {package: set() for package in RULES}
    for file, imports in files.items():
        if (package := package_of(file)) is not None:
            used[package] |= {target for item in imports if (target := find_target(item, files))}
    idle = {
        f"{package}: {name}"
        for package, allowed in RULES.items()
        for name in allowed.split()
        if not any(is_in(target, name) for target in used[package])
    }
    assert idle == set()


def test_folders_have_few_files() -> None:
    files = [file for file in read_files(SOURCE) if not any(is_in(file, leaf) for leaf in LEAVES)]
    counts = Counter(file.rpartition("/")[0] for file in files)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


# -- the checker, on small trees -------------------------------------------------------------------

NEIGHBOURS = dict.fromkeys(
    [
        "types.py",
        "config/keys.py",
        "graph/__init__.py",
        "graph/errors.py",
        "graph/hooks.py",
        "graph/pool.py",
        "graph/sanitizer/__init__.py",
        "tokenizer/files.py",
        "model/decoder.py",
        "parallel/ranks/world.py",
        "rl/losses.py",
        "rl/data/rows.py",
        "policy/worker.py",
        "view/server.py",
        "commands/view.py",
        "trainer.py",
    ],
    "",
)

ALLOWED = [
    ("files.py", "from __future__ import annotations; import json, os.path"),
    ("graph/pool.py", "from rollgraph.graph.errors import GraphError; from . import hooks; from .hooks import H"),
    ("graph/pool.py", "import torch.nn, numpy as np; from safetensors.torch import load"),
    ("graph/__init__.py", "from .sanitizer import check; from . import errors"),
    ("log/metrics.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ("parallel/ranks/world.py", "from ...config import keys\ndef f():\n    import torch.distributed as dist"),
    ("parallel/data/hooks.py", "from rollgraph.graph import hooks; from ..ranks import world"),
    ("rl/algorithms/rloo.py", "from ..losses import clip; from ...types import T"),
    ("inference/engine.py", "from rollgraph.graph import capture; import triton.language as tl"),
    ("checkpoint/start.py", "from rollgraph.rl.data.rows import Row"),
    ("commands/view.py", "from rollgraph.view import server; import uvicorn"),
    ("__init__.py", "def __getattr__(name):\n    import rollgraph.trainer"),
    ("trainer.py", ""),
]

FORBIDDEN = [
    ("utils/__init__.py", "", "utils/__init__.py: is in no package"),
    ("cli.py", "import rollgraph.utils", "imports rollgraph.utils, which is not there"),
    ("cli.py", "from ..neighbour import thing", "imports from outside the package"),
    ("graph/hooks.py", "from ..... import thing", "imports from outside the package"),
    # packages, however an import is spelled and wherever it stands
    ("graph/pool.py", "import rollgraph.policy.worker", "policy/worker.py, which graph may not"),
    ("graph/hooks.py", "\nfrom ..model.decoder import D", ":2: imports model/decoder.py, which graph may not"),
    ("graph/hooks.py", "def f():\n    from ..model import decoder", ":2: imports model/decoder.py"),
    ("graph/hooks.py", "if TYPE_CHECKING:\n    from ..model import decoder", ":2: imports model/decoder.py"),
    ("files.py", "class C:\n  async def f(self):\n    from . import types", ":3: imports types.py"),
    ("files.py", "try:\n    from .types import T\nexcept ImportError:\n    pass", ":2: imports types.py"),
    ("parallel/data/hooks.py", "from rollgraph.graph import pool", "graph/pool.py, which parallel may not"),
    ("parallel/data/hooks.py", "from rollgraph.graph import capture", "graph/__init__.py, which parallel may not"),
    ("parallel/data/hooks.py", "import rollgraph.model.decoder", "model/decoder.py, which parallel may not"),
    ("model/decoder.py", "from ..parallel.ranks import world", "parallel/ranks/world.py, which model may not"),
    ("inference/engine.py", "from rollgraph.rl import losses", "rl/losses.py, which inference may not"),
    ("checkpoint/start.py", "from rollgraph.rl import losses", "rl/losses.py, which checkpoint may not"),
    ("__init__.py", "from rollgraph.graph import x", "all that imports any part"),
    # leaves
    ("graph/pool.py", "from .sanitizer import check", "graph/sanitizer/__init__.py of the leaf graph/sanitizer"),
    ("commands/train.py", "from rollgraph.view import server", "view/server.py of the leaf view"),
    # cycles
    ("graph/pool.py", "from . import pool_of", "graph/__init__.py -> graph/pool.py -> graph/__init__.py: import each"),
    ("graph/hooks.py", "from .pool import P", "graph/pool.py -> graph/hooks.py -> graph/pool.py: import each other"),
    # other packages
    ("files.py", "import torch", "imports torch, which files may not"),
    ("files.py", "def f():\n    import torch", ":2: imports torch, which files may not"),
    ("types.py", "if TYPE_CHECKING:\n    import torch", "imports torch, which types may not"),
    ("log/metrics.py", "import numpy", "imports numpy, which log may not"),
    ("log/metrics.py", "import torch", "imports torch outside a function"),
    ("parallel/ranks/world.py", "class W:\n    from torch import device", "imports torch outside a function"),
    ("parallel/ranks/world.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "torch outside a function"),
    ("graph/tape.py", "import transformers.utils", "imports transformers, which graph may not"),
    ("graph/tape.py", "import triton", "imports triton, which graph may not"),
]


def check_tree(root: Path, sources: dict[str, str]) -> list[str]:
    for file, source in sources.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return find_violations(root)


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_the_checker_allows(tmp_path: Path, file: str, source: str) -> None:
    assert check_tree(tmp_path, {**NEIGHBOURS, file: source}) == []


@pytest.mark.parametrize(("file", "source", "message"), FORBIDDEN)
def test_the_checker_forbids(tmp_path: Path, file: str, source: str, message: str) -> None:
    neighbours = {**NEIGHBOURS, "graph/__init__.py": "from .pool import P", "graph/pool.py": "from . import hooks"}
    (violation,) = check_tree(tmp_path, {**neighbours, file: source})
    assert message in violation


def test_the_checker_finds_cycles_of_several_files(tmp_path: Path) -> None:
    sources = {
        "graph/a.py": "from . import b",
        "graph/b.py": "def f():\n    from . import c",
        "graph/c.py": "from .a import x",
    }
    (violation,) = check_tree(tmp_path, sources)
    assert violation == "graph/a.py -> graph/b.py -> graph/c.py -> graph/a.py: import each other"


def test_the_checker_reports_every_violation_of_every_file(tmp_path: Path) -> None:
    sources = {
        **NEIGHBOURS,
        "files.py": "import torch\nimport json\nimport numpy",
        "graph/hooks.py": "from ..model import decoder; from ..policy import worker",
        "stray.py": "import torch",
    }
    assert [violation.split(" ")[0] for violation in check_tree(tmp_path, sources)] == [
        "files.py:1:",
        "files.py:3:",
        "graph/hooks.py:1:",
        "graph/hooks.py:1:",
        "stray.py:",
    ]
