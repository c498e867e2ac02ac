"""`ByteTokenizer`: an id for each byte, and three special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgraph.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)
from tests.tokenizer.kinds import BYTES, CHATS, assert_equal_to_peer, peer_of, write

NO_SPECIAL = st.text().filter(lambda text: "<|" not in text)


@given(NO_SPECIAL)
def test_bytes_are_ids(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.encode_batch([text, text], special=False) == [ids, ids]


@given(st.lists(st.integers(0, 258)))
def test_invalid_bytes_decode_as_in_python(ids: list[int]) -> None:
    assert BYTES.decode(ids) == bytes(i for i in ids if i < 256).decode(errors="replace")
    text = b"".join(bytes([i]) if i < 256 else (b"<|bos|>", b"<|eos|>", b"<|pad|>")[i - 256] for i in ids)
    assert BYTES.decode(ids, skip_special=False) == text.decode(errors="replace")


def test_bytes_and_special_tokens_have_fixed_ids() -> None:
    assert (BYTES.bos_id, BYTES.eos_id, BYTES.pad_id, BYTES.vocab_size) == (256, 257, 258, 259)
    assert (BYTES.unk_id, BYTES.cls_id, BYTES.sep_id, BYTES.mask_id) == (None,) * 4
    assert BYTES.stop_ids == {257}
    assert BYTES.special_ids == {256, 257, 258}
    assert len(BYTES.vocab) == 259
    assert BYTES.encode("é<|eos|>") == [195, 169, 257]
    with pytest.raises(TokenizerError, match=r"id 259 is not in the vocabulary of ByteTokenizer \(259 ids\)"):
        BYTES.decode([259])


def test_byte_tokenizers_have_a_chat_template() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert BYTES.render_chat(chat) == "<|bos|>user: hi<|eos|>\nassistant: yo<|eos|>\nassistant: "
    assert BYTES.encode_chat(chat[:1], add_generation_prompt=False) == [256, *b"user: hi", 257, 10]
    # after the prompt comes the text that the model should write
    assert BYTES.render_chat(chat, add_generation_prompt=False).startswith(BYTES.render_chat(chat[:1]) + "yo<|eos|>")
    assert BYTES.render_chat([], tools=[{"a": "ü"}]) == '<|bos|>tools: [{"a": "ü"}]<|eos|>\nassistant: '


def test_a_byte_tokenizer_is_saved_like_any_other(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    for loaded in (load_tokenizer(tmp_path), ByteTokenizer.from_folder(tmp_path)):
        assert type(loaded) is ByteTokenizer
        assert_equal_to_peer(loaded, peer_of(tmp_path))
        assert loaded.encode_chat(CHATS[0]) == BYTES.encode_chat(CHATS[0])
    assert peer_of(tmp_path).apply_chat_template(CHATS[0], tokenize=False) == BYTES.render_chat(
        CHATS[0], add_generation_prompt=False
    )
    other_kind = write(tmp_path / "other")
    assert type(load_tokenizer(other_kind)) is Tokenizer
    with pytest.raises(TokenizerError, match=r"other: its tokenizer.json is of another kind; use load_tokenizer"):
        ByteTokenizer.from_folder(other_kind)
