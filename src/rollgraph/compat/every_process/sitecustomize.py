"""Run by every Python process that has this folder on its PYTHONPATH. Installs `../import_hook.py`, then lets the
sitecustomize that it stands before have its turn.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from os import path

HERE = path.dirname(path.abspath(__file__))


def install_hook() -> None:
    """From its file: this process may be of an environment without rollgraph."""
    loader = SourceFileLoader("_rollgraph_import_hook", path.join(path.dirname(HERE), "import_hook.py"))
    hook = type(sys)(loader.name)
    hook.__file__, hook.__spec__ = loader.path, ModuleSpec(loader.name, loader, origin=loader.path)
    sys.modules[loader.name] = hook
    loader.exec_module(hook)
    hook.install()


def run_the_other() -> None:
    others = [entry for entry in sys.path if path.abspath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = other = module_from_spec(spec)
        spec.loader.exec_module(other)


try:
    install_hook()
except Exception as error:  # this process has to start in any case
    print(f"rollgraph: megatron-core will not be repaired: {type(error).__name__}: {error}", file=sys.stderr)
run_the_other()
