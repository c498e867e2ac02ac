"""Our tokenizers behind Megatron's tokenizer interface."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollgraph.compat.megatron.tokenizer_view import MegatronTokenizerView
from rollgraph.tokenizer import Tokenizer, TokenizerError, TokenizerFiles
from tests.tokenizer.kinds import BYTES, JSON, KINDS, TEXTS, of_kind, peer_of, write


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_offsets_equal_those_of_megatron(tmp_path: Path, kind: str) -> None:
    tokenizer = BYTES if kind == "bytes" else of_kind(kind)
    tokenizer.save(tmp_path)
    peer, view = peer_of(tmp_path), MegatronTokenizerView(tokenizer)
    for text in TEXTS:
        ids = view.tokenize(text)
        assert ids == peer(text).input_ids
        expected, end = [], 0
        for i in range(len(ids)):
            span = peer(text).token_to_chars(i)
            expected.append(end if span is None else span.start)
            end = end if span is None else span.end
        assert view.offsets(ids, text) == expected
        assert view.offsets(np.array(ids), text) == expected
        assert view.detokenize(np.array(ids, dtype=np.int64)) == peer.decode(ids)


def test_offsets_are_indices_of_characters() -> None:
    view = MegatronTokenizerView(BYTES)
    assert view.offsets(list("aé🚀b".encode()), "aé🚀b") == [0, 1, 1, 2, 2, 2, 2, 3]


def test_offsets_of_ids_from_another_encoding() -> None:
    tokenizer = of_kind("byte_level")
    view = MegatronTokenizerView(tokenizer)
    ids = [tokenizer.vocab[token] for token in ("t", "h", "e", "Ġ", "Ã", "©", "</s>")]
    assert tokenizer.encode("the é", special=False) != ids
    assert view.offsets(ids, "the é</s>") == [0, 1, 2, 3, 4, 4, 5]
    assert view.offsets(ids, "the é") == [0, 1, 2, 3, 4, 4, 5]
    with pytest.raises(TokenizerError, match="no offsets: these 7 ids are not an encoding of 'the e'"):
        view.offsets(ids, "the e")


def test_the_view_has_the_vocabulary_and_special_tokens() -> None:
    tokenizer = of_kind("word_piece", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    view = MegatronTokenizerView(tokenizer)
    assert view.vocab_size == tokenizer.vocab_size
    assert all(view.vocab[token] == i for i, token in view.inv_vocab.items())
    assert len(view.inv_vocab) == len(view.vocab)
    assert (view.cls, view.sep, view.mask, view.bos, view.eos, view.eod) == (3, 4, 5, 1, 2, 2)
    with pytest.raises(NotImplementedError, match="has no pad token"):
        _ = view.pad
    bare = MegatronTokenizerView(Tokenizer(TokenizerFiles(JSON["words"], name="bare")))
    for name in ("bos", "eos", "pad", "cls", "sep", "mask"):
        with pytest.raises(NotImplementedError, match=f"^bare has no {name} token"):
            getattr(bare, name)
    with pytest.raises(NotImplementedError, match=r"^bare has no eos token"):
        _ = bare.eod


def test_tokenizers_have_unique_descriptions(tmp_path: Path) -> None:
    folder = write(tmp_path)
    view = MegatronTokenizerView(Tokenizer.from_folder(folder))
    assert list(view.unique_identifiers.items()) == [
        ("class", "MegatronTokenizerView"),
        ("tokenizer_path", [str(folder)]),
    ]
    named = MegatronTokenizerView(BYTES, "some/path", "other", vocab_extra_ids=7, lower_case=True)
    assert named.unique_description == (
        '{\n    "class": "MegatronTokenizerView",\n    "tokenizer_path": [\n        "some/path",\n        "other"\n'
        '    ],\n    "vocab_extra_ids": "7",\n    "lower_case": "True"\n}'
    )
    nameless = {MegatronTokenizerView(of_kind(kind)).unique_description for kind in KINDS}
    assert len(nameless) == len(KINDS)
    assert MegatronTokenizerView(of_kind("words")).unique_description in nameless
