"""Streams of ids, compared with decoding all ids in one call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rollgraph.tokenizer import (
    Detokenizer,
    Tokenizer,
    TokenizerError,
    TokenizerFiles,
)
from rollgraph.tokenizer.detokenizer import make_token_texts
from tests.tokenizer.kinds import BYTES, CONFIG, CORPUS, JSON, KINDS, byte_fallback, of_kind, peer_of, token, write

STREAMED: dict[str, Tokenizer] = {kind: of_kind(kind) for kind in KINDS} | {"bytes": BYTES}


def with_decoder(decoder: decoders.Decoder) -> Tokenizer:
    backend = byte_fallback()
    backend.decoder = decoder
    return Tokenizer(TokenizerFiles(backend.to_str(), CONFIG))


def make_clip_like() -> Tokenizer:
    """As in CLIP: the last part of a word ends with </w>, which decodes to a space except at the very end."""
    backend = Backend(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, end_of_word_suffix="</w>"))
    return Tokenizer(TokenizerFiles(backend.to_str()))


STREAMED["metaspace"] = with_decoder(decoders.Metaspace())
STREAMED["bytes, metaspace"] = with_decoder(
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
)
STREAMED["ends"] = make_clip_like()


def stream(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> list[str]:
    """The new text after each id, then the rest."""
    detokenizer = Detokenizer(tokenizer, skip_special)
    pieces = [detokenizer.push(i) for i in ids]
    assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces


@pytest.mark.parametrize("kind", STREAMED)
@given(data=st.data())
def test_a_stream_of_any_ids_equals_decoding_them(kind: str, data: st.DataObject) -> None:
    tokenizer = STREAMED[kind]
    favourites = sorted({*tokenizer.special_ids, *tokenizer.byte_ids, *tokenizer.encode("🚀日 a", special=False)})
    special_or_byte = st.sampled_from(favourites) if favourites else st.nothing()
    ids = data.draw(st.lists(special_or_byte | st.sampled_from(sorted(tokenizer.vocab.values())), max_size=40))
    skip = data.draw(st.booleans())
    pieces = stream(tokenizer, ids, skip)
    whole = tokenizer.decode(ids, skip)
    assert "".join(pieces) == whole  # so the text so far is a prefix of the text of every continuation
    if not tokenizer.byte_ids:  # and only a character that may be incomplete was held back
        emitted = ""
        for end, piece in enumerate(pieces[:-1], 1):
            emitted += piece
            assert len(tokenizer.decode(ids[:end], skip)) - len(emitted) <= 1


def test_an_emoji_comes_out_whole() -> None:
    assert stream(BYTES, list("a🚀é".encode())) == ["a", "", "", "", "🚀", "", "é", ""]
    tokenizer = of_kind("byte_level")
    fox = tokenizer.encode("🦊", special=False)
    assert len(fox) == 3
    assert stream(tokenizer, [*fox, *fox]) == ["", "", "🦊", "", "", "🦊", ""]


def test_invalid_bytes_become_replacement_characters() -> None:
    assert stream(BYTES, [0xE2, 0x82, 65, 0xFF, 0xFF, 66]) == ["", "", "\ufffdA", "", "\ufffd", "\ufffdB", ""]
    assert stream(BYTES, [65, 0xF0, 0x9F]) == ["A", "", "", "\ufffd"]  # cut off
    real = stream(BYTES, [*"\ufffd".encode(), 65])
    assert "".join(real) == "\ufffdA"


def test_metaspace_tokens_keep_their_spaces_but_the_first() -> None:
    tokenizer = of_kind("byte_fallback")
    ids = [tokenizer.vocab[token] for token in ("▁the", "▁dog", "</s>", "▁the", "▁▁", "▁the")]
    assert stream(tokenizer, ids) == ["the", " dog", "", " the", "  ", " the", ""]


def test_fallback_bytes_wait_for_the_end_of_their_run() -> None:
    tokenizer = of_kind("byte_fallback")
    euro = [tokenizer.vocab[f"<0x{byte:02X}>"] for byte in "€".encode()]
    the = tokenizer.vocab["▁the"]
    assert stream(tokenizer, [the, *euro, the]) == ["the", "", "", "", "€ the", ""]
    assert stream(tokenizer, euro) == ["", "", "", "€"]
    # with one more byte, the decoder accepts none of them as a character: nothing came out too early
    assert stream(tokenizer, [*euro, euro[0], the])[-2] == "\ufffd" * 4 + " the"


def test_pending_text_is_known_before_the_stream_ends() -> None:
    tokenizer = of_kind("byte_fallback")
    newline, *euro = [tokenizer.vocab[f"<0x{byte:02X}>"] for byte in "\n€".encode()]
    stream = Detokenizer(tokenizer)
    seen = []
    for id in (newline, newline, *euro):
        assert stream.push(id) == ""
        seen.append(stream.pending())
    assert seen == ["\n", "\n\n", "", "", "\n\n€"]  # an incomplete character hides its whole run
    assert stream.finish() == "\n\n€"


def test_special_tokens_are_skipped_or_kept_in_a_stream() -> None:
    tokenizer = of_kind("byte_level")
    ids = tokenizer.encode("<|im_start|>fox<|im_end|> dog")
    assert "".join(stream(tokenizer, ids)) == "fox dog"
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "<s><|im_start|>fox<|im_end|> dog"


def test_a_stream_skips_special_tokens_that_the_config_calls_ordinary(tmp_path: Path) -> None:
    """The tokenizers library still skips such a token. A stream must skip it too, and must not use it as context."""
    declared = {"2": token("</s>", special=False)}
    folder = write(tmp_path, "byte_fallback", tokenizer_config_json={"added_tokens_decoder": declared})
    tokenizer = Tokenizer.from_folder(folder)
    ids = [tokenizer.vocab["▁the"], 2, tokenizer.vocab["▁the"]]
    assert stream(tokenizer, ids) == ["the", "", " the", ""]
    assert tokenizer.decode(ids) == "the the" == peer_of(folder).decode(ids, skip_special_tokens=True)


def test_a_finished_stream_takes_no_more_ids() -> None:
    detokenizer = Detokenizer(BYTES)
    assert (detokenizer.finish(), detokenizer.finish(), detokenizer.text) == ("", "", "")
    with pytest.raises(TokenizerError, match="this stream is finished"):
        detokenizer.push(65)


def test_an_unknown_id_leaves_the_stream_as_it_was() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.push(0xC3)
    with pytest.raises(TokenizerError, match="id 300 "):
        detokenizer.push(300)
    assert detokenizer.push(0xA9) == "é"


class CountingTokenizer(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("byte_level", ["f", "Ġdog", "Ã"]),
        ("byte_level", ["ÿ"]),
        ("byte_level", ["ð", "Ł"]),
        ("byte_fallback", ["<0xE2>", "<0x82>"]),
        ("byte_fallback", ["▁the", "<0xE2>"]),
    ],
)
def test_a_stream_costs_the_same_for_each_id(kind: str, tokens: list[str]) -> None:
    tokenizer = CountingTokenizer(TokenizerFiles(JSON[kind], CONFIG))
    draw = random.Random(0)
    ids = [tokenizer.vocab[draw.choice(tokens)] for _ in range(3000)]
    _ = tokenizer.byte_ids
    tokenizer.decoded = 0
    assert "".join(stream(tokenizer, ids)) == Tokenizer.decode(tokenizer, ids)
    assert tokenizer.decoded < 20 * len(ids)


@pytest.mark.parametrize("kind", STREAMED)
def test_token_texts_join_to_the_decoded_text(kind: str) -> None:
    tokenizer = STREAMED[kind]
    ids = tokenizer.encode("Grüße, 日本 🎉!")
    texts = make_token_texts(tokenizer)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special=False)
    assert make_token_texts(tokenizer)([]) == []
    assert make_token_texts(tokenizer)([ids[-1], 10**6])[1].startswith("<1000000>")
