"""`python -m rollgraph.compat run script.py …`: repairs megatron-core, then runs a script as Python would."""

from __future__ import annotations

import runpy
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rollgraph.compat.import_hook import FOLDER, install_in_subprocesses

USAGE = """usage: python -m rollgraph.compat run script.py [argument ...]
       python -m rollgraph.compat run -m module [argument ...]
       python -m rollgraph.compat path

run   repair megatron-core in this process, then run the script or module in it; Python processes that it starts are
      repaired as well, when they import megatron-core
path  print the folder that `run` prepends to PYTHONPATH to reach them, for launchers that set PYTHONPATH themselves"""


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"], ["run", "-h"], ["run", "--help"]):
        print(USAGE)
        return 0
    if arguments == ["path"]:
        print(FOLDER)
        return 0
    command = arguments[:1]
    target = arguments[1:]
    as_module = target[:1] == ["-m"]
    if as_module:
        target = target[1:]
    if command != ["run"] or not target:
        return print_usage_error(USAGE)
    if not as_module and not Path(target[0]).exists():
        return print_usage_error(f"there is no script {target[0]}")

    from rollgraph.compat.megatron import repair

    try:
        diagnoses = repair()
    except ModuleNotFoundError as error:
        return print_usage_error(str(error))
    for diagnosis in diagnoses:
        print(f"rollgraph: {diagnosis.summary}", file=sys.stderr)
    install_in_subprocesses()
    run_target(target, as_module)
    return 0


def run_target(target: list[str], as_module: bool) -> None:
    """Run as Python would: the script's folder, or the working directory for a module, comes first on sys.path."""
    sys.argv = target
    path = Path(target[0]).absolute()
    if not sys.flags.safe_path:
        first = Path.cwd() if as_module else path.resolve().parent
        sys.path[0] = str(first)
    if as_module:
        run_module(target[0])
    elif path.is_dir() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        runpy.run_path(target[0], run_name="__main__")
    else:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        execute_as_main(code, __file__=str(path), __loader__=SourceFileLoader("__main__", str(path)))


def run_module(name: str) -> None:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        sys.exit(f"there is no module {name}: {error}")
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    loader: Any = spec and spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        sys.exit(f"there is no module {name} that can run")
    sys.argv[0] = str(spec.origin)
    attributes = {"__file__": spec.origin, "__loader__": loader, "__package__": spec.parent, "__spec__": spec}
    execute_as_main(loader.get_code(spec.name), **attributes)


def execute_as_main(code: CodeType, **attributes: Any) -> None:
    """Execute in a `__main__` that, unlike runpy's, outlives the script: its threads and exit handlers can pickle."""
    main_module = ModuleType("__main__")
    vars(main_module).update(attributes)
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))


def print_usage_error(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
