"""The import hook that repairs megatron-core right after a process has imported it.

`every_process/` runs this file at the start of Python processes that may never import megatron, or whose environment
lacks rollgraph. So it imports only the standard library, and reports errors instead of raising them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing and importlib.util would double the start-up time of a small Python process
if TYPE_CHECKING:
    from typing import Any

PACKAGE = "megatron.core"
ROLLGRAPH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROLLGRAPH, "compat", "every_process")


def install() -> None:
    """Call `repair()` as soon as megatron.core is imported, or now if it already is. Installing twice is safe."""
    if PACKAGE in sys.modules:
        repair_here()
        return
    # We compare names instead of using isinstance, because a process can load this file as two modules.
    installed = any(type(finder).__name__ == RepairingFinder.__name__ for finder in sys.meta_path)
    if not installed:
        sys.meta_path.insert(0, RepairingFinder())


class RepairingFinder:
    """Delegates to the other finders, and wraps the loader of megatron.core so that it is repaired after loading."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != PACKAGE:
            return None
        spec = None
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec:
                    break
        try:
            repair_once_loaded(spec)
        except Exception as error:
            report_repair_failure(error)
        return spec


def repair_once_loaded(spec: Any) -> None:
    """Wrap the `exec_module` of the loader. The loader itself stays, because Python also gets resources from it."""
    if spec is None or spec.loader is None:  # megatron.core is not installed
        return
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        if module.__name__ == PACKAGE:
            repair_here()

    spec.loader.exec_module = exec_module


def repair_here() -> None:
    try:
        make_importable()
        from rollgraph.compat.diagnosis import RepairState
        from rollgraph.compat.megatron import repair

        diagnoses = repair()
    except Exception as error:
        report_repair_failure(error)
        return
    repaired = [diagnosis.name for diagnosis in diagnoses if diagnosis.state is RepairState.REPAIRED]
    if repaired:
        print_to_stderr(f"repaired in process {os.getpid()}: {', '.join(repaired)}")
    for diagnosis in diagnoses:
        if diagnosis.state in (RepairState.AFFECTED, RepairState.UNKNOWN):
            print_to_stderr(f"process {os.getpid()}: {diagnosis.summary}")


def make_importable() -> None:
    """Make `rollgraph` importable in a worker whose own environment lacks it, from the folder of this file."""
    import importlib.util

    installed_spec = importlib.util.find_spec("rollgraph")
    if (
        installed_spec is not None and installed_spec.origin is not None
    ):  # without an origin, it is just a folder of that name
        return
    file = os.path.join(ROLLGRAPH, "__init__.py")
    spec = importlib.util.spec_from_file_location("rollgraph", file, submodule_search_locations=[ROLLGRAPH])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollgraph"] = module
    spec.loader.exec_module(module)


def report_repair_failure(error: Exception) -> None:
    print_to_stderr(f"megatron-core is not repaired in process {os.getpid()}: {type(error).__name__}: {error}")


def print_to_stderr(text: str) -> None:
    if sys.stderr is not None:
        print(f"rollgraph: {text}", file=sys.stderr)


def install_in_subprocesses() -> None:
    """Put the hook on PYTHONPATH, so that later Python subprocesses and their children install it."""
    python_path = os.environ.get("PYTHONPATH")
    if python_path is None or FOLDER not in python_path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, python_path)))
