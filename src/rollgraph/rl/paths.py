"""Objects by import path ("package.module:name" or "file.py:name"), and modules of optional dependencies.

Owns the messages for a path that leads nowhere. Nothing here knows what is loaded; the caller checks its signature.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from rollgraph.errors import InvalidInput, suggest

_CONTENT = "__rollgraph_content__"  # attribute of a file's module: the checksum of what was run


class LoadError(InvalidInput):
    """A name or a path that leads nowhere, or to something of the wrong kind; `place` is that path, quoted."""


def load_object(path: str) -> Any:
    """The object at "package.module:name" or "path/to/file.py:name"; the name may have dots, as in `Class.method`."""
    where, colon, name = path.rpartition(":")
    if not (colon and where and name):
        raise LoadError("expected 'package.module:name' or 'path/to/file.py:name'", place=repr(path))
    found: Any
    if where.endswith(".py"):
        found = _load_file(Path(where), path)
    else:
        found = _import(where, path)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = suggest(part, dir(found))
            if where == "__main__":
                near = ": it is defined in a Python program, so run that, or write the file as 'file.py:name'"
            raise LoadError(f"{where} has no {part!r}{near}", place=repr(path)) from None
    return found


def import_extra(module: str, extra: str) -> ModuleType:
    """A module of an optional dependency; if it is missing, the error has the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is required ({error}); pip install 'rollgraph[{extra}]'", name=module) from error


def _import(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module itself or a parent of it is missing, rather than something that it imports.
        if error.name and f"{module}.".startswith(f"{error.name}."):
            detail = f"there is no module {error.name!r}; write a file as 'file.py:name'"
            raise LoadError(detail, place=repr(path)) from None
        raise LoadError(f"importing {module} failed ({error})", place=repr(path)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module is a program: it can fail in any way, or exit
        raise LoadError(f"importing {module} failed ({type(error).__name__}: {error})", place=repr(path)) from error


def _load_file(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        raise LoadError(f"there is no file {file} (in {Path.cwd()})", place=repr(path))
    try:
        return import_file(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise LoadError(f"{file.name} failed ({type(error).__name__}: {error})", place=repr(path)) from error


def import_file(file: Path) -> ModuleType:
    """The module of a file outside any package; whatever its code raises is passed on.

    The file runs again only if its content has changed since. Who loaded it before keeps what was loaded then.
    """
    file = file.resolve()
    source = file.read_bytes()
    content = hashlib.sha256(source).hexdigest()
    # One module per file, however often it is named; the digest keeps files of the same name apart.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    before = sys.modules.get(name)
    if before is not None and getattr(before, _CONTENT, None) == content:
        return before
    loader = SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # true for every loader of a file
    module = importlib.util.module_from_spec(spec)
    setattr(module, _CONTENT, content)
    sys.modules[name] = module  # before it runs, because dataclasses and pickle look up their module
    try:
        # Not `exec_module`: its bytecode cache misses an edit of the same length within a second.
        exec(loader.source_to_code(source, str(file)), vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module
