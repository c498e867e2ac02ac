"""A tokenizer of bytes, which needs no files; and `load_tokenizer`, which loads whichever tokenizer a folder holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rollgraph.tokenizer.files import TokenizerError, TokenizerFiles
from rollgraph.tokenizer.tokenizer import Tokenizer

_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 256, 257 and 258


def _make_byte_json() -> str:
    """A tokenizer.json whose vocabulary is the 256 bytes and the special tokens."""
    # ByteLevel spells each byte as one visible character: the byte itself, or the next unused one from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = 0x100
    vocab = {}
    for byte in range(256):
        if byte in visible:
            vocab[chr(byte)] = byte
        else:
            vocab[chr(spare)] = byte
            spare += 1
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": 256 + i, "content": text, **flags} for i, text in enumerate(_SPECIAL)]
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"added_tokens": special, "pre_tokenizer": level, "decoder": level, "model": model})


_BYTE_CHAT = """\
{{ bos_token }}
{%- if tools %}tools: {{ tools | tojson }}{{ eos_token }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
_BYTE_CONFIG = {
    "bos_token": _SPECIAL[0],
    "eos_token": _SPECIAL[1],
    "pad_token": _SPECIAL[2],
    "chat_template": _BYTE_CHAT,
}
_BYTE_FILES = TokenizerFiles(_make_byte_json(), _BYTE_CONFIG, name="ByteTokenizer")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then bos, eos and pad, none of which `encode` adds.

    It has a tokenizer.json like any other tokenizer, so transformers can load its folder. Bytes that are not valid
    UTF-8 decode to U+FFFD, as with `bytes.decode(errors="replace")`.
    """

    def __init__(self, files: TokenizerFiles = _BYTE_FILES) -> None:
        if not _is_of_bytes(files):
            raise TokenizerError(f"{files.name}: its tokenizer.json is of another kind; use load_tokenizer")
        super().__init__(files)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | ByteTokenizer:
    """Load the tokenizer of a folder; a ByteTokenizer if one was saved there."""
    files = TokenizerFiles.read(Path(folder))
    if _is_of_bytes(files):
        return ByteTokenizer(files)
    return Tokenizer(files)


def _is_of_bytes(files: TokenizerFiles) -> bool:
    return files.tokenizer_json == _BYTE_FILES.tokenizer_json
