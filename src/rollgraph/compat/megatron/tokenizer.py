"""The repair for Megatron's legacy tokenizer base class, which later versions renamed and then removed."""

from __future__ import annotations

import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron.repair import CannotRepair, Patch, Repair, Verdict

# -- the class -------------------------------------------------------------------------------------


class MegatronLegacyTokenizer(ABC):
    """A tokenizer that is identified by its class, its paths and its options.

    Names of dataset caches contain a hash of `unique_description`, so it must be exactly the text that the original
    class writes.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(tokenizer_paths)
        self.unique_identifiers.update({name: str(value) for name, value in tokenizer_options.items()})
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)
        super().__init__()

    @abstractmethod
    def tokenize(self, text: str) -> np.ndarray:
        """The token ids of a text."""

    @property
    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """Token -> id."""

    @property
    @abstractmethod
    def inv_vocab(self) -> dict[int, str]:
        """Id -> token."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    # Subclasses may leave out everything below.

    def detokenize(self, ids: np.ndarray) -> str:
        self._raise_not_implemented("method", "detokenize")

    def offsets(self, ids: list[int], text: str) -> list[int]:
        self._raise_not_implemented("method", "offsets")

    @property
    def cls(self) -> int:
        self._raise_not_implemented("attribute", "cls")

    @property
    def sep(self) -> int:
        self._raise_not_implemented("attribute", "sep")

    @property
    def pad(self) -> int:
        self._raise_not_implemented("attribute", "pad")

    @property
    def eod(self) -> int:
        self._raise_not_implemented("attribute", "eod")

    @property
    def bos(self) -> int:
        self._raise_not_implemented("attribute", "bos")

    @property
    def eos(self) -> int:
        self._raise_not_implemented("attribute", "eos")

    @property
    def mask(self) -> int:
        self._raise_not_implemented("attribute", "mask")

    def _raise_not_implemented(self, kind: str, name: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {kind} '{name}'")


# -- the import ------------------------------------------------------------------------------------

MODULE = "megatron.core.datasets.megatron_tokenizer"
NAMES = ("MegatronTokenizer", "MegatronLegacyTokenizer")


def find_module() -> ModuleType | None:
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise
        return None


def probe_tokenizer() -> Verdict:
    module = find_module()
    if module is None:
        return Verdict(RepairState.AFFECTED, f"there is no module {MODULE}")
    missing = [name for name in NAMES if not hasattr(module, name)]
    if missing:
        return Verdict(RepairState.AFFECTED, f"{MODULE} has no {' and no '.join(missing)}")
    return Verdict(RepairState.CLEAR)


def make_tokenizer_patches() -> list[Patch]:
    """Make both names importable: both for the class that exists under one of them or, without the module, for ours."""
    module = find_module()
    if module is None:
        package, _, name = MODULE.rpartition(".")
        new_module = ModuleType(MODULE, "The legacy tokenizer base, from rollgraph.compat.megatron.")
        new_module.__spec__ = ModuleSpec(MODULE, None)  # find_spec raises for a module without a spec
        vars(new_module).update(dict.fromkeys(NAMES, MegatronLegacyTokenizer))
        return [Patch(sys.modules, MODULE, new_module), Patch(importlib.import_module(package), name, new_module)]
    existing = [getattr(module, name) for name in NAMES if hasattr(module, name)]
    if not existing:
        raise CannotRepair(f"{MODULE} has neither {' nor '.join(NAMES)}")
    return [Patch(module, name, existing[0]) for name in NAMES if not hasattr(module, name)]


TOKENIZER = Repair(
    name="legacy-tokenizer",
    symptom=(
        f"ImportError: cannot import name 'MegatronTokenizer' from '{MODULE}', or "
        f"ModuleNotFoundError: No module named '{MODULE}'"
    ),
    reason="The abstract base class was renamed to MegatronLegacyTokenizer, and later removed with its module.",
    run_probe=probe_tokenizer,
    make_patches=make_tokenizer_patches,
)
