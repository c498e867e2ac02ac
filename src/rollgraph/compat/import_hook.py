"""Repairs megatron-core in the process that imports it, right after the import. Owns the import hook.

`every_process/` runs this file at the start of Python processes that may never import megatron, and that may be unable
to import rollgraph. So it imports only the standard library, and reports errors instead of raising them.
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
    """Call `repair()` as soon as megatron.core is imported, or now if it already is. Calling this twice is safe."""
    if PACKAGE in sys.modules:
        repair_here()
        return
    # Compared by name, not by isinstance: a process can have this file as two modules.
    installed = any(type(finder).__name__ == RepairingFinder.__name__ for finder in sys.meta_path)
    if not installed:
        sys.meta_path.insert(0, RepairingFinder())


class RepairingFinder:
    """Lets the other finders find megatron.core, and has it repaired once it is loaded."""

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
            complain(error)
        return spec


def repair_once_loaded(spec: Any) -> None:
    """Wrap the loader's `exec_module` and keep the loader, which is also asked for resources and source."""
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

        found = repair()
    except Exception as error:
        complain(error)
        return
    repaired = [finding.name for finding in found if finding.state is RepairState.REPAIRED]
    if repaired:
        say(f"repaired in process {os.getpid()}: {', '.join(repaired)}")
    for finding in found:
        if finding.state in (RepairState.AFFECTED, RepairState.UNKNOWN):
            say(f"process {os.getpid()}: {finding.summary}")


def make_importable() -> None:
    """Make `rollgraph` importable in a worker whose own environment lacks it, from the folder of this file."""
    import importlib.util

    found = importlib.util.find_spec("rollgraph")
    if found is not None and found.origin is not None:  # an origin of None is just a folder with that name
        return
    file = os.path.join(ROLLGRAPH, "__init__.py")
    spec = importlib.util.spec_from_file_location("rollgraph", file, submodule_search_locations=[ROLLGRAPH])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollgraph"] = module
    spec.loader.exec_module(module)


def complain(error: Exception) -> None:
    say(f"megatron-core is not repaired in process {os.getpid()}: {type(error).__name__}: {error}")


def say(text: str) -> None:
    if sys.stderr is not None:
        print(f"rollgraph: {text}", file=sys.stderr)


def reach_children() -> None:
    """Put the hook on PYTHONPATH, so that Python processes started from here on, and their children, install it."""
    before = os.environ.get("PYTHONPATH")
    if before is None or FOLDER not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, before)))
