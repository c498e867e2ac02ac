"""Loads objects from import paths ("package.module:name" or "file.py:name"), and modules of optional dependencies.

Owns the error messages of a wrong path. The caller checks the type and the signature of the object.
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

from rollgraph.config.fields import ObjectPath
from rollgraph.errors import InvalidInput, suggest, user_line

_CHECKSUM_ATTRIBUTE = "__rollgraph_content__"  # of a file's module: the checksum of the source that was run


class LoadError(InvalidInput):
    """A name or a path of nothing, or of an object of the wrong kind; `location` is the path, quoted."""


def load_object(path: str) -> Any:
    """Load "package.module:name" or "path/to/file.py:name"; the name may have dots, as in `Class.method`."""
    if isinstance(path, ObjectPath):
        return path.target
    module_path, colon, name = path.rpartition(":")
    if not (colon and module_path and name):
        raise LoadError("expected 'package.module:name' or 'path/to/file.py:name'", location=repr(path))
    target: Any
    if module_path.endswith(".py"):
        target = _load_file(Path(module_path), path)
    else:
        target = _import(module_path, path)
    for part in name.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            hint = suggest(part, dir(target))
            if module_path == "__main__" or part == "<locals>":
                hint = ": it is defined in a Python program, so run that, or write the file as 'file.py:name'"
            raise LoadError(f"{module_path} has no {part!r}{hint}", location=repr(path)) from None
    return target


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of an optional dependency; if it is missing, the error names the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is required ({error}); pip install 'rollgraph[{extra}]'", name=module) from error


def _import(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module itself or its parent is missing, not a module that it imports.
        if error.name and f"{module}.".startswith(f"{error.name}."):
            detail = f"there is no module {error.name!r}; write a file as 'file.py:name'"
            raise LoadError(detail, location=repr(path)) from None
        raise LoadError(f"importing {module} failed ({error})", location=repr(path)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module is a program: it can fail in any way, or exit
        raise LoadError(_describe_failure(f"importing {module}", error), location=repr(path)) from error


def _describe_failure(action: str, error: BaseException) -> str:
    line = user_line(error)
    suffix = f", {line}" if line is not None else ""
    return f"{action} failed ({type(error).__name__}: {error}{suffix})"


def _load_file(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        raise LoadError(f"there is no file {file} (in {Path.cwd()})", location=repr(path))
    try:
        return import_file(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise LoadError(_describe_failure(file.name, error), location=repr(path)) from error


def import_file(file: Path) -> ModuleType:
    """Import a file outside any package; exceptions of its code propagate.

    The file runs again only if its content has changed. Whoever imported it before keeps the old module.
    """
    file = file.resolve()
    source = file.read_bytes()
    checksum = hashlib.sha256(source).hexdigest()
    # One module per file, however often it is imported; the digest distinguishes files with the same name.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    previous = sys.modules.get(name)
    if previous is not None and getattr(previous, _CHECKSUM_ATTRIBUTE, None) == checksum:
        return previous
    loader = SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # it is set for every file loader
    module = importlib.util.module_from_spec(spec)
    setattr(module, _CHECKSUM_ATTRIBUTE, checksum)
    sys.modules[name] = module  # before it runs, because dataclasses and pickle look up their module
    try:
        # Not `exec_module`: its bytecode cache misses an edit of the same length within a second.
        exec(loader.source_to_code(source, str(file)), vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        if previous is not None:
            sys.modules[name] = previous
        raise
    return module
