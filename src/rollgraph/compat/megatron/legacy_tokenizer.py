"""The abstract base class of tokenizers written for older versions of megatron-core. Does not import megatron."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, NoReturn

import numpy as np


class MegatronLegacyTokenizer(ABC):
    """A tokenizer that is identified by its class, its paths and its options.

    Dataset caches are named by a hash of `unique_description`, so it must be the text that those versions wrote.
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
        """From token to id."""

    @property
    @abstractmethod
    def inv_vocab(self) -> dict[int, str]:
        """From id to token."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    # Subclasses may leave out everything below.

    def detokenize(self, ids: np.ndarray) -> str:
        self._lacks("method", "detokenize")

    def offsets(self, ids: list[int], text: str) -> list[int]:
        self._lacks("method", "offsets")

    @property
    def cls(self) -> int:
        self._lacks("attribute", "cls")

    @property
    def sep(self) -> int:
        self._lacks("attribute", "sep")

    @property
    def pad(self) -> int:
        self._lacks("attribute", "pad")

    @property
    def eod(self) -> int:
        self._lacks("attribute", "eod")

    @property
    def bos(self) -> int:
        self._lacks("attribute", "bos")

    @property
    def eos(self) -> int:
        self._lacks("attribute", "eos")

    @property
    def mask(self) -> int:
        self._lacks("attribute", "mask")

    def _lacks(self, kind: str, name: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {kind} '{name}'")
