"""The legacy tokenizer base class: with both of its names, with one missing, and without its module."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron import undo
from rollgraph.compat.megatron.tokenizer import MODULE, TOKENIZER
from rollgraph.compat.megatron.tokenizer import MegatronLegacyTokenizer as OurLegacyTokenizer
from tests.compat.megatron_world import REASON, unrepaired  # noqa: F401

pytest.importorskip("megatron.core", reason=REASON)
pytestmark = [pytest.mark.usefixtures("unrepaired"), pytest.mark.filterwarnings("ignore")]

OPTIONAL = ("cls", "sep", "pad", "eod", "bos", "eos", "mask")


def import_both() -> tuple[Any, Any]:
    from megatron.core.datasets.megatron_tokenizer import MegatronLegacyTokenizer, MegatronTokenizer

    return MegatronTokenizer, MegatronLegacyTokenizer


class Hidden(MetaPathFinder):
    """Hide the module, as in a version without it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == MODULE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def module_removed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = importlib.import_module("megatron.core.datasets")
    importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.delattr(package, "megatron_tokenizer")
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    yield
    undo()


def test_a_missing_name_is_repaired() -> None:
    theirs = importlib.import_module(MODULE).MegatronLegacyTokenizer
    with pytest.raises(ImportError, match="cannot import name 'MegatronTokenizer'"):
        import_both()
    assert TOKENIZER.repair_if_affected().state is RepairState.REPAIRED
    assert import_both() == (theirs, theirs)
    undo()
    with pytest.raises(ImportError, match="cannot import name 'MegatronTokenizer'"):
        import_both()


@pytest.mark.usefixtures("module_removed")
def test_a_removed_module_is_repaired() -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{MODULE}'"):
        import_both()
    assert TOKENIZER.repair_if_affected().state is RepairState.REPAIRED
    assert import_both() == (OurLegacyTokenizer, OurLegacyTokenizer)
    assert importlib.import_module("megatron.core.datasets").megatron_tokenizer is sys.modules[MODULE]
    assert importlib.util.find_spec(MODULE) is not None
    undo()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{MODULE}'"):
        import_both()


def test_both_names_present_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "MegatronTokenizer", object(), raising=False)
    before = dict(vars(module))
    assert TOKENIZER.repair_if_affected().state is RepairState.CLEAR
    assert vars(module) == before


def test_a_module_without_both_names_cannot_be_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module(MODULE), "MegatronLegacyTokenizer")
    diagnosis = TOKENIZER.repair_if_affected()
    assert diagnosis.state is RepairState.AFFECTED
    assert diagnosis.repair.startswith("cannot repair: ")


def make_tokenizer(base: Any) -> Any:
    class Letters(base):
        vocab = property(lambda self: {"a": 0, "b": 1})
        inv_vocab = property(lambda self: {0: "a", 1: "b"})
        vocab_size = 2

        def tokenize(self, text: str) -> np.ndarray:
            return np.array([self.vocab[letter] for letter in text])

    return Letters("one", "two", lower=True, seed=3)


def test_our_base_class_has_the_interface_of_megatrons() -> None:
    theirs = importlib.import_module(MODULE).MegatronLegacyTokenizer
    public = {name for name in vars(theirs) if not name.startswith("_")}
    assert public == {name for name in vars(OurLegacyTokenizer) if not name.startswith("_")}
    assert theirs.__abstractmethods__ == OurLegacyTokenizer.__abstractmethods__
    our_tokenizer, their_tokenizer = make_tokenizer(OurLegacyTokenizer), make_tokenizer(theirs)
    assert our_tokenizer.unique_identifiers == their_tokenizer.unique_identifiers
    # The description is hashed for the names of dataset caches.
    assert our_tokenizer.unique_description == their_tokenizer.unique_description
    assert json.loads(our_tokenizer.unique_description)["lower"] == "True"
    for query in [*(lambda t, n=name: getattr(t, n) for name in OPTIONAL), lambda t: t.detokenize([0]), offsets]:
        messages = []
        for tokenizer in (our_tokenizer, their_tokenizer):
            with pytest.raises(NotImplementedError) as raised:
                query(tokenizer)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def offsets(tokenizer: Any) -> None:
    tokenizer.offsets([0], "a")


def test_abstract_methods_must_be_implemented() -> None:
    with pytest.raises(TypeError, match="abstract"):
        OurLegacyTokenizer()
    assert make_tokenizer(OurLegacyTokenizer).tokenize("ba").tolist() == [1, 0]
