"""All repairs, in the order in which they are applied. Patches apply to the whole process, like the modules."""

from __future__ import annotations

import importlib
from threading import RLock

from rollgraph.compat.diagnosis import Diagnosis
from rollgraph.compat.megatron.capture_failure import CAPTURE_FAILURE
from rollgraph.compat.megatron.forward_hooks import FORWARD_HOOKS
from rollgraph.compat.megatron.graph_deletion import GRAPH_DELETION
from rollgraph.compat.megatron.graph_switch import GRAPH_SWITCH
from rollgraph.compat.megatron.input_surface import INPUT_SURFACE
from rollgraph.compat.megatron.tokenizer import TOKENIZER

LOCK = RLock()  # probes and patches affect all threads, so only one may run at a time
REPAIRS = (FORWARD_HOOKS, GRAPH_SWITCH, GRAPH_DELETION, CAPTURE_FAILURE, INPUT_SURFACE, TOKENIZER)


def findings() -> list[Diagnosis]:
    """What is broken in the megatron-core of this process; empty without megatron-core."""
    if not is_installed():
        return []
    with LOCK:
        return [each.find() for each in REPAIRS]


def repair() -> list[Diagnosis]:
    """Repair what the probes show to be broken. Calling it again is safe; `undo` reverts it."""
    if not is_installed():
        raise ModuleNotFoundError("megatron-core is not installed: pip install 'rollgraph[megatron]'")
    with LOCK:
        return [each.mend() for each in REPAIRS]


def undo() -> None:
    """Revert every repair. Those that other code has patched over raise RuntimeError, after all others are reverted."""
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
    """Import megatron-core, outside of LOCK: the import hook may call `repair`, in this thread or in another one."""
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        return error.name not in ("megatron", "megatron.core")
    except Exception:  # it is installed but broken, as every probe will report
        return True
    return True
