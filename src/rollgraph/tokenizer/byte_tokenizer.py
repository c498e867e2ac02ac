"""A tokenizer that needs no files: bytes. And loading whichever a folder holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rollgraph.tokenizer.files import TokenizerError, TokenizerFiles
from rollgraph.tokenizer.tokenizer import Tokenizer


def _make_byte_json() -> str:
    # ByteLevel spells each byte as one visible character: itself, or the next one from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    vocab = {chr(byte if byte in visible else next(spare)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": 256 + i, "content": f"<|{name}|>", **flags} for i, name in enumerate(("bos", "eos", "pad"))]
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"added_tokens": special, "pre_tokenizer": level, "decoder": level, "model": model})


_BYTE_CHAT = """\
{{ bos_token }}
{%- if tools %}tools: {{ tools | tojson }}{{ eos_token }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
_BYTE_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_BYTE_CONFIG = {**_BYTE_TOKENS, "chat_template": _BYTE_CHAT}
_BYTE_FILES = TokenizerFiles(_make_byte_json(), _BYTE_CONFIG, name="ByteTokenizer")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then bos, eos and pad; `encode` adds none of these by itself.

    It is a tokenizer.json like any other, so transformers reads its folder too. Bytes that are no UTF-8 decode to
    U+FFFD, as by `bytes.decode(errors="replace")`.
    """

    def __init__(self, files: TokenizerFiles = _BYTE_FILES) -> None:
        if files.tokenizer_json != _BYTE_FILES.tokenizer_json:
            raise TokenizerError(f"{files.name}: its tokenizer.json is of another kind; use load_tokenizer")
        super().__init__(files)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a folder; a ByteTokenizer if one was saved there."""
    files = TokenizerFiles.read(Path(folder))
    return (ByteTokenizer if files.tokenizer_json == _BYTE_FILES.tokenizer_json else Tokenizer)(files)
