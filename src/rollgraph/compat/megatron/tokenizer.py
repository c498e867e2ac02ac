"""Repairs the import of the legacy tokenizer base class, which versions renamed and later removed with its module."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.legacy_tokenizer import MegatronLegacyTokenizer
from rollgraph.compat.megatron.patch import CannotRepair, Patch
from rollgraph.compat.megatron.repair import Repair, Verdict

MODULE = "megatron.core.datasets.megatron_tokenizer"
NAMES = ("MegatronTokenizer", "MegatronLegacyTokenizer")


def find_module() -> ModuleType | None:
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise
        return None


def probe() -> Verdict:
    module = find_module()
    if module is None:
        return Verdict(RepairState.AFFECTED, f"there is no module {MODULE}")
    missing = [name for name in NAMES if not hasattr(module, name)]
    if missing:
        return Verdict(RepairState.AFFECTED, f"{MODULE} has no {' and no '.join(missing)}")
    return Verdict(RepairState.CLEAR)


def plan() -> list[Patch]:
    module = find_module()
    if module is None:
        package, _, name = MODULE.rpartition(".")
        made = ModuleType(MODULE, "The legacy tokenizer base, from rollgraph.compat.megatron.")
        made.__spec__ = ModuleSpec(MODULE, None)  # find_spec raises if a module has none
        vars(made).update(dict.fromkeys(NAMES, MegatronLegacyTokenizer))
        return [Patch(sys.modules, MODULE, made), Patch(importlib.import_module(package), name, made)]
    present = [getattr(module, name) for name in NAMES if hasattr(module, name)]
    if not present:
        raise CannotRepair(f"{MODULE} has neither {' nor '.join(NAMES)}")
    return [Patch(module, name, present[0]) for name in NAMES if not hasattr(module, name)]


TOKENIZER = Repair(
    name="legacy-tokenizer",
    symptom=(
        f"ImportError: cannot import name 'MegatronTokenizer' from '{MODULE}', or "
        f"ModuleNotFoundError: No module named '{MODULE}'"
    ),
    reason="The abstract base class was renamed to MegatronLegacyTokenizer, and later removed with its module.",
    try_it=probe,
    plan=plan,
)
