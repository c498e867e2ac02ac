"""The interface of Megatron's legacy tokenizers, on top of rollgraph's `Tokenizer`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from rollgraph.tokenizer.detokenizer import Detokenizer
from rollgraph.tokenizer.files import TokenizerError
from rollgraph.tokenizer.tokenizer import Tokenizer


class _TokenId:
    """The id of a special token; raises NotImplementedError, as Megatron expects, if the tokenizer has none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: MegatronTokenizerView, owner: type | None = None) -> int:
        token_id: int | None = getattr(view.tokenizer, f"{self._name}_id")
        if token_id is None:
            raise NotImplementedError(f"{view.tokenizer.name} has no {self._name} token")
        return token_id


class MegatronTokenizerView:
    """Megatron's legacy tokenizer interface over a Tokenizer.

    As in Megatron's Hugging Face tokenizers, `tokenize` lets the post-processor add its tokens, `detokenize` writes out
    special tokens, and `eod` is the eos token.
    """

    bos = _TokenId()
    eos = _TokenId()
    pad = _TokenId()
    cls = _TokenId()
    sep = _TokenId()
    mask = _TokenId()

    def __init__(self, tokenizer: Tokenizer, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.vocab
        self.inv_vocab = {i: token for token, i in tokenizer.vocab.items()}
        self.vocab_size = tokenizer.vocab_size
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(tokenizer_paths or (tokenizer.name,))
        for name, value in tokenizer_options.items():
            self.unique_identifiers[name] = str(value)
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @property
    def eod(self) -> int:
        return self.eos

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special=False)

    def offsets(self, ids: Iterable[int], text: str) -> list[int]:
        """The index of the character of `text` at which each token begins.

        A token that begins inside a multi-byte character gets the index of that character. Sampled ids need not be the
        encoding of their text; then each token begins where the decoded text of the tokens before it ends.
        """
        token_ids = [int(i) for i in ids]
        for special in (True, False):
            encoded, offsets = self.tokenizer.encode_with_offsets(text, special)
            if encoded == token_ids:
                return [start for start, _ in offsets]
        for skip_special in (False, True):
            if self.tokenizer.decode(token_ids, skip_special) == text:
                return self._decoded_offsets(token_ids, skip_special)
        raise TokenizerError(f"no offsets: these {len(token_ids)} ids are not an encoding of {text!r:.80}")

    def _decoded_offsets(self, ids: list[int], skip_special: bool) -> list[int]:
        stream = Detokenizer(self.tokenizer, skip_special)
        starts = []
        end = 0
        for i in ids:
            starts.append(end)
            end += len(stream.push(i))
        return starts
