"""Repairs for megatron-core: one call before the model is built, without edits to the code that uses it.

`findings` reports known failures in this process, `repair` repairs them, `undo` reverts the repairs. Patches apply to
the whole process, as modules do. Importing this package does not import megatron.
"""

from __future__ import annotations

import importlib
from threading import RLock

from rollgraph.compat.diagnosis import Diagnosis
from rollgraph.compat.megatron.capture import CAPTURE_FAILURE, INPUT_SURFACE
from rollgraph.compat.megatron.forward_hooks import FORWARD_HOOKS
from rollgraph.compat.megatron.graph_settings import graph_overrides
from rollgraph.compat.megatron.graph_switch import GRAPH_DELETION, GRAPH_SWITCH
from rollgraph.compat.megatron.loops import reference_weights, repeatable_train
from rollgraph.compat.megatron.repair import CannotRepair
from rollgraph.compat.megatron.tokenizer import TOKENIZER

LOCK = RLock()  # probes and patches affect all threads, so only one may run at a time
# In the order in which they are applied.
REPAIRS = (FORWARD_HOOKS, GRAPH_SWITCH, GRAPH_DELETION, CAPTURE_FAILURE, INPUT_SURFACE, TOKENIZER)


def findings() -> list[Diagnosis]:
    """The state of each known failure in the megatron-core of this process; empty without megatron-core."""
    if not is_installed():
        return []
    with LOCK:
        return [each.diagnose() for each in REPAIRS]


def repair() -> list[Diagnosis]:
    """Repair every failure that a probe reproduces. Calling it again is safe; `undo` reverts it."""
    if not is_installed():
        raise ModuleNotFoundError("megatron-core is not installed: pip install 'rollgraph[megatron]'")
    with LOCK:
        return [each.repair_if_affected() for each in REPAIRS]


def undo() -> None:
    """Revert every repair. If other code has patched over some, revert the others, then raise RuntimeError."""
    failures = []
    with LOCK:
        for each in reversed(REPAIRS):
            try:
                each.undo()
            except RuntimeError as error:
                failures.append(f"{each.name}: {error}")
    if failures:
        raise RuntimeError("; ".join(failures))


def is_installed() -> bool:
    """Whether megatron-core can be imported. Call without LOCK: the import hook may call `repair` in any thread."""
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        return error.name not in ("megatron", "megatron.core")
    except Exception:  # installed but broken; every probe will report it
        return True
    return True


__all__ = ["CannotRepair", "findings", "graph_overrides", "reference_weights", "repair", "repeatable_train", "undo"]
