"""Encoding and decoding, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from rollgraph.tokenizer import (
    Tokenizer,
    TokenizerError,
    TokenizerFiles,
)
from tests.tokenizer.kinds import (
    CORPUS,
    KINDS,
    TEXTS,
    assert_equal_to_peer,
    byte_level,
    of_kind,
    peer_of,
    write,
)


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_and_decoding_equal_transformers(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, kind)
    ours = Tokenizer.from_folder(folder)
    assert_equal_to_peer(ours, peer_of(folder))
    for special in (True, False):
        assert ours.encode_batch(TEXTS, special) == [ours.encode(text, special) for text in TEXTS]
    assert ours.encode_batch([]) == []


def test_special_adds_the_tokens_of_the_post_processor() -> None:
    tokenizer = of_kind("byte_level")
    plain = tokenizer.encode("fox", special=False)
    assert tokenizer.encode("fox") == [tokenizer.bos_id, *plain]
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert tokenizer.decode(tokenizer.encode("fox"), skip_special=False) == "<s>fox"


def test_truncation_and_padding_of_the_file_are_kept_but_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64)
    folder = write(tmp_path / "a", tokenizer_json=backend.to_str())
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode(CORPUS[0]) == of_kind("byte_level").encode(CORPUS[0])
    assert len(tokenizer.encode("fox")) < 64
    tokenizer.save(tmp_path / "b")
    assert (tmp_path / "b/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_vocab_size_counts_added_tokens_and_holes() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    backend.add_tokens(["<x>"])
    tokenizer = Tokenizer(TokenizerFiles(backend.to_str()))
    assert tokenizer.vocab == {"a": 0, "b": 7, "<x>": backend.token_to_id("<x>")}
    assert tokenizer.vocab_size == max(tokenizer.vocab.values()) + 1 >= 8
    assert tokenizer.decode([0, 7]) == "a b"
    for unknown_id in (-1, 3, tokenizer.vocab_size, 2**40):
        with pytest.raises(TokenizerError, match=rf"^id {unknown_id} is not in .* \({tokenizer.vocab_size} ids\)"):
            tokenizer.decode([0, unknown_id, -5])


@pytest.mark.parametrize("text", ["half of a pair: \ud83d", None, 5])
def test_a_value_that_is_not_text_is_named(text: Any) -> None:
    tokenizer = of_kind("words")
    for call in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_batch(["a", text])):
        with pytest.raises(TokenizerError, match=r"cannot encode .*not text, or has half a surrogate pair"):
            call()


def test_library_errors_name_the_text_that_caused_them() -> None:
    """It may be a bare Exception, or a panic, which is not an Exception. The next text is encoded normally."""
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": False}
    unknown = Tokenizer(TokenizerFiles(json.dumps({"added_tokens": [], "model": model})))
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}
    panics = Tokenizer(TokenizerFiles(json.dumps({"added_tokens": [], "model": model, "post_processor": processor})))
    for tokenizer, text, reason in ((unknown, "xyz", "unk_id"), (panics, "ab", "")):
        with pytest.raises(TokenizerError, match=rf"cannot encode '{text}': .*{reason}"):
            tokenizer.encode(text)
        with pytest.raises(TokenizerError, match=rf"cannot encode \['ab', '{text}'\]: .*{reason}"):
            tokenizer.encode_batch(["ab", text])
        with pytest.raises(TokenizerError, match=rf"cannot encode '{text}': .*{reason}"):
            tokenizer.encode_with_offsets(text)
        assert tokenizer.encode("ab", special=False) == [0, 1]
