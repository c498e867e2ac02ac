"""Installs `../import_hook.py`, then runs the `sitecustomize` that this one shadows.

Python runs this file at the start of every process that has its folder on PYTHONPATH.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from os import path

HERE = path.dirname(path.abspath(__file__))


def install_hook() -> None:
    """Load the hook from its file, because this process may be in an environment without rollgraph."""
    loader = SourceFileLoader("_rollgraph_import_hook", path.join(path.dirname(HERE), "import_hook.py"))
    hook = type(sys)(loader.name)
    hook.__file__ = loader.path
    hook.__spec__ = ModuleSpec(loader.name, loader, origin=loader.path)
    sys.modules[loader.name] = hook
    loader.exec_module(hook)
    hook.install()


def run_shadowed() -> None:
    """Run the next `sitecustomize` on the path, which Python would have run without this one."""
    other_entries = [entry for entry in sys.path if path.abspath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", other_entries)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        shadowed = module_from_spec(spec)
        sys.modules["sitecustomize"] = shadowed
        spec.loader.exec_module(shadowed)


try:
    install_hook()
except Exception as error:  # the process must start in any case
    print(f"rollgraph: megatron-core will not be repaired: {type(error).__name__}: {error}", file=sys.stderr)
run_shadowed()
