"""Repairs megatron-core in the process that imports it, right after its import. Owns the import hook.

`every_process/` runs this file at the start of a Python process that may never import megatron, and may be unable to
import rollgraph: so it imports the standard library only, and whatever goes wrong is said and not raised.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing and importlib.util are half of the time that a small Python process takes to start
if TYPE_CHECKING:
    from typing import Any

PACKAGE = "megatron.core"
ROLLGRAPH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROLLGRAPH, "compat", "every_process")


def install() -> None:
    """`repair()` as soon as megatron.core has been imported: now, if it has been. Twice is once."""
    if PACKAGE in sys.modules:
        repair_here()
    elif not any(type(finder).__name__ == RepairingFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, RepairingFinder())  # not isinstance: this file can be two modules of a process


class RepairingFinder:
    """Finds megatron.core where the others find it, and has it repaired once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != PACKAGE:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        try:
            repair_once_loaded(spec)
        except Exception as error:
            complain(error)
        return spec


def repair_once_loaded(spec: Any) -> None:
    """The loader stays theirs, as resources and source are asked of it."""
    if spec is None or spec.loader is None:  # not there
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
        from rollgraph.compat.finding import RepairState
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
    """A worker can have an environment of its own, without rollgraph: then it is the one that this file is of."""
    import importlib.util

    found = importlib.util.find_spec("rollgraph")
    if found is not None and found.origin is not None:  # None: some folder of that name
        return
    file = os.path.join(ROLLGRAPH, "__init__.py")
    spec = importlib.util.spec_from_file_location("rollgraph", file, submodule_search_locations=[ROLLGRAPH])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["rollgraph"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def complain(error: Exception) -> None:
    say(f"megatron-core is not repaired in process {os.getpid()}: {type(error).__name__}: {error}")


def say(text: str) -> None:
    if sys.stderr is not None:
        print(f"rollgraph: {text}", file=sys.stderr)


def reach_children() -> None:
    """Python processes started from here on, and those that they start, find the hook on their PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    if before is None or FOLDER not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, before)))
