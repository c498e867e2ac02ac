"""All repairs, in the order they are applied. Patches are of the process, as the modules they are made to are."""

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

LOCK = RLock()  # probes and patches are seen by all threads: one at a time
REPAIRS = (FORWARD_HOOKS, GRAPH_SWITCH, GRAPH_DELETION, CAPTURE_FAILURE, INPUT_SURFACE, TOKENIZER)


def findings() -> list[Diagnosis]:
    """What is broken in the megatron-core of this process. Without megatron-core, nothing."""
    if not is_installed():
        return []
    with LOCK:
        return [each.find() for each in REPAIRS]


def repair() -> list[Diagnosis]:
    """Repairs what a probe shows to be broken, once; `undo` takes it back."""
    if not is_installed():
        raise ModuleNotFoundError("megatron-core is not installed: pip install 'rollgraph[megatron]'")
    with LOCK:
        return [each.mend() for each in REPAIRS]


def undo() -> None:
    """Takes back every repair; raises RuntimeError, after the others, for those that somebody has patched over."""
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
    """Imports it, outside of LOCK: an import hook may repair, in this thread or in one that is importing it now."""
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        return error.name not in ("megatron", "megatron.core")
    except Exception:  # it is broken, which every probe will say
        return True
    return True
