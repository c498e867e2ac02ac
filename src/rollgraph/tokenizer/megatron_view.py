"""A tokenizer as Megatron's legacy interface has it."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from rollgraph.tokenizer.detokenizer import Detokenizer
from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Tokenizer


class _TokenId:
    """The id of a special token, which Megatron expects to fail if there is none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: MegatronTokenizerView, owner: type | None = None) -> int:
        found: int | None = getattr(view.tokenizer, f"{self._name}_id")
        if found is None:
            raise NotImplementedError(f"{view.tokenizer.name} has no {self._name} token")
        return found


class MegatronTokenizerView:
    """Megatron's legacy tokenizer interface over a Tokenizer.

    As in Megatron's Hugging Face tokenizers, `tokenize` lets the post-processor add its tokens, `detokenize` writes
    special tokens out, and `eod` is the eos token.
    """

    bos, eos, pad, cls, sep, mask = (_TokenId() for _ in range(6))

    def __init__(self, tokenizer: Tokenizer, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.vocab
        self.inv_vocab = {i: token for token, i in tokenizer.vocab.items()}
        self.vocab_size = tokenizer.vocab_size
        paths, options = list(tokenizer_paths or (tokenizer.name,)), {k: str(v) for k, v in tokenizer_options.items()}
        self.unique_identifiers = OrderedDict({"class": type(self).__name__, "tokenizer_path": paths, **options})
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @property
    def eod(self) -> int:
        return self.eos

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special=False)

    def offsets(self, ids: Iterable[int], text: str) -> list[int]:
        """The character of `text` at which each token begins; a part of a character begins where the character does.

        Sampled ids need not be the encoding of their text; those begin where the text decoded before them ends.
        """
        wanted = [int(i) for i in ids]
        for special in (True, False):
            encoded, starts = self.tokenizer.encode_with_offsets(text, special)
            if encoded == wanted:
                return starts
        for skip_special in (False, True):
            if self.tokenizer.decode(wanted, skip_special) == text:
                stream = Detokenizer(self.tokenizer, skip_special)
                return list(accumulate((len(stream.push(i)) for i in wanted[:-1]), initial=0))
        raise TokenizerError(f"no offsets: these {len(wanted)} ids are not the text {text!r:.80}")
